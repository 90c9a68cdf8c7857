"""The requests in flight, of every source, and their way through a keyframe. Must not keep figures.

Slot numbers of different sources are different slots.
"""

from itertools import accumulate, groupby
from typing import Any

from lpxtop.events.records import Finished, Request
from lpxtop.metrics.levels import Part


class Stream:
    """A request in flight. `last` is its last arrival (or `sent`) in session µs; `first` its TTFT in µs; `extra`
    tokens beyond one per chunk; `lost` that arrivals of it were dropped; `reads` the chunks of its two largest reads
    that completed several."""

    __slots__ = (
        "chunks", "due", "extra", "first", "first_chunk_tokens", "id", "last", "lost", "part", "prompt_tokens",
        "reads", "sent", "slot", "src", "warmup",
    )  # fmt: skip

    def __init__(self, src: str, request: Request) -> None:
        self.src, self.id, self.slot = src, request.id, request.slot
        self.due, self.sent = request.due, request.sent
        self.warmup = request.warmup
        self.prompt_tokens = request.prompt_tokens
        self.last = request.due if request.sent is None else request.sent
        self.chunks = self.extra = 0
        self.first: int | None = None
        self.first_chunk_tokens = 1
        self.lost = False
        self.part: Part | None = None
        self.reads = (0, 0)

    @property
    def tokens(self) -> int:
        """Tokens so far, one per chunk where nothing else is known."""
        return self.chunks + self.extra

    def buffered(self, chunks: int) -> bool:
        """Of `chunks` (8 or more) at least 80 % came in at most two reads: something on the way gathered them."""
        return chunks >= 8 and sum(self.reads) >= 0.8 * chunks


class Streams:
    """Every request in flight. `orphans` are chunks of requests nobody announced, `malformed` unusable frames."""

    def __init__(self) -> None:
        self.by_id: dict[tuple[str, int], Stream] = {}
        self.by_slot: dict[str, dict[int, Stream]] = {}
        self.orphans = 0
        self.malformed = 0

    def request(self, event: Request) -> tuple[Stream, bool]:
        """The stream of a request line, and whether it is new.

        The line comes again once the request was sent, and when it was sent again on a fresh connection.
        """
        key = event.src, event.id
        stream = self.by_id.get(key)
        new = stream is None
        if stream is None:
            stream = self.by_id[key] = Stream(event.src, event)
        elif event.sent is not None and event.sent != stream.sent and not stream.chunks:
            stream.sent = stream.last = event.sent
        self.by_slot.setdefault(event.src, {})[event.slot] = stream
        return stream, new

    def finished(self, event: Finished) -> Stream | None:
        """The stream that ended, taken out; its slot is free unless somebody else has it by now."""
        stream = self.by_id.pop((event.src, event.id), None)
        slots = self.by_slot.get(event.src, {})
        if stream is not None and slots.get(stream.slot) is stream:
            del slots[stream.slot]
        return stream

    def hole(self, src: str) -> None:
        """Events of `src` are missing: where its streams stand is no longer known."""
        for stream in self.by_slot.get(src, {}).values():
            stream.lost = True

    def snapshot(self, now: int, parts: list[Part]) -> dict[str, Any]:
        """Columns, with times as small differences and what is rare left out; `parts` are referred to by place."""
        place = {part: index for index, part in enumerate(parts)}
        open_ = list(self.by_id.values())
        rare = [
            [row, stream.warmup, stream.lost, *stream.reads]
            for row, stream in enumerate(open_)
            if stream.warmup or stream.lost or any(stream.reads)
        ]
        return {
            "src": _runs([stream.src for stream in open_]),
            "id": _steps([stream.id for stream in open_]),
            "slot": [stream.slot for stream in open_],
            "due": _steps([stream.due for stream in open_]),
            "sent": [None if stream.sent is None else stream.sent - stream.due for stream in open_],
            "last": [now - stream.last for stream in open_],
            "first": [stream.first for stream in open_],
            "chunks": [stream.chunks for stream in open_],
            "prompt_tokens": _runs([stream.prompt_tokens for stream in open_]),
            "part": _runs([None if stream.part is None else place.get(stream.part) for stream in open_]),
            "extra": _runs([stream.extra for stream in open_]),
            "first_chunk_tokens": _runs([stream.first_chunk_tokens for stream in open_]),
            "rare": rare,
            "orphans": self.orphans,
            "malformed": self.malformed,
        }

    def restore(self, state: dict[str, Any], now: int, parts: list[Part]) -> None:
        columns = (
            _unrun(state["src"]), _unstep(state["id"]), state["slot"], _unstep(state["due"]), state["sent"],
            state["last"], state["first"], state["chunks"], _unrun(state["prompt_tokens"]), _unrun(state["part"]),
        )  # fmt: skip
        open_: list[Stream] = []
        for src, id_, slot, due, delay, age, first, chunks, prompt_tokens, part in zip(*columns, strict=True):
            sent = None if delay is None else due + delay
            request = Request(t=due, id=id_, slot=slot, due=due, sent=sent, prompt_tokens=prompt_tokens)
            stream = Stream(src, request)
            stream.last, stream.first, stream.chunks = now - age, first, chunks
            stream.part = None if part is None else parts[part]
            open_.append(stream)
            self.by_id[src, id_] = stream
            self.by_slot.setdefault(src, {})[slot] = stream
        more = zip(open_, _unrun(state["extra"]), _unrun(state["first_chunk_tokens"]), strict=True)
        for stream, extra, first_chunk_tokens in more:
            stream.extra, stream.first_chunk_tokens = extra, first_chunk_tokens
        for row, warmup, lost, large, small in state["rare"]:
            stream = open_[row]
            stream.warmup, stream.lost, stream.reads = warmup, lost, (large, small)
        self.orphans, self.malformed = state["orphans"], state["malformed"]


def is_buffered(request: Finished, stream: Stream | None) -> bool:
    """Whether the answer came in one or two pieces: its times then are those of whatever gathered it.

    Either the reads say so, or eight chunks and more came within 5 % of the whole wait and faster than any decoder
    writes (0.3 ms a chunk): a long queue before a short answer is not buffering.
    """
    if request.outcome != "ok":
        return False
    if "buffered" in request.flags or (stream is not None and stream.buffered(request.chunks)):
        return True
    first, last = request.first_token_us, request.last_token_us
    if request.chunks < 8 or first is None or last is None:
        return False
    return last - first <= 0.05 * last and last - first < 300 * (request.chunks - 1)


def _steps(values: list[int]) -> list[int]:
    """Differences of neighbours: small numbers for what grows slowly."""
    return [value - before for value, before in zip(values, [0, *values], strict=False)]


def _unstep(steps: list[int]) -> list[int]:
    return list(accumulate(steps))


def _runs(values: list[Any]) -> list[list[Any]]:
    """[value, how often in a row]."""
    return [[value, sum(1 for _ in group)] for value, group in groupby(values)]


def _unrun(runs: list[list[Any]]) -> list[Any]:
    return [value for value, n in runs for _ in range(n)]
