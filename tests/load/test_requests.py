"""Requests in bad weather, from `due` to their record: keys, redirects, proxies, dead connections. Real sockets."""

import asyncio
import base64
import contextlib
import json
import re
import ssl
import time

import pytest
import trustme
from wire_server import HEAD, LAST, RESET, WireServer, answer, chunk, event, sse

from lpxtop.errors import UsageError
from lpxtop.events import codec
from lpxtop.load.client import ArrivalsFrame, Client, RequestSpec, Stream
from lpxtop.load.scrub import scrubbed
from lpxtop.plan import Limits, Negotiated, Network, Plan, Sampling, Secrets, Target

X = {"choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]}
FINISH = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
GOOD = sse(X, FINISH, "[DONE]")


@contextlib.asynccontextmanager
async def client_of(url, *, secrets=None, limits=None, network=None, stream=True, api="chat"):
    """A started client for this URL."""
    plan = Plan(target=Target(url=url, model="m", api=api), sampling=Sampling(stream=stream),
                limits=limits or Limits(), network=network or Network())  # fmt: skip
    client = Client(plan=plan, negotiated=Negotiated(), secrets=secrets or Secrets(), origin_ns=time.monotonic_ns(),
                    src="load0")  # fmt: skip
    await client.start()
    try:
        yield client
    finally:
        await client.aclose()


def due(client, body=b"{}", id=1):
    spec = RequestSpec(id=id, slot=0, due_ns=time.monotonic_ns(), body=body, request_id=f"r{id}", max_tokens=64)
    return Stream(spec, client)


async def one(*scripts, body=b"{}", server=None, **more):
    """The record of one request to a server with these scripts."""
    async with WireServer(*scripts, **(server or {})) as wire, client_of(wire.url, **more) as client:
        return await client.send(due(client, body))


# --- what goes out ---------------------------------------------------------------------------------------------------


async def test_a_redirect_never_takes_the_key_elsewhere():
    """A 307 to another origin is a protocol error naming it, without user info and query; nobody is asked there."""
    async with WireServer(GOOD) as thief:
        to = f"location: http://u:p@127.0.0.1:{thief.port}/v1/chat/completions?token=t"
        secrets = Secrets(api_key="sk-canary-123456")
        async with WireServer(answer(307, b"", to)) as wire, client_of(wire.url, secrets=secrets) as client:
            finished = await client.send(due(client))

        assert (finished.outcome, finished.error_type, finished.status) == ("protocol_error", "redirect", 307)
        assert f"redirected to http://127.0.0.1:{thief.port}/v1/chat/completions;" in finished.error
        assert "token" not in finished.error
        assert thief.requests == []
        assert len(wire.requests) == 1


async def test_the_request_is_exactly_this():
    """The path by API, and the headers: nothing compresses, each request has its id, the user's headers win."""
    secrets = Secrets(api_key=" sk-1234567890\r\n", headers={"User-Agent": "mine", "X-Request-Id": "no", "X-A": " b "})
    async with WireServer(GOOD) as wire, client_of(wire.url, secrets=secrets, api="completions") as client:
        await client.send(due(client, b'{"prompt":"x"}'))

    assert wire.requests[0] == (
        b"POST /v1/completions HTTP/1.1\r\n"
        b"Host: 127.0.0.1:%d\r\naccept: */*\r\naccept-encoding: identity\r\ncontent-type: application/json\r\n"
        b"user-agent: mine\r\nauthorization: Bearer sk-1234567890\r\nx-a: b\r\nx-request-id: r1\r\n"
        b'Content-Length: 14\r\n\r\n{"prompt":"x"}' % wire.port
    )


@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", "a\nb", "a\0b"])
def test_a_header_cannot_smuggle_another(value):
    """A line break inside a header is a mistake of the user's, told before anything is sent, without its value."""
    with pytest.raises(UsageError, match="x-a") as caught:
        Client(plan=Plan(target=Target(url="http://h/v1")), negotiated=Negotiated(),
               secrets=Secrets(headers={"X-A": value}), origin_ns=0, src="load0")  # fmt: skip
    assert "Evil" not in str(caught.value)


# --- secrets and strangers' words ------------------------------------------------------------------------------------

KEYS = Secrets(api_key="k" * 20, headers={"X-Team": "blue", "X-Flag": "1"}, proxy_auth="me:hush-hush")


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (f"bad key {'k' * 20}!", "bad key …!"),
        ("no team blue, bluebird is fine, 10 of 1 left", "no team …, bluebird is fine, 10 of … left"),
        ("Authorization: Bearer abcdef123", "Authorization: Bearer …"),
        ("Incorrect API key provided: sk-proj-*****abcd.", "Incorrect API key provided: …"),
        ("gsk_abcdefgh, nvapi-abc-def-2, hf_abcdefgh", "…, …, …"),
        ("see http://user:pw@host/x", "see http://…@host/x"),
        ("me:hush-hush", "…"),
        ("a\x1b[31mred\x07\nline\u202e", "a [31mred line"),
        ("risk-free asking keeps words: task-oriented", "risk-free asking keeps words: task-oriented"),
    ],
)
def test_secrets_do_not_come_back(said, kept):
    """Own secrets, and whatever looks like one, are masked in a server's words; other words stay."""
    assert scrubbed(said, KEYS) == kept


