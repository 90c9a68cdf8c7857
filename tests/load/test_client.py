"""One request on the wire: what each shape of answer is, when its tokens came, how it ended. Real sockets."""

import asyncio
import json
import ssl
import time
from itertools import accumulate
from pathlib import Path

import pytest
import trustme
from wire_server import HEAD, WireServer, chunk, sse

from lpxtop.load.client import ArrivalsFrame, Client, RequestSpec, Stream
from lpxtop.plan import Limits, Negotiated, Network, Plan, Sampling, Secrets, Target

DONE = "[DONE]"


def content(text="x", **choice):
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None, **choice}]})


def delta(**fields):
    return json.dumps({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


def finish(reason="stop"):
    return json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})


def usage(completion):
    return json.dumps({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": completion}})


def usage_with_reasoning(completion, reasoning):
    details = {"completion_tokens_details": {"reasoning_tokens": reasoning}}
    return json.dumps({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": completion, **details}})


class Asker:
    """Sends requests one after another through one client."""

    def __init__(self, url, *, secrets=None, limits=None, network=None, stream=True):
        plan = Plan(
            target=Target(url=url, model="m"), sampling=Sampling(stream=stream),
            limits=limits or Limits(), network=network or Network(),
        )  # fmt: skip
        self.origin_ns = time.monotonic_ns()
        self.client = Client(plan=plan, negotiated=Negotiated(), secrets=secrets or Secrets(),
                             origin_ns=self.origin_ns, src="load0")  # fmt: skip
        self.count = 0

    async def __aenter__(self):
        await self.client.start()
        return self

    async def __aexit__(self, *_):
        await self.client.aclose()

    def stream(self, max_tokens=64):
        self.count += 1
        spec = RequestSpec(id=self.count, slot=0, due_ns=time.monotonic_ns(), body=b'{"stream":true}',
                           request_id=f"r{self.count}", max_tokens=max_tokens)  # fmt: skip
        return Stream(spec, self.client)

    async def ask(self, **more):
        stream = self.stream(**more)
        finished = await self.client.send(stream)
        frame = ArrivalsFrame()
        stream.take_arrivals(frame)
        return finished, frame


async def answered(*script, one_byte=False, **more):
    """The record and the arrivals of one request answered by this script."""
    async with WireServer(list(script), one_byte=one_byte) as server, Asker(server.url, **more) as asker:
        return await asker.ask()


async def test_a_plain_stream_to_the_tick():
    """Role chunk, three tokens 30 ms apart, usage: TTFT at the first token, the last token not moved by the rest."""
    script = sse(delta(role="assistant", content=""))[:2]
    for _ in range(3):
        script += [0.03, chunk(f"data: {content()}\n\n".encode())]
    script += [0.05, chunk(f"data: {finish('length')}\n\n".encode()), 0.02,
               *[chunk(f"data: {p}\n\n".encode()) for p in (usage(3), DONE)], b"0\r\n\r\n"]  # fmt: skip

    async with WireServer(script) as server, Asker(server.url) as asker:
        finished, frame = await asker.ask()
        first_write = server.writes[0][2]
        last_write = server.writes[0][4]

    sent_ns = asker.origin_ns + finished.sent * 1000
    assert finished.outcome == "ok"
    assert abs(sent_ns + finished.first_token_us * 1000 - first_write) < 3e6
    assert abs(sent_ns + finished.last_token_us * 1000 - last_write) < 3e6
    assert finished.first_event_us < finished.first_token_us - 20_000
    assert finished.end_us > finished.last_token_us + 60_000
    assert (finished.chunks, finished.output_tokens, finished.input_tokens) == (3, 3, 9)
    assert (finished.first_chunk_tokens, finished.token_source, finished.finish_reason) == (1, "usage", "length")
    assert frame.n == [3]
    assert sum(frame.gap) == (finished.last_token_us + 5) // 10
    assert abs(frame.gap[0] * 10 - finished.first_token_us) <= 10


SHORT = f"data: {content()}\n\ndata: {finish()}\n\n".encode()
OK = [
    ("no final blank line", [HEAD, chunk(f"data: {content()}\n\ndata: {finish()}".encode()), b"0\r\n\r\n"], 1,
     "no_final_blank"),
    ("no [DONE]", sse(content(), finish()), 1, "no_done"),
    ("usage on the finish chunk", sse(content(), json.dumps({"choices": [{"delta": {}, "finish_reason": "stop"}],
     "usage": {"prompt_tokens": 9, "completion_tokens": 1}}), DONE), 1, None),
    ("usage null everywhere", sse(*[json.dumps({"choices": [{"delta": {"content": "x"}}], "usage": None})] * 3,
     finish(), DONE), 3, None),
    ("data without a space", [HEAD, chunk(f"data:{content()}\n\ndata:{finish()}\n\ndata:[DONE]\n\n".encode()),
     b"0\r\n\r\n"], 1, None),
    ("comments", [HEAD, chunk(b": ping\n\n: OPENROUTER PROCESSING\n\n"), chunk(f"data: {content()}\n\n".encode()),
     chunk(b": ping\n\n"), chunk(f"data: {finish()}\n\ndata: [DONE]\n\n".encode()), b"0\r\n\r\n"], 1, None),
    ("CRLF", [HEAD, chunk(f"data: {content()}\r\n\r\ndata: {finish()}\r\n\r\ndata: [DONE]\r\n\r\n".encode()),
     b"0\r\n\r\n"], 1, None),
    ("CR", [HEAD, chunk(f"data: {content()}\r\rdata: {finish()}\r\rdata: [DONE]\r\r".encode()), b"0\r\n\r\n"], 1, None),
    ("a byte order mark", [HEAD, chunk(b"\xef\xbb\xbf" + f"data: {content()}\n\ndata: {finish()}\n\n".encode()),
     b"0\r\n\r\n"], 1, None),
    ("azure filter chunks", sse(json.dumps({"choices": [], "prompt_filter_results": []}), content(),
     json.dumps({"choices": [{"content_filter_offsets": {}, "finish_reason": None}]}), finish(), DONE), 1, None),
    ("a delta of null", sse(json.dumps({"choices": [{"delta": None}]}), content(), finish(), DONE), 1, None),
    ("an unescaped line separator", sse(content("a\u2028b"), json.dumps({"choices": [{"delta": {"content": "\u2028"}}]},
     ensure_ascii=False), finish(), DONE), 2, None),
    ("empty deltas in between", sse(content(), content(""), content(), finish(), DONE), 2, None),
    ("role on every delta", sse(*[delta(role="assistant", content="x")] * 3, finish(), DONE), 3, None),
    ("tool calls", sse(delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": ""}}]),
     delta(tool_calls=[{"index": 0, "function": {"arguments": "{}"}}]), finish("tool_calls"), DONE), 2, None),
    ("refusal", sse(delta(refusal="no"), finish(), DONE), 1, None),
    ("a wrong content type", [HEAD.replace(b"text/event-stream", b"application/json"),
     chunk(f"data: {content()}\n\ndata: {finish()}\n\ndata: [DONE]\n\n".encode()), b"0\r\n\r\n"], 1, "content_type"),
    ("content length instead of chunks", [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(SHORT), SHORT)], 1,
     None),
    ("no framing at all", [b"HTTP/1.1 200 OK\r\n\r\n", SHORT, None], 1, None),
    ("trailers", [*sse(content(), finish(), end=b"0\r\nx-t: 1\r\n\r\n")], 1, None),
    ("bare LF in the head", [b"HTTP/1.1 200 OK\ncontent-type: text/event-stream\ntransfer-encoding: chunked\n\n",
     chunk(f"data: {content()}\n\ndata: {finish()}\n\n".encode()), b"0\r\n\r\n"], 1, None),
    ("one bad payload", sse(content(), "{oops", content(), finish(), DONE), 2, "bad_json"),
    ("an unknown finish reason", sse(content(), finish("because"), DONE), 1, "finish_reason"),
    ("a hundred continue", [b"HTTP/1.1 100 Continue\r\n\r\n", *sse(content(), finish(), DONE)], 1, None),
    ("closed after [DONE] without the last chunk", [*sse(content(), finish(), DONE)[:-1], None], 1, "closed_early"),
]  # fmt: skip


@pytest.mark.parametrize("one_byte", [False, True], ids=["whole", "bytes"])
@pytest.mark.parametrize(("name", "script", "chunks", "flag"), OK, ids=[case[0] for case in OK])
async def test_answers_that_are_fine(name, script, chunks, flag, one_byte):
    """Every shape a server may send a good answer in: ok, with its tokens counted, also byte by byte."""
    finished, frame = await answered(*script, one_byte=one_byte)

    assert finished.outcome == "ok", finished.error
    assert finished.chunks == chunks
    assert sum(frame.n) == chunks
    assert finished.first_token_us is not None
    assert flag is None or flag in finished.flags


ERROR = json.dumps({"error": {"message": "the engine died", "type": "InternalServerError", "code": 500}})


def plain(status, body, *headers):
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers]
    return ["\r\n".join(lines).encode() + b"\r\n\r\n" + body]


BAD = [
    ("error in the stream", sse(content(), ERROR, DONE), "stream_error", "the engine died"),
    ("error as a string", sse(content(), json.dumps({"error": "boom"}), DONE), "stream_error", "boom"),
    ("object error", sse(json.dumps({"object": "error", "message": "bad"})), "stream_error", "bad"),
    ("event: error", [HEAD, chunk(f"data: {content()}\n\n".encode()), chunk(b'event: error\ndata: {"message":"x"}\n\n'),
     b"0\r\n\r\n"], "stream_error", "x"),
    ("finish reason abort", sse(content(), finish("abort"), DONE), "stream_error", "abort"),
    ("JSON error with status 200", plain(200, ERROR.encode()), "stream_error", "the engine died"),
    ("HTML with status 200", plain(200, b"<html><body>Welcome</body></html>"), "protocol_error", "Welcome"),
    ("a whole answer", plain(200, json.dumps({"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}],
     "usage": {"prompt_tokens": 1, "completion_tokens": 1}}).encode()), "not_streamed", "whole answer"),
    ("only [DONE]", sse(DONE), "empty", "no token"),
    ("nothing at all", sse(), "empty", None),
    ("no end", sse(content(), content()), "truncated", "without finish_reason"),
    ("cut in the middle", [*sse(content(), content())[:-1], None], "truncated", "closed"),
    ("cut without an answer", [None], "protocol_error", "without an answer"),
    ("not HTTP", [b"SSH-2.0-OpenSSH_9.6\r\n", None], "protocol_error", "not HTTP"),
    ("400 FastAPI", plain(422, json.dumps({"detail": [{"loc": ["body", "n"], "msg": "too big"}]}).encode()),
     "http_4xx", "body.n: too big"),
    ("401", plain(401, b'{"error":{"message":"bad key"}}'), "http_4xx", "bad key"),
    ("TGI's shape", plain(424, b'{"error":"Request failed","error_type":"generation"}'), "http_4xx", "Request failed"),
    ("429", plain(429, b"{}", "retry-after: 7", "x-ratelimit-remaining-requests: 0"), "rate_limited", "429"),
    ("503", plain(503, b'{"error":{"code":503,"message":"Loading model"}}'), "unavailable", "Loading model"),
    ("500 HTML", plain(502, b"<html><title>502 Bad Gateway</title></html>"), "http_5xx", "502 Bad Gateway"),
    ("redirect", plain(307, b"", "location: http://example.com/"), "protocol_error", "redirect"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "script", "outcome", "says"), BAD, ids=[case[0] for case in BAD])
async def test_answers_that_are_not_fine(name, script, outcome, says):
    """Every way to fail is its own outcome, with the server's words, and never counts as a success."""
    finished, _ = await answered(*script)

    assert finished.outcome == outcome, finished.error
    assert says is None or says in finished.error


async def test_rate_limit_headers_and_request_ids_are_kept():
    """Retry-After, the remaining requests and the server's id are recorded; other headers are not."""
    finished, _ = await answered(
        *plain(
            429, b"{}", "retry-after: 7", "x-ratelimit-remaining-requests: 0", "x-request-id: srv-1", "set-cookie: s=1"
        )
    )

    assert finished.rate_limit == {"retry-after": "7", "x-ratelimit-remaining-requests": "0"}
    assert (finished.request_id, finished.server_request_id) == ("r1", "srv-1")


async def test_reasoning_comes_before_content():
    """TTFT ends at the first reasoning token; the first content token has its own time; usage tells how many."""
    script = [HEAD, chunk(f"data: {delta(reasoning_content='hm')}\n\n".encode()), 0.03,
              chunk(f"data: {delta(reasoning='hm')}\n\n".encode()), 0.03, chunk(f"data: {content()}\n\n".encode()),
              *sse(finish(), usage_with_reasoning(3, 2), DONE)[1:]]  # fmt: skip

    finished, _ = await answered(*script)

    assert finished.first_token_us == finished.first_reasoning_us
    assert finished.first_content_us > finished.first_token_us + 50_000
    assert (finished.output_tokens, finished.reasoning_tokens, finished.chunks) == (3, 2, 3)


async def test_several_tokens_per_chunk_by_continuous_usage():
    """Chunks of 1, 4 and 3 tokens by the running count: recorded per chunk, nothing assumed."""

    def with_usage(n):
        return json.dumps({"choices": [{"delta": {"content": "xxx"}}], "usage": {"completion_tokens": n}})

    finished, frame = await answered(
        *sse(with_usage(1), with_usage(5), with_usage(8), finish("length"), usage(8), DONE)
    )

    assert finished.token_source == "continuous_usage"
    assert (finished.output_tokens, finished.first_chunk_tokens) == (8, 1)
    assert frame.tokens == [(1, 4), (2, 3)]


async def test_several_tokens_per_chunk_with_final_usage_only():
    """Eight tokens in two chunks and no count per chunk: the first chunk's number stays unknown."""
    finished, _ = await answered(*sse(content("a b c d"), content("e f g h"), finish(), usage(8), DONE))

    assert (finished.output_tokens, finished.chunks, finished.token_source) == (8, 2, "usage")
    assert finished.first_chunk_tokens is None


async def test_tokens_in_one_read_are_marked():
    """Three events in one write: one stamp, two of them marked as the same read, and counted."""
    body = b"".join(f"data: {content()}\n\n".encode() for _ in range(3))
    script = [HEAD, chunk(f"data: {content()}\n\n".encode()), 0.02, chunk(body), *sse(finish(), DONE)[1:]]
    async with WireServer(script) as server, Asker(server.url) as asker:
        finished, frame = await asker.ask()
        health = asker.client.take_health()

    assert frame.same == [2, 3]
    assert frame.gap[2:] == [0, 0]
    assert finished.coalesced == health.coalesced == 2
    assert health.events == 4


async def test_a_character_cut_between_reads():
    """A multi-byte character cut in the middle of its bytes is one token, not a decoding error."""
    data = chunk(f"data: {json.dumps({'choices': [{'delta': {'content': 'é日'}}]}, ensure_ascii=False)}\n\n".encode())
    cut = data.index("é".encode()) + 1

    finished, _ = await answered(HEAD, data[:cut], 0.02, data[cut:], *sse(finish(), DONE)[1:])

    assert (finished.outcome, finished.chunks, finished.flags) == ("ok", 1, [])


async def test_a_megabyte_in_one_event():
    """No line limit below 16 MiB: a chunk of 1 MB is one token."""
    finished, _ = await answered(*sse(content("x" * 1_000_000), finish(), DONE))

    assert (finished.outcome, finished.chunks) == ("ok", 1)


async def test_without_streaming_there_is_no_first_token():
    """A whole answer: e2e and usage are known, TTFT is not."""
    body = json.dumps({"choices": [{"message": {"content": "hi there"}, "finish_reason": "stop"}],
                       "usage": {"prompt_tokens": 5, "completion_tokens": 2}}).encode()  # fmt: skip

    finished, frame = await answered(*plain(200, body), stream=False)

    assert finished.outcome == "ok"
    assert (finished.output_tokens, finished.input_tokens, finished.first_token_us) == (2, 5, None)
    assert finished.last_token_us is not None
    assert frame.gap == []


async def test_a_kept_connection_is_reused_and_a_dead_one_is_retried_once():
    """The second request goes over the first one's connection; when that has died it goes over a new one."""
    good = sse(content(), finish(), DONE)
    async with WireServer(good, [*good, 0.05, None], good) as server, Asker(server.url) as asker:
        first, _ = await asker.ask()
        second, _ = await asker.ask()
        # the server closes the connection while it is idle; the next request may be on its way already
        third, _ = await asker.ask()

        assert [first.connection, second.connection] == ["new", "reused"]
        assert [r.outcome for r in (first, second, third)] == ["ok", "ok", "ok"]
        assert server.connections == 2
        assert third.attempts == 2 or third.connection == "new"


async def test_a_connection_closed_right_away_is_not_reused(tmp_path):
    """A server that closes after each answer although it promised keep-alive loses no request."""
    good = [*sse(content(), finish(), DONE), None]
    async with WireServer(*[good] * 20) as server, Asker(server.url) as asker:
        outcomes = [(await asker.ask())[0].outcome for _ in range(20)]

    assert outcomes == ["ok"] * 20


async def test_the_key_is_sent_and_never_repeated():
    """Bearer auth and own headers go out; an error that echoes them comes back scrubbed."""
    secrets = Secrets(api_key="sk-canary-123456", headers={"X-Team": "canary-team"})
    echo = b'{"error":{"message":"bad key sk-canary-123456 for canary-team, Bearer sk-canary-123456"}}'
    async with WireServer(plain(401, echo)) as server, Asker(server.url, secrets=secrets) as asker:
        finished, _ = await asker.ask()

    assert b"authorization: Bearer sk-canary-123456" in server.requests[0]
    assert b"x-team: canary-team" in server.requests[0]
    assert b"x-request-id: r1" in server.requests[0]
    assert b"accept-encoding: identity" in server.requests[0]
    assert "canary" not in repr(finished)


async def test_control_characters_in_an_error_are_removed():
    """An error text cannot carry escape sequences to a terminal."""
    finished, _ = await answered(*plain(500, b'{"error":"\\u001b[2J\\u0007boom"}'))

    assert finished.error == "HTTP 500: [2J boom"


async def test_stall_first_token_and_total_limits():
    """Silence after a token is a stall, before the first one a time-out; comments are not progress."""
    silent = [HEAD, chunk(f"data: {content()}\n\n".encode()), *[0.1, chunk(b": ping\n\n")] * 30]
    never = [HEAD, *[0.1, chunk(b": ping\n\n")] * 30]
    slow = [HEAD, *[0.1, chunk(f"data: {content()}\n\n".encode())] * 30]
    results = []
    for script, limits in (
        (silent, Limits(stall_s=0.5)),
        (never, Limits(first_token_s=0.5)),
        (slow, Limits(total_s=0.5)),
    ):
        results.append((await answered(*script, limits=limits))[0])

    assert [r.outcome for r in results] == ["stall", "timeout", "timeout"]
    assert all(450_000 < r.end_us < 1_500_000 for r in results)
    assert results[0].chunks == 1


async def test_cut_and_cancelled_close_the_connection_at_once():
    """Ending a stream from our side records its outcome and lets the server go."""
    script = [HEAD, *[chunk(f"data: {content()}\n\n".encode()), 0.05] * 100]
    async with WireServer(script, script) as server, Asker(server.url) as asker:
        for outcome in ("cut", "cancelled"):
            stream = asker.stream()
            sending = asyncio.create_task(asker.client.send(stream))
            await asyncio.sleep(0.2)
            stream.cut(outcome)
            finished = await asyncio.wait_for(sending, 1)

            assert finished.outcome == outcome
            assert finished.chunks >= 2
            assert finished.last_token_us is not None


async def test_nobody_listens_and_nobody_is_there():
    """A refused connection and an unknown name are connect errors with words, and never sent."""
    async with Asker("http://127.0.0.1:1/v1") as asker:
        refused, _ = await asker.ask()
    async with Asker("http://no-such-host.invalid/v1") as asker:
        unknown, _ = await asker.ask()

    assert (refused.outcome, refused.error, refused.sent) == ("connect_error", "Connection refused", None)
    assert unknown.outcome == "connect_error"
    assert "no-such-host.invalid" in unknown.error


def authority():
    ca = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("localhost").configure_cert(context)
    return ca, context


async def test_tls_with_a_known_authority(tmp_path):
    """Over TLS the same record comes out, with the handshake timed apart."""
    ca, context = authority()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    script = sse(content(), content(), finish(), usage(2), DONE)
    network = Network(cacert=str(tmp_path / "ca.pem"))
    async with WireServer(script, script, context=context) as server, Asker(server.url, network=network) as asker:
        first, frame = await asker.ask()
        second, _ = await asker.ask()

    assert [first.outcome, second.outcome] == ["ok", "ok"]
    assert first.tls_us > 0
    assert (second.connection, second.tls_us) == ("reused", None)
    assert sum(frame.n) == 2


async def test_an_unknown_certificate_is_a_tls_error_unless_allowed():
    """An unknown authority fails with its reason; --insecure accepts it."""
    _, context = authority()
    script = sse(content(), finish(), DONE)
    async with WireServer(script, script, context=context) as server:
        async with Asker(server.url) as asker:
            strict, _ = await asker.ask()
        async with Asker(server.url, network=Network(insecure=True)) as asker:
            loose, _ = await asker.ask()

    assert strict.outcome == "tls_error"
    assert "certificate" in strict.error
    assert loose.outcome == "ok"


@pytest.mark.parametrize(("name", "tokens"), [("llama.cpp-b10434-stream.txt", 16), ("vllm-0.32-stream.txt", 5)])
async def test_what_real_servers_sent(name, tokens):
    """Recorded streams of llama.cpp and vLLM: as many tokens as their own usage says."""
    raw = (Path(__file__).parent / "fixtures" / name).read_bytes()
    _, _, body = raw.replace(b"\r\n", b"\n").partition(b"\n\n")

    finished, _ = await answered(HEAD, chunk(body), b"0\r\n\r\n")

    assert finished.outcome == "ok"
    assert (finished.output_tokens, finished.chunks) == (tokens, tokens)


async def test_stamps_are_the_kernels():
    """100 tokens 2 ms apart: each stamp within a millisecond of the server's write (99 %), none in its past."""
    script = [HEAD, *[chunk(f"data: {content()}\n\n".encode()), 0.002] * 100, *sse(finish(), DONE)[1:]]
    async with WireServer(script) as server, Asker(server.url) as asker:
        finished, frame = await asker.ask()
        if asker.client.timestamp_source != "kernel":
            pytest.skip("this kernel does not stamp received packets")

    sent_ns = asker.origin_ns + finished.sent * 1000
    stamps = [sent_ns + tick * 10_000 for tick in accumulate(frame.gap)]
    errors = sorted(stamp - write for stamp, write in zip(stamps, server.writes[0][1:101], strict=True))
    assert errors[98] < 1_000_000
    assert errors[0] > -20_000
