"""The simulated server over real sockets: protocol, truth log, metrics, trouble."""

import json
import socket
import time
import urllib.request

import httpx
import pytest
from sim_process import server

from lpxtop import __version__


@pytest.fixture(scope="module")
def url():
    with server("--stamp", "--seed", "3") as address:
        yield address


def ask(url, *, stream=True, api="chat/completions", **fields):
    body = {"model": "sim-8b", "stream": stream, "max_tokens": 6, "ignore_eos": True} | fields
    if api == "completions":
        body.setdefault("prompt", "tell me")
    else:
        body.setdefault("messages", [{"role": "user", "content": "hello there"}])
    return httpx.post(f"{url}/v1/{api}", json=body, timeout=20, headers={"x-request-id": fields.pop("name", "test")})


def events(answer):
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [json.loads(line) if line != "[DONE]" else line for line in lines]


def test_a_chat_stream_has_the_shape_of_vllms(url):
    """Role chunk first, one content chunk per token, the finish reason on the last one, usage, [DONE]."""
    got = events(ask(url, stream_options={"include_usage": True}))

    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(got) == 1 + 6 + 1 + 1
    assert [event["choices"][0]["finish_reason"] for event in got[1:7]] == [None] * 5 + ["length"]
    assert got[7]["choices"] == []
    # 11 characters are 3 tokens, plus 4 for the message and 3 for the answer's start
    assert got[7]["usage"] == {"prompt_tokens": 10, "total_tokens": 16, "completion_tokens": 6}
    assert got[8] == "[DONE]"


def test_completions_and_whole_answers(url):
    """The completions API streams text; without streaming the answer is one object with usage."""
    streamed = events(ask(url, api="completions"))
    whole = ask(url, stream=False).json()

    assert all(event["choices"][0]["text"] for event in streamed[:-1])
    assert len(streamed) == 7
    assert whole["usage"]["completion_tokens"] == 6
    assert whole["choices"][0]["message"]["content"]


def test_continuous_usage_counts_up(url):
    """With continuous_usage_stats each chunk carries the count so far."""
    got = events(ask(url, stream_options={"include_usage": True, "continuous_usage_stats": True}))

    assert [event["usage"]["completion_tokens"] for event in got[:-1]] == [0, 1, 2, 3, 4, 5, 6, 6]


def test_speculative_decoding_sends_several_tokens_per_chunk():
    """Four tokens per step, all accepted: 12 tokens come as one first token and then chunks of up to four."""
    with server("--tokens-per-step", "4", "--acceptance", "1.0") as url:
        got = events(ask(url, max_tokens=12, stream_options={"include_usage": True}))

    content = [event for event in got[:-2] if event["choices"][0].get("delta", {}).get("content")]
    assert len(content) == 4
    texts = [event["choices"][0]["delta"]["content"] for event in content]
    assert all(len(text.split()) >= tokens for text, tokens in zip(texts, (1, 4, 4, 3), strict=True))
    assert got[-2]["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"model": "nope"}, 404, "does not exist"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"max_tokens": 99_999}, 400, "maximum context length"),
        ({"stream": False, "stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"min_tokens": 7}, 400, "min_tokens must be less than or equal to max_tokens=6"),
        ({"min_tokens": "a"}, 400, "$.min_tokens"),
        ({"max_tokens": True}, 400, "$.max_tokens"),
        ({"stream_options": "x"}, 400, "$.stream_options"),
        ({"messages": [None]}, 400, "$.messages[0]"),
        ({"model": ["a"]}, 400, "$.model"),
        ({"n": 2}, 400, "n must be 1"),
        ({"api": "completions", "prompt": ""}, 400, "prompt"),
    ],
)
def test_bad_requests_are_refused_in_vllms_shape(url, fields, status, says):
    """Errors carry error.message, error.type and error.code."""
    answer = ask(url, **fields)

    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == status


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_request_is_a_400(url, body):
    """Whatever it is, the answer says so and the server goes on."""
    answer = httpx.post(f"{url}/v1/chat/completions", content=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadRequestError"
    assert ask(url).status_code == 200


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"max_tokens": None, "max_completion_tokens": 3}, 3),
        ({"max_completion_tokens": None}, 6),
        ({"max_tokens": None, "api": "completions"}, 16),
        ({"max_tokens": 50, "ignore_eos": False, "min_tokens": 50}, 50),
    ],
)
def test_limits_are_read_as_vllm_reads_them(url, fields, tokens):
    """Either name, null is absent, a completion's default is 16, and min_tokens holds back the end."""
    assert ask(url, stream=False, **fields).json()["usage"]["completion_tokens"] == tokens


def test_a_chat_without_a_limit_ends_by_itself(url):
    """Its length is drawn, its finish reason is `stop`."""
    whole = ask(url, stream=False, max_tokens=None, ignore_eos=False).json()

    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["usage"]["completion_tokens"] >= 1


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"prompt": "12345"}, 2),
        ({"prompt": [5, 6, 7]}, 3),
        ({"messages": [{"role": "system", "content": "1234"}, {"role": "user", "content": "12345678"}]}, 14),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "12345678"}]}]}, 9),
        ({"messages": [{"role": "assistant", "content": None}]}, 7),
    ],
)
def test_prompts_are_counted_by_the_declared_rule(url, fields, tokens):
    """Four characters a token, 4 per message, 3 for the answer's start; /tokenize and usage agree."""
    api = "completions" if "prompt" in fields else "chat/completions"
    counted = httpx.post(f"{url}/tokenize", json=fields).json()
    used = ask(url, api=api, stream=False, **fields).json()["usage"]

    assert counted["count"] == len(counted["tokens"]) == used["prompt_tokens"] == tokens


