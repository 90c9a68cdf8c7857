"""The pre-flight against scripted servers on real sockets: what it finds, what it changes, and how it says no."""

import asyncio
import json
import socket
import ssl
from contextlib import asynccontextmanager

import pytest
import trustme
from load_process_script import Script, models, page, refuse, stream

from lpxtop.errors import TargetError, UsageError
from lpxtop.load.negotiate import preflight
from lpxtop.load.servers import busy_in
from lpxtop.load.shape import calibrate, change_for, first_shape, named_in
from lpxtop.plan import Limits, Negotiated, Network, Plan, Prompts, Sampling, Secrets, Target


def plan(server, model=None, **more):
    return Plan(target=Target(url=server.url, model=model), **more)


def script(answer_to_probe, listed=None, extra=None):
    """A server with one model; `answer_to_probe(body)` answers requests, `extra` other paths."""

    def answer(path, headers, body):
        if path == "/v1/models":
            return listed or models("m")
        if path.endswith("/completions"):
            return answer_to_probe(body)
        return (extra or {}).get(path) or page({"detail": "Not Found"}, 404)

    return Script(answer)


def strict(*fields):
    """A server that names one field it does not know, as long as such a field is sent."""

    def answer(body):
        options = body.get("stream_options") or {}
        for field in fields:
            if field in body or field in options:
                return refuse(f"Unrecognized request argument supplied: {field}")
        return stream(continuous=bool(options.get("continuous_usage_stats")))

    return answer


# --- the request shape ---------------------------------------------------------------------------------------------

ALL = Negotiated(include_usage=True, continuous_usage=True, ignore_eos=True, min_tokens=True)


@pytest.mark.parametrize(
    ("rejected", "expected", "requests"),
    [
        ((), {}, 1),
        (("ignore_eos",), {"ignore_eos": False}, 2),
        (("min_tokens",), {"min_tokens": False}, 2),
        (("continuous_usage_stats",), {"continuous_usage": False}, 2),
        (("stream_options",), {"include_usage": False, "continuous_usage": False}, 2),
        (("max_tokens",), {"limit_parameter": "max_completion_tokens"}, 2),
        (("min_tokens", "ignore_eos", "continuous_usage_stats"),
         {"min_tokens": False, "ignore_eos": False, "continuous_usage": False}, 4),
    ],
)  # fmt: skip
async def test_one_change_per_retry(rejected, expected, requests):
    """Each refusal that names a field costs one retry without that field, and nothing else changes."""
    async with script(strict(*rejected)) as server:
        found = await preflight(plan(server), Secrets())

    shape = found.negotiated
    for field in ("include_usage", "continuous_usage", "ignore_eos", "min_tokens", "limit_parameter"):
        assert getattr(shape, field) == expected.get(field, getattr(ALL, field)), field
    assert len(server.probes()) == requests
    assert all(("max_tokens" in body) != ("max_completion_tokens" in body) for body in server.probes())


@pytest.mark.parametrize(
    ("refusal", "field"),
    [
        ({"error": {"message": "Unsupported parameter", "param": "max_tokens"}}, "max_tokens"),
        ({"error": {"message": "Unsupported parameter: 'max_tokens' is not supported with this model. "
                    "Use 'max_completion_tokens' instead."}}, "max_tokens"),
        ({"detail": [{"type": "extra_forbidden", "loc": ["body", "stream_options"], "msg": "Extra inputs"}]},
         "stream_options"),
        ({"message": "unknown field `ignore_eos`"}, "ignore_eos"),
        ({"error": "json: unknown field \"min_tokens\""}, "min_tokens"),
        ({"error": {"message": "stream_options.continuous_usage_stats: extra"}}, "continuous_usage_stats"),
        ({"error": {"message": "out of memory"}}, None),
        ({"detail": [{"type": "missing", "loc": ["body", "name"], "msg": "Field required",
                      "input": {"max_tokens": 8, "ignore_eos": True}}]}, None),
    ],
)  # fmt: skip
def test_the_field_a_server_names(refusal, field):
    """Message, parameter and location name a field; an echo of the request does not."""
    change = change_for(ALL, named_in(json.dumps(refusal).encode()))

    assert (change and change[0]) == field


async def test_a_server_that_refuses_whatever_it_gets():
    """When the field it names is gone already, its own words are the error."""
    async with script(lambda body: refuse("max_completion_tokens and max_tokens are both wrong")) as server:
        with pytest.raises(TargetError) as caught:
            await preflight(plan(server), Secrets())

    assert "max_completion_tokens and max_tokens are both wrong" in str(caught.value)
    assert len(server.probes()) == 2