def test_a_long_text_is_cut_after_it_was_scrubbed():
    """A key at the edge of the cut leaves no half of itself."""
    text = scrubbed("y" * 290 + " " + "k" * 20, KEYS)
    assert "kk" not in text
    assert len(text) <= 300


async def test_an_echo_of_everything_leaves_no_trace_in_the_record():
    """An error that repeats the whole request, in its message and its type: the line written holds no secret."""
    secrets = Secrets(api_key="canary-key-000", headers={"X-Org": "canary-org-111"})
    words = "canary-key-000 Bearer canary-key-000 canary-org-111"
    body = json.dumps({"error": {"message": words, "type": words, "code": words}}).encode()
    for script in (answer(500, body), answer(200, body), [HEAD, chunk(event(body.decode())), LAST]):
        line = codec.encode(await one(script, secrets=secrets))
        assert b"canary" not in line
        assert len(line) < 2000


# --- how it ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "script", "outcome", "words"),
    [
        ("events that are no JSON", sse("upstream error"), "protocol_error", "not JSON: upstream error"),
        ("plain text with 200", answer(200, b"Internal error"), "protocol_error", "Internal error"),
        ("an empty body", answer(200), "empty", "without a body"),
        ("204", [b"HTTP/1.1 204 No Content\r\n\r\n"], "empty", "HTTP 204"),
        ("201 with a stream", [HEAD.replace(b"200", b"201"), *GOOD[1:]], "ok", None),
        ("402", answer(402, b'{"error":{"message":"Insufficient credits","code":402}}'), "http_4xx", "Insufficient"),
        ("529", answer(529, b"Overloaded"), "http_5xx", "HTTP 529: Overloaded"),
        ("an error, then cut", [*sse(X, {"error": "boom"})[:-1], None], "stream_error", "boom"),
        ("an error body cut short", [answer(500, b"short")[0][:-2], None], "http_5xx", "HTTP 500: sho"),
        ("JSON cut short", [answer(200, b'{"choices":[{"message":{}}]}')[0][:-5], None], "truncated", "closed"),
        ("torn down in the middle", [HEAD, chunk(event(X)), 0.02, RESET], "truncated", None),
        ("finish, but the end is missing", [*sse(X, FINISH)[:-1], None], "truncated", "closed"),
        ("usage is all there is", sse({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 0}}), "empty",
         "no token"),
        ("a filter's stop", sse(X, {"choices": [{"delta": {}, "finish_reason": "content_filter"}]}), "ok", None),
        ("a whole answer and [DONE]", answer(200, b'{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}],'
         b'"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\ndata: [DONE]\n\n'), "not_streamed", "whole answer"),
    ],
)  # fmt: skip
async def test_more_ways_to_end(name, script, outcome, words):
    """Ends that look like something else at first sight."""
    finished = await one(script)

    assert finished.outcome == outcome, finished.error
    assert words is None or words in finished.error


async def test_a_few_bad_events_are_a_quirk_and_many_are_no_answer():
    """Ten undecodable events among tokens are flagged; eleven are a protocol error that repeats none of the text."""
    quirk = await one(sse(X, *["{oops"] * 10, FINISH, "[DONE]"))
    broken = await one(sse(X, *["{secret prose"] * 11, FINISH, "[DONE]"))

    assert (quirk.outcome, quirk.flags) == ("ok", ["bad_json"])
    assert (broken.outcome, broken.error) == ("protocol_error", "11 events of the stream are not JSON")