def test_what_cannot_be_tokenized_is_refused(url):
    """Nothing to count is a 400, as is a body that is none."""
    assert httpx.post(f"{url}/tokenize", json={}).status_code == 400
    assert httpx.post(f"{url}/tokenize", content=b"?").status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("POST", "/metrics", 405),
        ("DELETE", "/sim/trouble", 405),
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/", 200),
    ],
)
def test_paths_and_methods(url, method, path, status):
    """A wrong method names the right one, an unknown path is a 404, a last slash does not matter."""
    answer = httpx.request(method, f"{url}{path}")

    assert answer.status_code == status
    assert ("allow" in answer.headers) == (status == 405)


def raw(url, data):
    """Bytes in, everything that comes back until the server closes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as client:
        client.sendall(data)
        got = b""
        while piece := client.recv(65536):
            got += piece
    return got


def test_pipelined_requests_are_answered_in_order_and_head_has_no_body(url):
    """A HEAD, a stream and a GET in one write: three answers, one after the other, on one connection."""
    body = json.dumps({"model": "sim-8b", "prompt": "x", "max_tokens": 2, "ignore_eos": True, "stream": True}).encode()
    got = raw(url, b"HEAD /version HTTP/1.1\r\nhost: h\r\n\r\n"
                   b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n%b"
                   b"GET /version HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n" % (len(body), body))  # fmt: skip

    head, stream, last = got.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert head.endswith(b"\r\n\r\n")
    assert b"data: [DONE]\n\n\r\n0\r\n\r\n" in stream
    assert last.endswith(b'"simulated":true}')


def test_what_is_not_http_is_refused_and_closed(url):
    """Garbage gets a 400 and the end of the connection."""
    assert raw(url, b"\x16\x03\x01 hello\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_an_odd_model_name_is_still_json_and_a_label():
    """Quotes and backslashes in the name survive in chunks and in /metrics."""
    name = 'a"b\\c'
    with server("--model", name) as url:
        got = events(ask(url, model=name))
        metrics = httpx.get(f"{url}/metrics").text

    assert got[0]["model"] == name
    assert r'model_name="a\"b\\c"' in metrics


def test_the_key_is_asked_for():
    """With --api-key the API answers 401 without it, and health and metrics stay open."""
    with server("--api-key", "k") as url:
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer k"}).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 200


def test_log_metrics_and_client_agree():
    """What clients counted, what the log holds and what /metrics says are the same numbers."""
    with server("--stamp") as url:
        answers = [ask(url, max_tokens=n, stream_options={"include_usage": True}) for n in (3, 5, 7)]
        log = [json.loads(line) for line in httpx.get(f"{url}/sim/log").text.splitlines()]
        metrics = dict(
            line.rpartition(" ")[::2] for line in httpx.get(f"{url}/metrics").text.splitlines() if line[0] != "#"
        )

    used = [events(answer)[-2]["usage"] for answer in answers]
    assert [record["tokens"] for record in log] == [u["completion_tokens"] for u in used] == [3, 5, 7]
    assert [len(record["writes"]) for record in log] == [3, 5, 7]
    assert [record["prompt_tokens"] for record in log] == [u["prompt_tokens"] for u in used]
    labels = '{engine="0",model_name="sim-8b"}'
    assert float(metrics[f"vllm:generation_tokens_total{labels}"]) == 15
    assert float(metrics[f"vllm:prompt_tokens_total{labels}"]) == sum(u["prompt_tokens"] for u in used)
    assert float(metrics[f"vllm:time_to_first_token_seconds_count{labels}"]) == 3
    assert float(metrics[f"vllm:inter_token_latency_seconds_count{labels}"]) == 12


def test_a_client_that_leaves_frees_its_place(url):
    """Closing the connection in the middle aborts the request in the engine."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"model": "sim-8b", "stream": True, "max_tokens": 5000, "ignore_eos": True,
                       "messages": [{"role": "user", "content": "x"}]}).encode()  # fmt: skip
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\nx-request-id: leaver\r\ncontent-length: "
                       + str(len(body)).encode() + b"\r\n\r\n" + body)  # fmt: skip
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    deadline = time.monotonic() + 5
    while True:
        log = [json.loads(line) for line in urllib.request.urlopen(f"{url}/sim/log").read().splitlines()]
        outcome = next(record["outcome"] for record in log if record["request_id"] == "leaver")
        if outcome == "abort" or time.monotonic() > deadline:
            break
        time.sleep(0.05)

    assert outcome == "abort"


def test_everything_says_it_is_simulated(url):
    """The version, the owner of the model, the Server header and the GPU's name say SIM."""
    assert httpx.get(f"{url}/version").json()["simulated"] is True
    models = httpx.get(f"{url}/v1/models")
    assert models.json()["data"][0]["owned_by"] == "lpxtop-sim"
    assert models.headers["server"] == f"lpxtop-sim/{__version__}"
    assert httpx.get(f"{url}/sim/gpu").json()["gpus"][0]["name"].startswith("SIM")