async def test_the_probe_has_the_real_shape():
    """The probe is one request as the run will send them, with 8 tokens and extra_body."""
    async with script(lambda body: stream()) as server:
        sampling = Sampling(max_tokens=500, temperature=0.5, extra_body={"seed": 1})
        await preflight(plan(server, sampling=sampling), Secrets())

    (body,) = server.probes()
    assert body["max_tokens"] == body["min_tokens"] == 8
    assert body["temperature"] == 0.5
    assert body["seed"] == 1
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert body["messages"][0]["content"].startswith("[probe-")


async def test_continuous_usage_must_be_seen_to_be_kept():
    """A server that takes the option and ignores it does not count tokens continuously."""
    async with script(lambda body: stream(continuous=False)) as ignoring:
        without = await preflight(plan(ignoring), Secrets())
    async with script(lambda body: stream(continuous=True)) as counting:
        seen = await preflight(plan(counting), Secrets())

    assert without.negotiated.continuous_usage is False
    assert without.negotiated.include_usage is True
    assert seen.negotiated.continuous_usage is True


async def test_no_usage_and_an_ignored_limit_are_said():
    """What the answer shows to be missing becomes a note."""
    async with script(lambda body: stream(usage=False)) as silent:
        found = await preflight(plan(silent), Secrets())
    async with script(lambda body: stream(tokens=40)) as chatty:
        endless = await preflight(plan(chatty), Secrets())

    assert any("no usage" in note for note in found.notes)
    assert any("ignores max_tokens" in note for note in endless.notes)


async def test_an_answer_in_one_piece_is_said():
    """A stream was asked for and JSON came: usable, but without TTFT."""
    answer = {"choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}
    async with script(lambda body: page(answer)) as server:
        found = await preflight(plan(server), Secrets())

    assert any("one piece" in note for note in found.notes)
    assert found.probe_prompt_tokens == 9


async def test_an_error_inside_the_stream():
    """HTTP 200 with an error in its stream is a refusal."""
    body = b'data: {"error": {"message": "engine is dead"}}\n\ndata: [DONE]\n\n'
    async with script(lambda _: (200, {"content-type": "text/event-stream"}, body)) as server:
        with pytest.raises(TargetError, match="engine is dead"):
            await preflight(plan(server), Secrets())


# --- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "words", "usual", "expected"),
    [
        (130, 106, 22, (1.0, 24)),  # the usual vocabulary: what is not words is overhead
        (506, 490, 22, (1.0, 16)),
        (670, 100, 22, (6.48, 22)),  # one token per character
        (172, 100, 22, (1.5, 22)),  # a server that counts characters / 4
        (20, 400, 22, None),  # one that leaves out what it had cached
        (5000, 100, 22, None),
    ],
)
def test_calibration_by_hand(tokens, words, usual, expected):
    """Words are tokens, or the vocabulary is another one, or the count is not believed."""
    assert calibrate(tokens, words, usual) == expected


async def test_prompts_have_the_asked_length_after_the_probe():
    """A server that counts 3 tokens per word and 30 beside: prompts of 300 tokens really have about 300."""

    def count(body):
        return 30 + 3 * (len(body["messages"][0]["content"].split()) - 1)

    async with script(lambda body: stream(prompt_tokens=count(body))) as server:
        found = await preflight(plan(server, prompts=Prompts(tokens=300)), Secrets())

    words = found.prompts["words"]
    assert 30 + 3 * words == pytest.approx(300, abs=12)
    assert found.prompts["tokens"] == pytest.approx(300, abs=3)
    assert found.prompts["source"] == "synthetic"


