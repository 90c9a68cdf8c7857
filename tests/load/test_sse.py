"""The SSE parser against a naive reading of the whole bytes."""

import re
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from lpxtop.load import sse
from lpxtop.load.sse import SseParser


def naive(data):
    """(payloads, names, comments) by the standard's text, on the whole stream; an unfinished last event counts."""
    lines = re.split(rb"\r\n|\n|\r", data.removeprefix(b"\xef\xbb\xbf"))
    payloads, names, comments, pending, name = [], [], 0, [], None
    for line in [*lines, b""]:
        if not line:
            if pending:
                payloads.append(b"\n".join(pending))
                names.append(name)
            pending, name = [], None
            continue
        field, colon, value = line.partition(b":")
        value = value[1:] if value.startswith(b" ") else value
        comments += bool(colon) and not field
        if field == b"data":
            pending.append(value)
        elif field == b"event":
            name = value or None
    return payloads, names, comments


def parse(pieces):
    """The same, through the parser, read by read."""
    parser, payloads, names = SseParser(), [], []
    for got in [*(lambda p=piece: parser.feed(p) for piece in pieces), parser.flush]:
        found = got()
        payloads += found
        names += [parser.event_names.get(index) for index in range(len(found))]
    return payloads, names, parser.comments


LINES = st.sampled_from(
    [
        b"data: {}",
        b"data:x",
        b"data",
        b"data:  two",
        b"data: \xc3\xa9\xe2\x80\xa8",
        b": ping",
        b":",
        b"event: error",
        b"event:",
        b"id: 7",
        b"retry: 10",
        b"junk",
        b"",
        b"",
        b"",
        b"\xef\xbb\xbfdata: y",
    ]
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(LINES, ENDS), max_size=14), st.booleans(), st.lists(st.integers(0, 250), max_size=12))
def test_any_split_gives_the_same_events(lines, bom, cuts):
    """However a stream is cut into reads, payloads, names and comments are those of the whole stream."""
    data = b"\xef\xbb\xbf" * bom + b"".join(line + end for line, end in lines)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(edges)]
    assert parse(pieces) == naive(data)
    assert parse([bytes([byte]) for byte in data]) == naive(data)


def test_an_event_is_not_delayed_by_a_trailing_cr():
    """A CR at the end of a read ends its line at once; the LF that follows belongs to it."""
    parser = SseParser()
    assert parser.feed(b"data: 1\r\r") == [b"1"]
    assert parser.feed(b"\ndata: 2\r\n\r") == [b"2"]
    assert parser.feed(b"\ndata: 3\r\n") == []
    assert parser.feed(b"\r\n") == [b"3"]


def test_the_stream_may_end_without_a_blank_line():
    """An event without its last blank line is delivered at the end, and said so; a whole one is not flagged."""
    torn, whole = SseParser(), SseParser()
    assert torn.feed(b"data: 1\n\ndata: 2") == [b"1"]
    assert torn.flush() == [b"2"]
    assert torn.torn_end
    assert whole.feed(b"data: 1\n\n") == [b"1"]
    assert whole.flush() == []
    assert not whole.torn_end


def test_unicode_line_separators_are_data():
    """U+2028, U+0085 and a form feed inside a payload split nothing."""
    payload = '{"t":"a\u2028b\u0085c\x0c"}'.encode()
    assert SseParser().feed(b"data: " + payload + b"\n\n") == [payload]


def test_spaces_at_the_edges_of_reads_survive():
    """A read that ends or begins with a space loses none of them (one space after the colon is the separator's)."""
    parser = SseParser()
    assert parser.feed(b"data:  a ") == []
    assert parser.feed(b" b \n\n") == [b" a  b "]


def test_names_belong_to_their_own_event():
    """An event's name is told with its payload, and not with the plain event that follows."""
    parser = SseParser()
    assert parser.feed(b"data: 0\n\nevent: error\ndata: 1\n\n") == [b"0", b"1"]
    assert parser.event_names == {1: b"error"}
    assert parser.feed(b"data: 2\n\n") == [b"2"]
    assert parser.event_names == {}


def test_a_flood_is_dropped_and_the_stream_goes_on(monkeypatch):
    """An event beyond the cap, one line or many, is counted and dropped; the events around it are delivered."""
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    parser = SseParser()
    got = parser.feed(b"data: 1\n\ndata: ")
    for _ in range(30):
        got += parser.feed(b"x" * 100)
    assert parser.oversize == 1
    assert parser._partial == [b":"]  # nothing of the flood is kept
    got += parser.feed(b"x\n\ndata: 2\n\n")
    for _ in range(30):
        got += parser.feed(b"data: " + b"y" * 100 + b"\n")
    got += parser.feed(b"\ndata: 3\n\n")
    assert (got, parser.oversize) == ([b"1", b"2", b"3"], 2)


def test_a_long_line_costs_no_more_per_byte_than_a_short_one():
    """An 8 MiB event in 64 KiB reads is gathered once, not copied with every read."""
    parser, piece = SseParser(), b"z" * 65536
    parser.feed(b"data: ")
    for _ in range(128):
        assert parser.feed(piece) == []
    assert len(parser._partial) == 129  # pieces, still apart
    assert parser.feed(b"\n\n") == [piece * 128]
