"""One-second slots of the last five minutes: what the charts and the window figures are made of.

A slot owns an event by the event's own time. Nothing here grows with the length of the session. Must not know
phases, levels or exact counts.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from lpxtop.events.buckets import bucket
from lpxtop.events.records import Finished
from lpxtop.metrics import definitions
from lpxtop.metrics.distribution import Counts, add, merged, pack, percentiles, unpack
from lpxtop.metrics.sums import Sums

SLOT_US = 1_000_000
KEPT = 300
"""Slots that are kept: the chart window, and the longest window of the figures."""

_DISTRIBUTIONS = ("icl", "split", "ttft", "tpot", "e2e", "loop_lag", "read_delay", "send_lateness")
_NUMBERS = (
    "chunks", "extra", "unknown", "input_tokens", "due", "ok", "failed", "good", "usage_tokens", "usage_chunks",
    "events", "reads", "coalesced", "user_stamps", "ended", "residence_us",
)  # fmt: skip
_PER_SOURCE = ("in_flight", "cpu", "gpus", "servers")


class Slot:
    """One second. Distributions are log buckets of µs; `split` corrects `icl` to ITL where a chunk held many tokens.

    `extra` is tokens beyond one per chunk, `unknown` chunks whose tokens nobody counted; `residence_us` sums
    sent to end of the `ended` requests, failed ones too. Per source: `in_flight` [sum,
    samples], `cpu` [cpu µs, wall µs], `gpus` one list of sums per GPU, `servers` [t, values of the last scrape].
    `sums` are what diagnosis looks at, of measured time.
    """

    __slots__ = (*_DISTRIBUTIONS, *_NUMBERS, *_PER_SOURCE, "icl_row", "second", "sums", "ttft_row")

    icl: Counts
    split: Counts
    ttft: Counts
    tpot: Counts
    e2e: Counts
    loop_lag: Counts
    read_delay: Counts
    send_lateness: Counts
    chunks: int
    extra: int
    unknown: int
    input_tokens: int
    due: int
    ok: int
    failed: int
    good: int
    usage_tokens: int
    usage_chunks: int
    events: int
    reads: int
    coalesced: int
    user_stamps: int
    ended: int
    residence_us: int
    in_flight: dict[str, list[int]]
    cpu: dict[str, list[int]]
    gpus: dict[str, list[list[float]]]
    servers: dict[str, list[Any]]

    def __init__(self, second: int) -> None:
        self.second = second
        for name in _DISTRIBUTIONS:
            setattr(self, name, {})
        for name in _NUMBERS:
            setattr(self, name, 0)
        for name in _PER_SOURCE:
            setattr(self, name, {})
        self.sums = Sums()
        self.icl_row: tuple[bool, list[int | None]] | None = None
        self.ttft_row: list[int | None] | None = None

    def gap_row(self, split: bool) -> list[int | None]:
        """p50, p95, p99 buckets of the gaps, per token if `split`; kept until the slot changes."""
        if self.icl_row is None or self.icl_row[0] != split:
            counts = merged((self.icl, self.split)) if split and self.split else self.icl
            self.icl_row = split, _chart_row(counts)
        return self.icl_row[1]

    def first_token_row(self) -> list[int | None]:
        """p50, p95, p99 buckets of TTFT by arrival; kept until the slot changes."""
        if self.ttft_row is None:
            self.ttft_row = _chart_row(self.ttft)
        return self.ttft_row

    def started(self, ttft_us: int | None, prompt_tokens: int | None) -> None:
        """A measured request showed its first token: the prompt was processed."""
        if ttft_us is not None:
            add(self.ttft, bucket(ttft_us))
        if prompt_tokens is not None:
            self.input_tokens += prompt_tokens

    def ended_with(self, request: Finished, end: int, streamed: bool, good: bool) -> None:
        """A measured request ended in this second."""
        self.ok += request.outcome == "ok"
        self.failed += definitions.failed(request)
        self.good += good
        self.ended += 1
        self.residence_us += 0 if request.sent is None else end - request.sent
        if request.output_tokens is not None:
            self.usage_tokens += request.output_tokens
            self.usage_chunks += request.chunks
        per_token, whole = definitions.tpot(request), definitions.e2e(request)
        if request.outcome == "ok" and streamed and per_token is not None:
            add(self.tpot, bucket(per_token / 1000))
        if request.outcome in definitions.ANSWERED and whole is not None:
            add(self.e2e, bucket(whole))

    def snapshot(self) -> dict[str, Any]:
        """What differs from an empty slot."""
        state: dict[str, Any] = {"s": self.second}
        state |= {name: pack(counts) for name in _DISTRIBUTIONS if (counts := getattr(self, name))}
        state |= {name: number for name in (*_NUMBERS, *_PER_SOURCE) if (number := getattr(self, name))}
        if not self.sums.empty:
            state["sums"] = self.sums
        return state

    @classmethod
    def restore(cls, state: dict[str, Any]) -> "Slot":
        slot = cls(state["s"])
        for name, value in state.items():
            if name in _DISTRIBUTIONS:
                setattr(slot, name, unpack(value))
            elif name in _NUMBERS or name in _PER_SOURCE:
                setattr(slot, name, value)
        if "sums" in state:
            slot.sums = msgspec.convert(state["sums"], Sums, strict=False)
        return slot


class Ring:
    """The last `KEPT` slots, by second. `at` marks a slot as changed since the last keyframe."""

    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}
        self.newest = -KEPT
        self._changed: set[int] = set()

    def at(self, second: int) -> Slot | None:
        """The slot to count into; None when that second is older than what is kept."""
        slot = self.slots.get(second)
        if slot is None:
            if second <= self.newest - KEPT:
                return None
            slot = self.slots[second] = Slot(second)
            if second > self.newest:
                self._advance(second)
        slot.icl_row = slot.ttft_row = None
        self._changed.add(second)
        return slot

    def _advance(self, second: int) -> None:
        self.newest = second
        oldest = second - KEPT + 1
        for old in [kept for kept in self.slots if kept < oldest]:
            del self.slots[old]
            self._changed.discard(old)

    def touch(self, second: int) -> None:
        """Time has come to `second`: older slots leave."""
        if second > self.newest:
            self._advance(second)

    def since(self, second: int) -> list[Slot]:
        """The slots from `second` on, oldest first."""
        return [self.slots[kept] for kept in sorted(self.slots) if kept >= second]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self.since(self.newest - KEPT))

    def snapshot(self) -> dict[str, Any]:
        """The slots changed since the last snapshot; a chain of them is the whole ring."""
        changed, self._changed = sorted(self._changed), set()
        return {"newest": self.newest, "slots": [self.slots[second].snapshot() for second in changed]}

    @classmethod
    def restore(cls, states: Iterable[dict[str, Any]]) -> "Ring":
        """From the snapshots of a chain of keyframes, oldest first."""
        ring = cls()
        for state in states:
            for slot in map(Slot.restore, state["slots"]):
                ring.slots[slot.second] = slot
            ring._advance(state["newest"])
        return ring


def _chart_row(counts: Counts) -> list[int | None]:
    """Nearest rank of however few samples: a chart of one second shows what that second held."""
    return percentiles(counts, (500, 950, 990), gated=False)
