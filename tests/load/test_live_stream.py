"""What one request tells the runner, to the tick, from hand-made reads with hand-made stamps. No sockets, no clock."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpxtop.events.buckets import bucket
from lpxtop.load.answers import Answer
from lpxtop.load.exchange import Timing
from lpxtop.load.stream import ArrivalsFrame, Health, RequestSpec, Stream
from lpxtop.plan import Limits

ORIGIN_NS = 5_000_000_000
SENT_NS = ORIGIN_NS + 1_000_000
EVENT_STREAM = [(b"content-type", b"text/event-stream")]


def event(delta=None, finish=None, **more):
    choice = {"index": more.pop("index", 0), "delta": delta or {}, "finish_reason": finish, **more.pop("choice", {})}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def usage(count):
    return b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":%d}}\n\n' % count


X = event({"content": "x"})
THOUGHT = event({"reasoning": "x"})
DONE = b"data: [DONE]\n\n"


def begun(slot=7, streamed=True, headers=EVENT_STREAM):
    """(a stream that was sent and has its head, the health it counts in)"""
    owner = SimpleNamespace(streamed=streamed, health=Health(), origin_ns=ORIGIN_NS, src="load0")
    spec = RequestSpec(id=1, slot=slot, due_ns=SENT_NS - 500_000, body=b"", request_id="r", max_tokens=8)
    stream = Stream(spec, owner)
    stream.sent(SENT_NS, Timing())
    stream.head(200, headers, SENT_NS + 100_000, SENT_NS + 150_000)
    return stream, owner.health


def read(stream, after_ns, data, late_ns=1000):
    """One read of the body, stamped so long after `sent`."""
    stream.body(data, SENT_NS + after_ns, SENT_NS + after_ns + late_ns)


def arrivals(*streams):
    frame = ArrivalsFrame()
    for stream in streams:
        stream.take_arrivals(frame)
    return frame


def test_gaps_are_differences_of_rounded_times():
    """Arrivals at 1.004, 2.008 and 3.012 ms are ticks 100, 201 and 301: gaps 100, 101, 100, no rounding carried on."""
    stream, _ = begun()
    for after_us in (1004, 2008, 3012):
        read(stream, after_us * 1000, X)

    frame = arrivals(stream)
    assert (frame.slot, frame.n, frame.gap) == ([7], [3], [100, 101, 100])
    assert (frame.tokens, frame.same, frame.reasoning) == ([], [], [])


@given(st.lists(st.integers(1, 40_000_000), min_size=1, max_size=60))
def test_rounding_never_accumulates(gaps_ns):
    """Whatever the gaps, and however often frames are taken, their sum is each arrival rounded by itself."""
    stream, _ = begun()
    at, total = 0, 0
    for index, gap in enumerate(gaps_ns):
        at += gap
        read(stream, at, X)
        if index % 3 == 0:
            total += sum(arrivals(stream).gap)
            assert total == (at + 5000) // 10_000
    total += sum(arrivals(stream).gap)
    assert total == (at + 5000) // 10_000


def test_columns_of_several_streams_follow_each_other():
    """Two streams in one frame: indexes of tokens, same reads and slots point into the joint column."""
    first, second = begun(3)[0], begun(4)[0]
    read(first, 1_000_000, X)
    read(second, 1_000_000, X + X)
    read(second, 2_000_000, event({"content": "xyz"}, choice={"token_ids": [1, 2, 3]}))
    read(second, 3_000_000, THOUGHT + THOUGHT)

    frame = arrivals(first, second)
    assert (frame.slot, frame.n, frame.gap) == ([3, 4], [1, 5], [100, 100, 0, 100, 100, 0])
    assert frame.same == [2, 5]
    assert frame.tokens == [(3, 3)]
    assert frame.reasoning == [4]
    assert arrivals(first, second).slot == []


def test_the_first_of_a_read_is_not_the_same_read_and_http_chunks_are():
    """Two pieces of body with the very same stamps are one read; the next read is another."""
    stream, health = begun()
    read(stream, 1_000_000, X)
    read(stream, 1_000_000, X)
    read(stream, 2_000_000, X)

    assert arrivals(stream).same == [1]
    assert (health.reads, health.events, health.coalesced) == (2, 3, 1)


def test_health_counts_reads_and_their_delay():
    """Reads 7 µs and 9 ms late fall into their buckets; a user stamp has no delay, and is counted."""
    stream, health = begun()
    read(stream, 1_000_000, X, late_ns=7_900)
    read(stream, 2_000_000, b": ping\n\n", late_ns=9_000_000)
    read(stream, 20_000_000, X, late_ns=0)

    assert health.read_delay_us == {bucket(7): 1, bucket(9000): 1}
    assert (health.reads, health.user_stamps, stream.answer.user_stamps, health.events) == (3, 1, 1, 2)


def told(stream):
    """µs since sent of first event, first token, first reasoning, first content, last token; None when unknown."""
    answer = stream.answer
    times = (answer.first_event_ns, answer.first_token_ns, answer.first_reasoning_ns, answer.first_content_ns,
             answer.last_token_ns)  # fmt: skip
    return tuple(None if at is None else (at - SENT_NS) // 1000 for at in times)


def test_which_chunk_starts_and_ends_what():
    """Role, thought, content, empty, finish and usage chunks: each moves only the times that are its own."""
    stream, _ = begun()
    for ms, data in enumerate([event({"role": "assistant", "content": ""}), b": ping\n\n", THOUGHT, X, X,
                               event({"content": ""}), event({}, "stop"), usage(3), DONE]):  # fmt: skip
        read(stream, (ms + 1) * 1_000_000, data)

    assert told(stream) == (1000, 3000, 3000, 4000, 5000)
    assert stream.answer.chunks == 3


def test_a_stream_of_thought_alone_has_no_first_content():
    """Nothing visible came: the first token is known, the first content stays unknown, not 0."""
    stream, _ = begun()
    read(stream, 1_000_000, THOUGHT)
    read(stream, 2_000_000, event({}, "length"))

    assert told(stream) == (1000, 1000, 1000, None, 1000)


def test_a_torn_last_event_counts_with_the_stamp_of_its_bytes():
    """The stream ends without a blank line, 50 ms after the last bytes: the token came with the bytes."""
    stream, _ = begun()
    read(stream, 1_000_000, X)
    read(stream, 2_000_000, X[:-2])
    stream.end(None, SENT_NS + 52_000_000)

    assert arrivals(stream).gap == [100, 100]
    assert "no_final_blank" in stream.answer.flags
    assert stream.answer.ended_ns == SENT_NS + 52_000_000


# --- counting --------------------------------------------------------------------------------------------------------


def counted(*reads):
    """(output, first chunk's, source, chunks, [[index, tokens]…], flags) of a stream of these reads."""
    stream, _ = begun()
    for ms, data in enumerate(reads):
        read(stream, (ms + 1) * 1_000_000, data)
    stream.end(None, SENT_NS + 99_000_000)
    counts = stream.answer.counts(8)
    frame = arrivals(stream)
    return counts.output, counts.first_chunk, counts.source, stream.answer.chunks, frame.tokens, list(counts.flags)


def so_far(count, delta=None, finish=None, **more):
    return event({"content": "x"} if delta is None else delta, finish, usage={"completion_tokens": count}, **more)


FINISH = event({}, "stop")


@pytest.mark.parametrize(
    ("name", "reads", "expected"),
    [
        ("chunks alone", [X, X, FINISH], (2, 1, "chunks", 2, [], [])),
        ("final usage, one token each", [X, X, FINISH, usage(2)], (2, 1, "usage", 2, [], [])),
        ("final usage, more tokens", [X, X, FINISH, usage(6)], (6, None, "usage", 2, [], [])),
        ("running count", [so_far(2), so_far(3), FINISH, usage(3)], (3, 2, "continuous_usage", 2, [(0, 2)], [])),
        ("running count from the role chunk on", [so_far(0, {"role": "assistant"}), so_far(1), FINISH],
         (1, 1, "continuous_usage", 1, [], [])),
        ("growth without text bears", [so_far(1), so_far(2, {"content": ""}), so_far(4)],
         (4, 1, "continuous_usage", 3, [(2, 2)], [])),
        ("text without growth: that chunk is not known", [so_far(2), so_far(2), so_far(3)],
         (3, 2, "continuous_usage", 3, [(0, 2), (1, 0)], [])),
        ("growth in the finish chunk is no arrival", [so_far(1), so_far(2, {}, "stop"), usage(2)],
         (2, 1, "continuous_usage", 1, [], [])),
        ("the last token comes with the finish", [so_far(1), so_far(2, None, "length"), usage(2)],
         (2, 1, "continuous_usage", 2, [], [])),
        ("usage in the last chunk only is final usage", [X, X, so_far(7, None, "length")],
         (7, None, "usage", 3, [], [])),
        ("usage in the finish chunk without text", [X, so_far(1, {}, "stop")], (1, 1, "usage", 1, [], [])),
        ("a count first and last only", [so_far(0, {"role": "assistant"}), X, X, so_far(3, None, "stop")],
         (3, 1, "usage", 3, [], [])),
        ("a count that shrinks", [so_far(3), so_far(1), so_far(2)],
         (4, 3, "continuous_usage", 3, [(0, 3), (1, 0)], [])),
        ("a whole answer in one chunk", [so_far(8, None, "stop")], (8, 8, "continuous_usage", 1, [(0, 8)], [])),
        ("two choices", [so_far(1), so_far(1, index=1), so_far(3), so_far(2, index=1), so_far(3, {}, "stop"),
         so_far(2, {}, "stop", index=1), usage(5)], (5, 1, "continuous_usage", 4, [(2, 2)], [])),
        ("token ids, the end token among them", [event({"content": "ab"}, choice={"token_ids": [1, 2]}),
         event({}, "stop", choice={"token_ids": [3]}), usage(3)], (3, 2, "token_ids", 1, [(0, 2)], [])),
        ("logprobs", [event({"content": "ab"}, choice={"logprobs": {"content": [1, 2]}}), FINISH],
         (2, 2, "logprobs", 1, [(0, 2)], [])),
        ("not every chunk tells", [event({"content": "ab"}, choice={"token_ids": [1, 2]}), X, FINISH, usage(3)],
         (3, 2, "usage", 2, [(0, 2)], [])),
        ("usage and count disagree", [so_far(1), so_far(2), FINISH, usage(5)],
         (5, 1, "continuous_usage", 2, [], ["usage_mismatch"])),
        ("more than asked", [X, FINISH, usage(9)], (9, None, "usage", 1, [], ["limit_ignored"])),
        ("nothing", [FINISH], (None, None, None, 0, [], [])),
    ],
)  # fmt: skip
def test_tokens_are_counted_from_the_best_source(name, reads, expected):
    """Output tokens, the first chunk's share and tokens per chunk, added up by hand for each way servers count."""
    assert counted(*reads) == expected


# --- limits ----------------------------------------------------------------------------------------------------------


def verdicts(stream, limits, *seconds):
    return [stream.overdue(SENT_NS + round(s * 1e9), limits) for s in seconds]


def test_the_first_token_has_its_own_limit():
    """Before a token only `first_token_s` counts, whatever comments and role chunks came."""
    stream, _ = begun()
    read(stream, 9_000_000_000, b": ping\n\n" + event({"role": "assistant"}))
    limits = Limits(first_token_s=10, stall_s=1)

    assert verdicts(stream, limits, 9.9, 10.1) == [None, "timeout"]


def test_a_stall_is_thirty_seconds_or_twenty_gaps():
    """A fast stream may be silent for 30 s, one of a token every 4 s for 80 s; a limit of one's own is taken as is."""
    fast, slow = begun()[0], begun()[0]
    for index in range(5):
        read(fast, (index + 1) * 20_000_000, X)
        read(slow, (index + 1) * 4_000_000_000, X)
    read(fast, 25_000_000_000, b": ping\n\n")

    assert verdicts(fast, Limits(), 30.0, 30.2) == [None, "stall"]
    assert verdicts(slow, Limits(), 20 + 79.9, 20 + 80.1) == [None, "stall"]
    assert verdicts(slow, Limits(stall_s=2), 21.9, 22.1) == [None, "stall"]


def test_the_total_limit_holds_whatever_flows():
    """`total_s` counts from sent, tokens or not."""
    stream, _ = begun()
    read(stream, 4_900_000_000, X)

    assert verdicts(stream, Limits(total_s=5), 4.9, 5.1) == [None, "timeout"]


def test_after_done_the_server_has_five_seconds_to_close():
    """[DONE] came: silence is not a stall of 30 s any more."""
    stream, _ = begun()
    read(stream, 1_000_000_000, X + DONE)

    assert verdicts(stream, Limits(), 5.9, 6.1) == [None, "stall"]


def test_nothing_is_overdue_before_it_is_sent():
    """Connecting has its own limit."""
    stream, _ = begun()
    stream.sent_ns = None

    assert verdicts(stream, Limits(total_s=1), 1e6) == [None]


def test_cutting_is_for_what_still_runs():
    """The first reason holds, and nothing happens to a stream that has ended."""
    running, ended = begun()[0], begun()[0]
    running.cut("cut")
    running.cut("cancelled")
    ended.end(None, SENT_NS + 1)
    ended.cut("cut")

    assert (running.forced, ended.forced) == ("cut", None)


# --- the head and odd bodies -----------------------------------------------------------------------------------------


def test_only_whitelisted_headers_are_kept():
    """Limits, what remains, resets and Retry-After in all their spellings; no cookie, no organisation."""
    answer = Answer(streamed=True)
    headers = [("X-RateLimit-Limit-Tokens", "9"), ("x-ratelimit-remaining-requests", "0"), ("RateLimit-Reset", "1s"),
               ("X-Rate-Limit-Remaining", "3"), ("anthropic-ratelimit-tokens-remaining", "7"), ("Retry-After", "2"),
               ("retry-after-ms", "1500"), ("Set-Cookie", "a=b"), ("openai-organization", "me"),
               ("x-ratelimit-policy", "secret"), ("Request-Id", "req\x1b[2J1")]  # fmt: skip
    answer.head(429, [(name.encode(), value.encode()) for name, value in headers], 1)

    assert answer.rate_limit == {
        "x-ratelimit-limit-tokens": "9", "x-ratelimit-remaining-requests": "0", "ratelimit-reset": "1s",
        "x-rate-limit-remaining": "3", "anthropic-ratelimit-tokens-remaining": "7", "retry-after": "2",
        "retry-after-ms": "1500",
    }  # fmt: skip
    assert answer.server_request_id == "req [2J1"


@pytest.mark.parametrize(
    ("body", "headers", "is_stream"),
    [
        (b"data: 1\n\n", [], True),
        (b"\n\n: ping\n\n", [], True),
        (b"event: x\n", [], True),
        (b"\xef\xbb\xbfdata: 1\n\n", [], True),
        (b"foo: 1\ndata: 1\n\n", EVENT_STREAM, True),
        (b"foo: 1\n", [], False),
        (b'{"choices":[]}', EVENT_STREAM, False),
        (b"<html>", EVENT_STREAM, False),
        (b"Internal Server Error", [], False),
        (b"d", EVENT_STREAM, False),
    ],
)
def test_the_body_decides_what_it_is(body, headers, is_stream):
    """Event stream or whole answer, by its first bytes, however they are cut; the content type only breaks a tie."""
    for size in (1, 2, 100):
        answer = Answer(streamed=True)
        answer.head(200, headers, 1)
        for at in range(0, len(body), size):
            answer.feed(body[at : at + size], 2)
        answer.end()
        assert answer.is_stream == is_stream
        assert (answer.whole is None) == is_stream


def test_the_answers_own_id_is_kept_where_no_header_tells():
    """chatcmpl-… is what a server's log names the request by."""
    stream, _ = begun()
    read(stream, 1_000_000, event({"role": "assistant"}, id="chatcmpl-42"))
    read(stream, 2_000_000, event({"content": "x"}, id="chatcmpl-43"))

    assert stream.answer.server_request_id == "chatcmpl-42"
