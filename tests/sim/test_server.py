"""The simulated server over real sockets: protocol, truth log, metrics, trouble."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import httpx
import pytest

from lpxtop import __version__

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def server(*flags):
    process = subprocess.Popen(
        [sys.executable, "-m", "lpxtop.sim.server", "--port", "0", "--die-with-parent", *flags],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        yield process.stdout.readline().removeprefix("listening on ").strip()
    finally:
        process.terminate()
        process.wait(5)
        process.stdin.close()
        process.stdout.close()


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
    assert got[-2]["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"model": "nope"}, 404, "does not exist"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"max_tokens": 99_999}, 400, "maximum context length"),
        ({"stream": False, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ],
)
def test_bad_requests_are_refused_in_vllms_shape(url, fields, status, says):
    """Errors carry error.message, error.type and error.code."""
    answer = ask(url, **fields)

    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == status


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


def test_tokens_of_one_step_leave_together():
    """Eight concurrent streams: their n-th tokens are written within a few milliseconds of each other."""
    engine = json.dumps({"step_base_s": 0.05, "jitter": 0})
    with server("--stamp", "--engine", engine) as url:
        threads = [threading.Thread(target=ask, args=(url,), kwargs={"max_tokens": 10}) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        log = [json.loads(line) for line in httpx.get(f"{url}/sim/log").text.splitlines()]

    # streams may have joined one step apart: compare each write with the nearest one of the first stream
    reference = log[0]["writes"]
    for record in log[1:]:
        for write in record["writes"][1:-1]:
            assert min(abs(write - other) for other in reference) < 10e6 or write > reference[-1]


def test_trouble_can_be_made_and_ended_at_run_time():
    """Every second request is cut, then none; the log says which."""
    with server() as url:
        httpx.post(f"{url}/sim/trouble", json={"cut_every": 2})
        assert events(ask(url))[-1] == "[DONE]"
        with pytest.raises(httpx.RemoteProtocolError):
            ask(url)
        httpx.post(f"{url}/sim/trouble", json={})
        ask(url)
        ask(url)
        log = [json.loads(line) for line in httpx.get(f"{url}/sim/log").text.splitlines()]

    assert [record["outcome"] for record in log] == ["ok", "cut", "ok", "ok"]


def test_rate_limits_errors_in_streams_and_loading():
    """429 carries Retry-After, an error object ends a stream, 503 while loading."""
    with server("--trouble", '{"rate_limit_every": 2, "error_every": 3}') as url:
        ask(url)
        limited, failed = ask(url), ask(url)
    with server("--trouble", '{"loading_s": 1000}') as url:
        loading, health = ask(url), httpx.get(f"{url}/health")

    assert (limited.status_code, limited.headers["retry-after"]) == (429, "1")
    assert "error" in events(failed)[-2]
    assert (loading.status_code, health.status_code) == (503, 503)


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