async def test_a_bad_prompt_file_is_found_before_any_load(tmp_path):
    """The file's mistake ends the pre-flight with its line."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    async with script(lambda body: stream()) as server:
        with pytest.raises(UsageError, match=r"p\.jsonl:2"):
            await preflight(plan(server, prompts=Prompts(path=str(file))), Secrets())


# --- models --------------------------------------------------------------------------------------------------------


async def test_the_only_model_is_taken():
    """One model served and none named: it is that one."""
    async with script(lambda body: stream(), models("the-one")) as server:
        found = await preflight(plan(server), Secrets())

    assert found.model == "the-one"
    assert found.models == found.negotiated.models == ("the-one",)
    assert server.probes()[0]["model"] == "the-one"


async def test_an_adapter_is_not_a_second_model():
    """A base model with LoRA adapters: the base is meant."""
    listed = page({"data": [{"id": "base", "parent": None}, {"id": "lora", "parent": "base"}]})
    async with script(lambda body: stream(), listed) as server:
        assert (await preflight(plan(server), Secrets())).model == "base"


async def test_several_models_must_be_chosen_from():
    """Two models and none named: the error lists them and says how to choose."""
    async with script(lambda body: stream(), models("a", "b")) as server:
        with pytest.raises(TargetError, match="2 models: a, b") as caught:
            await preflight(plan(server), Secrets())

    assert "-m" in caught.value.hint
    assert server.probes() == []


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (404, "The model `nope` does not exist."),
        (404, 'model "nope" not found, try pulling it first'),
        (400, "Invalid model name passed in model=nope"),
    ],
)
async def test_a_wrong_model_names_the_served_ones(status, message):
    """The server's refusal becomes one that lists what it serves."""
    async with script(lambda body: refuse(message, status), models("llama", "gemma")) as server:
        with pytest.raises(TargetError, match="does not know the model nope") as caught:
            await preflight(plan(server, "nope"), Secrets())

    assert "llama, gemma" in caught.value.hint


async def test_a_wrong_model_without_a_probe():
    """With no probe to ask, the list decides."""
    async with script(lambda body: stream(), models("llama")) as server:
        with pytest.raises(TargetError, match="does not know the model nope"):
            await preflight(plan(server, "nope"), Secrets(), probe=False)

    assert server.probes() == []


async def test_a_server_that_ignores_names():
    """llama.cpp answers whatever the name: usable, with a note."""
    async with script(lambda body: stream(), models("gemma", owned_by="llamacpp")) as server:
        found = await preflight(plan(server, "nope"), Secrets())

    assert found.model == "nope"
    assert any("nope is not among the listed models (gemma)" in note for note in found.notes)


async def test_a_server_without_a_list():
    """404 on /models is tolerated when the model is named, and asks for a name otherwise."""
    async with script(lambda body: stream(), page({}, 404)) as server:
        assert (await preflight(plan(server, "m"), Secrets())).model == "m"
        with pytest.raises(TargetError, match=r"/v1/models lists no models \(HTTP 404\)") as caught:
            await preflight(plan(server), Secrets())

    assert "-m" in caught.value.hint


async def test_another_kind_of_server():
    """A web page where the list should be: not an OpenAI API, and the path is suspected."""
    html = (200, {"content-type": "text/html"}, b"<html>Grafana</html>")
    async with script(lambda body: stream(), html) as server:
        with pytest.raises(TargetError, match="answers text/html: no OpenAI API") as caught:
            await preflight(plan(server), Secrets())

    assert "/v1" in caught.value.hint


async def test_a_key_that_may_not_list_models():
    """403 on /models alone: a named model is probed, and the run goes on."""
    async with script(lambda body: stream(), refuse("missing scope", 403)) as server:
        found = await preflight(plan(server, "m"), Secrets(api_key="k"))

    assert found.model == "m"
    assert any("lists no models (/models: HTTP 403)" in note for note in found.notes)


async def test_plain_http_where_tls_is_wanted():
    """What nginx says to plain http on a TLS port."""
    listed = (400, {"content-type": "text/html"}, b"The plain HTTP request was sent to HTTPS port")
    async with script(lambda body: stream(), listed) as server:
        with pytest.raises(TargetError, match="wants TLS"):
            await preflight(plan(server), Secrets())


# --- which server, how busy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owned_by", "pages", "expected"),
    [
        ("vllm", {"/version": page({"version": "0.32.0"})}, ("vLLM", "0.32.0")),
        ("someone", {"/version": page({"version": "0.32.0"})}, ("vLLM", "0.32.0")),
        ("llamacpp", {"/props": page({"build_info": "b10434"})}, ("llama.cpp", "b10434")),
        ("library", {"/api/version": page({"version": "0.9"})}, ("Ollama", "0.9")),
        ("someone", {"/info": page({"version": "3.3", "max_total_tokens": 4096})}, ("TGI", "3.3")),
        ("sglang", {"/get_server_info": page({"version": "0.5", "tp_size": 1})}, ("SGLang", "0.5")),
        ("vllm", {}, ("vLLM", None)),
        ("someone", {}, (None, None)),
    ],
)
async def test_which_server_it_is(owned_by, pages, expected):
    """From the owner of its models, and the place where its kind tells the version."""
    async with script(lambda body: stream(), models("m", owned_by=owned_by), pages) as server:
        found = await preflight(plan(server), Secrets())

    assert (found.negotiated.server_kind, found.negotiated.server_version) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 2\n'
         'vllm:num_requests_waiting{engine="0"} 4\nvllm:num_requests_waiting_by_reason{reason="capacity"} 4\n', 9),
        ("# HELP x\nllamacpp:requests_processing 1\nllamacpp:requests_deferred 0\n", 1),
        ("vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n", 0),
        ("vllm:num_requests_running NaN\n", None),
        ("process_cpu_seconds_total 3\n", None),
        ("<html>", None),
    ],
)  # fmt: skip
def test_how_busy(text, expected):
    """Running plus waiting over all engines; unknown is None."""
    assert busy_in(text) == expected