async def test_a_flooded_error_body_is_bounded():
    """3 MiB of HTML with a 502: the words are kept short, the body is not kept whole."""
    finished = await one(answer(502, b"<html><p>Bad Gateway " + b"<b>x</b>" * 400_000))

    assert finished.outcome == "http_5xx"
    assert finished.error.startswith("HTTP 502: Bad Gateway x x")
    assert len(finished.error) <= 300
    assert "oversize_body" in finished.flags


async def test_a_dead_connection_costs_one_retry_and_the_due_time_stays():
    """A request meets a dead connection: one retry, flagged; `due` is of the first try, `sent` of the second."""
    async with WireServer(GOOD, [0.05, None], GOOD) as wire, client_of(wire.url) as client:
        await client.send(due(client))
        stream = due(client, id=2)
        finished = await client.send(stream)

        assert (finished.outcome, finished.attempts, finished.connection) == ("ok", 2, "new")
        assert "stale_connection" in finished.flags
        assert client.stale_connections == 1
        assert finished.due == (stream.spec.due_ns - client.origin_ns) // 1000
        assert finished.sent - finished.due >= 50_000
        assert finished.first_token_us < 50_000
        ids = [re.search(rb"x-request-id: (\w+)", request)[1] for request in wire.requests]
        assert ids == [b"r1", b"r2", b"r2"]


async def test_it_can_be_cut_while_it_is_tried_again():
    """Between a dead connection and its retry nothing has ended: a cut still works, and so does a limit."""
    scripts, limits = (GOOD, [None], [HEAD, 30.0]), Limits(first_token_s=0.5)
    async with WireServer(*scripts) as wire, client_of(wire.url, limits=limits) as client:
        await client.send(due(client))
        stream = due(client)
        sending = asyncio.create_task(client.send(stream))
        async with asyncio.timeout(2):
            while len(wire.requests) < 3:
                await asyncio.sleep(0.005)
        stream.cut("cut")
        assert (await asyncio.wait_for(sending, 1)).outcome == "cut"
    async with WireServer(*scripts) as wire, client_of(wire.url, limits=limits) as client:
        await client.send(due(client))
        assert (await asyncio.wait_for(client.send(due(client)), 2)).outcome == "timeout"


async def test_a_server_that_does_not_read_is_a_time_out():
    """A request that cannot even be sent ends by the first token's limit, and says what hung; `sent` stays unknown."""
    finished = await one([30.0], body=b"x" * 20_000_000, limits=Limits(first_token_s=0.3), server={"reads_body": False})

    assert (finished.outcome, finished.error_type, finished.sent) == ("timeout", "WriteTimeout", None)


async def test_a_server_that_does_not_close_after_done(monkeypatch):
    """Everything was said, the end of the body never came: ok, flagged, and not held for the stall limit."""
    monkeypatch.setattr("lpxtop.load.stream.CLOSE_S", 0.2)
    begin = time.monotonic()
    finished = await one([*GOOD[:-1], 30.0])

    assert (finished.outcome, finished.chunks) == ("ok", 1)
    assert "not_closed" in finished.flags
    assert time.monotonic() - begin < 2


async def test_cut_before_it_was_sent():
    """A request cut before its turn came has a record: never sent, nothing measured."""
    async with WireServer(GOOD) as wire, client_of(wire.url) as client:
        stream = due(client)
        stream.cut("cancelled")
        finished = await client.send(stream)

        assert (finished.outcome, finished.sent, finished.end_us, finished.status) == ("cancelled", None, None, None)
        assert (finished.chunks, finished.output_tokens, finished.token_source) == (0, None, None)
        assert wire.requests == []


async def test_somebody_elses_cancel_is_not_swallowed():
    """Cancelling the task itself (the run is torn down) raises as usual, also when the request was being cut."""
    for cut in (False, True):
        async with WireServer([HEAD, 30.0]) as wire, client_of(wire.url) as client:
            stream = due(client)
            sending = asyncio.create_task(client.send(stream))
            async with asyncio.timeout(2):
                while stream.answer.status == 0:
                    await asyncio.sleep(0.005)
            if cut:
                stream.cut("cut")
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending


async def test_a_fault_of_ours_is_one_record(monkeypatch):
    """A bug met while reading one answer ends that request, flagged, and not the run."""

    def fail(*_):
        raise RuntimeError("mine")

    monkeypatch.setattr("lpxtop.load.answers.Answer.feed", fail)
    finished = await one(GOOD)

    assert (finished.outcome, finished.error, "client_fault" in finished.flags) == ("protocol_error", "mine", True)