async def test_busy_is_asked_before_the_probe():
    """The probe must not count itself."""
    pages = {"/metrics": (200, {"content-type": "text/plain"}, b"vllm:num_requests_running 2\n")}
    async with script(lambda body: stream(), extra=pages) as server:
        found = await preflight(plan(server), Secrets())

    paths = [path for path, _, _ in server.asked]
    assert found.busy == 2
    assert paths.index("/metrics") < paths.index("/v1/chat/completions")


# --- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403])
async def test_no_key(status):
    """A server that wants a key: the error says which variable to set."""
    async with script(lambda body: stream(), refuse("who are you", status)) as server:
        with pytest.raises(TargetError, match="wants a key") as caught:
            await preflight(plan(server), Secrets())

    assert "LPXTOP_API_KEY" in caught.value.hint


async def test_a_refused_key_is_not_repeated():
    """A refused key is called refused; the key the server echoes is not shown."""
    answer = refuse("Incorrect API key provided: sk-very-secret-123.", 401)
    async with script(lambda body: answer) as server:
        with pytest.raises(TargetError, match="key was refused") as caught:
            await preflight(plan(server), Secrets(api_key="sk-very-secret-123"))

    assert "sk-very-secret-123" not in " ".join(caught.value.lines())
    assert all(headers["authorization"] == "bearer sk-very-secret-123" for _, headers, _ in server.asked)


async def test_the_users_headers_win():
    """A header of the user's own replaces the key's."""
    async with script(lambda body: stream()) as server:
        await preflight(plan(server), Secrets(api_key="k", headers={"Authorization": "Basic x", "X-Team": "t"}))

    assert {headers["authorization"] for _, headers, _ in server.asked} == {"basic x"}
    assert {headers["x-team"] for _, headers, _ in server.asked} == {"t"}


async def test_a_redirect_never_gets_the_key():
    """Redirects are not followed: the other origin hears nothing, and the error names it without its query."""
    async with script(lambda body: stream()) as other:
        there = (307, {"location": f"{other.url}/models?token=abc"}, b"")
        async with script(lambda body: stream(), there) as server:
            with pytest.raises(TargetError, match="redirects to") as caught:
                await preflight(plan(server), Secrets(api_key="k"))

    assert other.asked == []
    assert other.url in str(caught.value)
    assert "abc" not in str(caught.value)


# --- not ready, not there ------------------------------------------------------------------------------------------


async def test_a_loading_server_is_waited_for():
    """503 twice, then ready: two lines of countdown, then the result."""
    answers = [page({"error": {"code": 503, "message": "Loading model"}}, 503)] * 2 + [models("m")]
    lines = []

    def answer(path, headers, body):
        return answers.pop(0) if path == "/v1/models" else stream() if body else page({}, 404)

    async with Script(answer) as server:
        found = await preflight(plan(server), Secrets(), on_wait=lines.append, wait_s=10.0, poll_s=0.01)

    assert found.model == "m"
    assert len(lines) == 2
    assert "Loading model" in lines[0]
    assert "10 s" in lines[0]


async def test_a_server_that_never_gets_ready():
    """Patience is bounded."""
    async with script(lambda body: page({"error": {"message": "Loading model"}}, 503)) as server:
        with pytest.raises(TargetError, match="still not ready after 0 s: Loading model"):
            await preflight(plan(server), Secrets(), wait_s=0.03, poll_s=0.01)

    assert len(server.probes()) == 4


async def test_a_rate_limit_is_waited_out():
    """429 with Retry-After, then an answer."""
    answers = [(429, {"retry-after": "0.01"}, b"{}"), stream()]
    async with script(lambda body: answers.pop(0)) as server:
        found = await preflight(plan(server), Secrets())

    assert found.model == "m"
    assert len(server.probes()) == 2