async def test_without_streaming_an_error_is_an_error():
    """--no-stream: an error object with status 200 is no answer; HTML neither; an empty body is empty."""
    outcomes = [
        (await one(script, stream=False)).outcome
        for script in (answer(200, b'{"error":{"message":"m"}}'), answer(200, b"<html>hi</html>"), answer(200, b""))
    ]
    assert outcomes == ["stream_error", "protocol_error", "empty"]


async def test_completions_stream_text():
    """/completions: `text` bears tokens, there is no role chunk, so the first event is the first token."""
    text = {"choices": [{"index": 0, "text": "x", "finish_reason": None}]}
    finished = await one(
        sse(text, text, {"choices": [{"text": "", "finish_reason": "length"}]}, "[DONE]"), api="completions"
    )

    assert (finished.outcome, finished.chunks, finished.finish_reason) == ("ok", 2, "length")
    assert finished.first_event_us == finished.first_token_us


# --- set-up mistakes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, b"not a certificate"])
async def test_a_bad_certificate_file_is_told_at_once(tmp_path, content):
    """A missing or useless --cacert is one clear error at the start, not one per request."""
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(str(path))):
        async with client_of("https://127.0.0.1:1/v1", network=Network(cacert=str(path))):
            pass


async def test_a_bad_proxy_is_told_at_once():
    """A proxy of a kind that cannot be used is one clear error at the start."""
    with pytest.raises(UsageError, match="proxy"):
        async with client_of("http://h/v1", network=Network(proxy="ftp://h:1")):
            pass


# --- through a proxy -------------------------------------------------------------------------------------------------


async def test_through_a_proxy_the_record_is_whole_and_says_user_stamps():
    """A forward proxy gets the absolute URL and its own credentials; the record has every time, from user stamps."""
    script = [HEAD, chunk(event(X)), 0.03, chunk(event(X)), *sse(FINISH, "[DONE]")[1:]]
    secrets = Secrets(api_key="sk-abcdefgh", proxy_auth="me:pw")
    async with WireServer(script) as proxy:
        network = Network(proxy=f"http://127.0.0.1:{proxy.port}")
        async with client_of("http://far.invalid/v1", network=network, secrets=secrets) as client:
            stream = due(client)
            finished = await client.send(stream)
            again = await client.send(due(client))
            frame = ArrivalsFrame()
            stream.take_arrivals(frame)
            health = client.take_health()

    assert proxy.requests[0].startswith(b"POST http://far.invalid/v1/chat/completions HTTP/1.1\r\n")
    assert b"Basic " + base64.b64encode(b"me:pw") in proxy.requests[0]
    assert b"authorization: Bearer sk-abcdefgh" in proxy.requests[0]
    assert (finished.outcome, finished.connection, again.connection) == ("ok", "new", "reused")
    assert finished.first_token_us < 25_000 < finished.last_token_us
    assert (frame.n, finished.user_stamps > 0) == ([2], True)
    assert (health.timestamp_source, health.user_stamps, health.read_delay_us) == ("user", health.reads, {})
    assert stream.sent_ns < proxy.writes[0][0]


async def test_through_a_tunnel_sent_is_the_requests_own():
    """https through CONNECT: `sent` is of the request inside the tunnel, so the tunnel's set-up is not in TTFT."""
    ca = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("localhost").configure_cert(context)
    tasks = set()

    async def tunnel(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.1)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", wire.port)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            tasks.add(asyncio.create_task(pipe(source, sink)))

    async def pipe(source, sink):
        while data := await source.read(65536):
            sink.write(data)
        sink.close()

    async with WireServer(GOOD, context=context) as wire:
        proxy = await asyncio.start_server(tunnel, "127.0.0.1", 0)
        with ca.cert_pem.tempfile() as cacert:
            network = Network(proxy=f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}", cacert=cacert)
            async with client_of(wire.url, network=network, limits=Limits(connect_s=5)) as client:
                finished = await client.send(due(client))
        proxy.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    assert (finished.outcome, finished.error) == ("ok", None)
    assert finished.sent - finished.due >= 100_000
    assert finished.first_token_us < 50_000
    assert finished.tls_us > 0


async def test_a_proxy_that_is_not_there_is_a_connect_error():
    """Nobody listens at the proxy: connect_error, never sent."""
    async with client_of("http://far.invalid/v1", network=Network(proxy="http://127.0.0.1:1")) as client:
        finished = await client.send(due(client))

    assert (finished.outcome, finished.sent) == ("connect_error", None)