async def test_nothing_listens():
    """Connection refused: where, and what to look at."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        target = Plan(target=Target(url=f"http://127.0.0.1:{port}/v1"))
        with pytest.raises(TargetError, match=f"nothing listens on 127.0.0.1:{port}") as caught:
            await preflight(target, Secrets())

    assert caught.value.hint == "is the server running, on that port?"


async def test_an_unknown_name():
    """A name that does not resolve."""
    target = Plan(target=Target(url="http://no-such-host.invalid/v1"))
    with pytest.raises(TargetError, match=r"the name no-such-host\.invalid is not known"):
        await preflight(target, Secrets())


async def test_tls(tmp_path):
    """An unknown authority is refused with the way out; --cacert and --insecure are ways out."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(file)

    def answer(path, headers, body):
        return models("m") if path == "/v1/models" else stream() if body else page({}, 404)

    async with Script(answer, context) as server:
        with pytest.raises(TargetError, match="certificate of 127") as caught:
            await preflight(plan(server), Secrets())
        trusted = await preflight(plan(server, network=Network(cacert=str(file))), Secrets())
        anything = await preflight(plan(server, network=Network(insecure=True)), Secrets())

    assert "--cacert" in caught.value.hint
    assert trusted.model == anything.model == "m"


async def test_https_to_a_plain_server():
    """https where http is spoken: the error says so."""
    async with script(lambda body: stream()) as server:
        target = Plan(target=Target(url=server.url.replace("http", "https")))
        with pytest.raises(TargetError, match="does not speak TLS"):
            await preflight(target, Secrets())


@pytest.mark.parametrize(
    ("status", "expected", "hint"),
    [
        (502, "a gateway answers for", "behind it is down"),
        (405, "chat/completions is not there", "--api completions"),
        (500, "refuses the request \\(HTTP 500\\): it broke", ""),
    ],
)
async def test_other_refusals_of_the_probe(status, expected, hint):
    """A status that has its own words."""
    async with script(lambda body: refuse("it broke", status)) as server:
        with pytest.raises(TargetError, match=expected) as caught:
            await preflight(plan(server), Secrets())

    assert hint in caught.value.hint


@asynccontextmanager
async def listening(answer):
    """A server of `answer(reader, writer)`; yields a plan for it."""
    done = asyncio.Event()

    async def serve(reader, writer):
        await answer(reader, writer)
        writer.close()
        done.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    yield Plan(target=Target(url=url), limits=Limits(connect_s=0.1))
    server.close()
    await asyncio.wait_for(done.wait(), 2)


async def test_what_is_not_http_at_all():
    """Something listens and speaks another protocol."""

    async def answer(reader, writer):
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        await writer.drain()

    async with listening(answer) as target:
        with pytest.raises(TargetError, match="cannot be used") as caught:
            await preflight(target, Secrets())

    assert "https" in caught.value.hint


async def test_who_never_answers():
    """A connection and then silence: bounded by the connect limit for the list of models."""
    async with listening(lambda reader, writer: reader.read()) as target:
        with pytest.raises(TargetError, match="does not answer: no response in time"):
            await preflight(target, Secrets())


async def test_a_missing_certificate_file():
    """The file is named."""
    target = Plan(target=Target(url="https://127.0.0.1:1/v1"), network=Network(cacert="/no/such.pem"))
    with pytest.raises(UsageError, match=r"--cacert /no/such\.pem: No such file"):
        await preflight(target, Secrets())


async def test_a_wrong_path():
    """Neither list nor endpoint: the base URL is suspected."""
    async with script(lambda body: page({"detail": "Not Found"}, 404), page({}, 404)) as server:
        with pytest.raises(TargetError, match="chat/completions is not there") as caught:
            await preflight(plan(server, "m"), Secrets())

    assert "/v1" in caught.value.hint


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("This model's maximum context length is 2048 tokens", "--prompt-tokens"),
        ("Unsupported value: 'temperature' does not support 0", "--temperature 1"),
        ("no chat template is defined", "--api completions"),
    ],
)
async def test_refusals_with_advice(message, advice):
    """Known refusals come with the flag that helps."""
    async with script(lambda body: refuse(message)) as server:
        with pytest.raises(TargetError) as caught:
            await preflight(plan(server), Secrets())

    assert message in str(caught.value)
    assert advice in caught.value.hint


def test_first_shapes():
    """What a kind of server is known not to have is not even tried."""
    assert first_shape(Sampling(), "vLLM", "1") == Negotiated(
        continuous_usage=True, ignore_eos=True, min_tokens=True, server_kind="vLLM", server_version="1"
    )
    assert first_shape(Sampling(), "llama.cpp", None) == Negotiated(ignore_eos=True, server_kind="llama.cpp")
    assert first_shape(Sampling(), "Ollama", None) == Negotiated(server_kind="Ollama")
    assert first_shape(Sampling(stream=False, ignore_eos=False), None, None) == Negotiated(include_usage=False)
