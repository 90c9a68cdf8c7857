"""Phases and load levels: which stretch of the session a moment belongs to, and each level's own figures.

A level's figures begin a settle time after its change; what straddles an edge is counted as excluded. A level long
past is frozen to its figures, so memory does not grow with what it held. Must not hold exact counts.
"""

from bisect import bisect_right
from typing import Any

import msgspec

from lpxtop.events.buckets import bucket
from lpxtop.events.records import Finished, Phase
from lpxtop.metrics import definitions
from lpxtop.metrics.distribution import Counts, add, bucket_quantiles, histogram, merged, pack, unpack
from lpxtop.metrics.view import LevelView

LEAST_SETTLE_US = 500_000
"""A level that drains from a higher one waits at least this long after it has come down."""
FREEZE_AFTER_US = 30_000_000
"""How long after its end a level still takes late events."""
SECOND_US = 1_000_000
FOREVER = 1 << 62
_DISTRIBUTIONS = ("icl", "split", "ttft", "ttft_due", "tpot", "e2e")
_NUMBERS = (
    "from_us", "to_us", "concurrency", "rate", "excluded", "requests", "failed", "chunks", "extra", "unknown",
    "usage_tokens", "steady_us", "steady_from", "open",
)  # fmt: skip


class Level:
    """One load level. Distributions are log buckets of µs; `steady_us` is the measured time of its closed stretches,
    `steady_from` the begin of the running one, `open` its requests in flight."""

    __slots__ = (*_DISTRIBUTIONS, *_NUMBERS, "frozen", "index")

    icl: Counts
    split: Counts
    ttft: Counts
    ttft_due: Counts
    tpot: Counts
    e2e: Counts

    def __init__(self, index: int, from_us: int = 0) -> None:
        self.index = index
        self.from_us = from_us
        self.to_us: int | None = None
        self.concurrency: int | None = None
        self.rate: float | None = None
        for name in _DISTRIBUTIONS:
            setattr(self, name, {})
        self.excluded = self.requests = self.failed = 0
        self.chunks = self.extra = self.unknown = self.usage_tokens = 0
        self.steady_us = 0
        self.steady_from: int | None = None
        self.open = 0
        self.frozen: LevelView | None = None

    def ended(self, request: Finished) -> None:
        """A request that ended inside the measured stretch, wherever it was sent."""
        self.requests += 1
        self.failed += definitions.failed(request)
        self.usage_tokens += request.output_tokens or 0

    def inside(self, request: Finished, streamed: bool) -> None:
        """A request that was sent and ended inside the measured stretch."""
        if request.outcome == "ok" and streamed:
            _count_us(self.tpot, definitions.tpot(request), 1000)
        if request.outcome in definitions.ANSWERED:
            _count_us(self.e2e, definitions.e2e(request))

    def sent_inside(self, request: Finished, streamed: bool) -> None:
        """A request that was sent inside, wherever it ended."""
        if request.outcome == "ok" and streamed:
            _count_us(self.ttft, definitions.ttft(request))
            _count_us(self.ttft_due, definitions.ttft_due(request))

    def measured_us(self, now: int) -> int:
        """The length of the measured stretches up to `now`."""
        running = 0 if self.steady_from is None else max(0, now - self.steady_from)
        return self.steady_us + running

    def view(self, now: int, trusted: bool, steady: bool | None) -> LevelView:
        """The figures; `now` ends the running stretch, `trusted` says whether tokens per chunk are known."""
        if self.frozen is not None:
            return self.frozen
        seconds = self.measured_us(now) / 1e6
        icl = bucket_quantiles(self.icl)
        split = trusted and bool(self.split)
        return LevelView(
            index=self.index,
            concurrency=self.concurrency,
            rate=self.rate,
            from_us=self.from_us,
            to_us=self.to_us,
            settled=seconds > 0,
            steady=steady,
            excluded=self.excluded,
            requests=self.requests,
            failed=self.failed,
            output_tokens_per_s=self._token_rate(seconds, trusted),
            requests_per_s=(self.requests - self.failed) / seconds if seconds > 0 else None,
            ttft=bucket_quantiles(self.ttft),
            ttft_due=bucket_quantiles(self.ttft_due),
            icl=icl,
            itl=bucket_quantiles(merged((self.icl, self.split))) if split else icl,
            tpot=bucket_quantiles(self.tpot),
            e2e=bucket_quantiles(self.e2e),
            ttft_histogram=histogram(self.ttft),
        )

    def _token_rate(self, seconds: float, trusted: bool) -> float | None:
        if seconds <= 0:
            return None
        if trusted:
            return (self.chunks + self.extra) / seconds
        return self.usage_tokens / seconds if self.usage_tokens else None

    def freeze(self, now: int, trusted: bool, steady: bool | None) -> None:
        """Keep the figures, let go of what they were made of."""
        self.frozen = self.view(now, trusted, steady)
        for name in _DISTRIBUTIONS:
            setattr(self, name, {})

    def snapshot(self) -> dict[str, Any]:
        if self.frozen is not None:
            return {"i": self.index, "view": msgspec.to_builtins(self.frozen)}
        state: dict[str, Any] = {"i": self.index}
        state |= {name: pack(counts) for name in _DISTRIBUTIONS if (counts := getattr(self, name))}
        state |= {name: value for name in _NUMBERS if (value := getattr(self, name)) is not None}
        return state

    @classmethod
    def restore(cls, state: dict[str, Any]) -> "Level":
        level = cls(state["i"])
        if "view" in state:
            level.frozen = msgspec.convert(state["view"], LevelView)
            level.from_us, level.to_us = level.frozen.from_us, level.frozen.to_us
            return level
        for name, value in state.items():
            if name in _DISTRIBUTIONS:
                setattr(level, name, unpack(value))
            elif name in _NUMBERS:
                setattr(level, name, value)
        return level


class Part(msgspec.Struct, frozen=True):
    """A stretch of the session from `start` on: `kind` is a phase name, with measure split into settle and steady."""

    start: int
    kind: str
    level: int | None = None


class Route(msgspec.Struct, frozen=True):
    """Level numbers a request counts to: measured when sent, when it ended, both; and those whose edge it straddled."""

    sent: int | None
    ended: int | None
    inside: int | None
    excluded: tuple[int, ...]


BEFORE = Part(-FOREVER, "before")
"""Before any phase, or in a session that has none."""


class Timeline:
    """The parts of the session in order, and its levels."""

    def __init__(self, settle_us: int = 0) -> None:
        self.settle_us = settle_us
        self.parts: list[Part] = [BEFORE]
        self.levels: dict[int, Level] = {}
        self.phase = "ready"
        self.current: Level | None = None
        self.measured_us = 0
        self.measure_from: int | None = None
        self.first_measure: int | None = None
        self.closed_at: int | None = None
        self._load: tuple[int | None, float | None] | None = None

    # --- which part owns a moment ---------------------------------------------------------------------------------

    def at(self, t: int) -> tuple[Part, int]:
        """The part that owns `t`, and where the next one begins."""
        parts = self.parts
        if t >= parts[-1].start:
            return parts[-1], FOREVER
        index = bisect_right(parts, t, key=_start)
        return parts[index - 1], parts[index].start

    def steady_level(self, part: Part) -> Level | None:
        """The level whose measured stretch `part` is, as long as it takes figures."""
        return self._taking(part.level) if part.kind == "steady" else None

    # --- phases ---------------------------------------------------------------------------------------------------

    def apply(self, event: Phase) -> bool:
        """A phase begins; whether that was news (each load process tells of the same one)."""
        load = event.concurrency, event.rate
        same_level = self.current is not None and self.current.index == event.level
        if event.name == self.phase and self._load == load and (same_level or event.name != "measure"):
            return False
        was_measuring = self.phase == "measure"
        self._end_stretch(event.t)
        self.phase, self._load = event.name, load
        if event.name == "measure":
            self._measure(event, settle=not (was_measuring and same_level))
        else:
            self._push(Part(event.t, event.name, event.level))
        return True

    def finish(self, t: int) -> None:
        """The session ended: nothing is measured after `t`."""
        self._end_stretch(t)
        self.phase = "ended"
        self._push(Part(t, "ended"))

    def _measure(self, event: Phase, settle: bool) -> None:
        settle_us = self.settle_us if settle else 0
        level = self.levels.get(event.level)
        if level is None or level.frozen is not None:
            level = self.levels[event.level] = Level(event.level, event.t + settle_us)
        level.concurrency, level.rate, level.to_us = event.concurrency, event.rate, None
        self.current = level
        self.measure_from = event.t
        if self.first_measure is None:
            self.first_measure = event.t
        if settle_us:
            self._push(Part(event.t, "settle", event.level))
        self._push(Part(event.t + settle_us, "steady", event.level))
        level.steady_from = event.t + settle_us

    def still_draining(self, t: int) -> None:
        """More is in flight than the level asks for, left from a higher one: the level has not begun to settle."""
        level, begin = self.current, t + max(self.settle_us, LEAST_SETTLE_US)
        last = self.parts[-1]
        if level is None or level.steady_from is None or last.kind != "steady" or begin <= last.start:
            return
        self.parts.pop()
        if self.parts[-1].kind != "settle" or self.parts[-1].level != level.index:
            self._push(Part(last.start, "settle", level.index))
        self._push(Part(begin, "steady", level.index))
        level.steady_from = begin
        if level.steady_us == 0:
            level.from_us = begin

    def _end_stretch(self, t: int) -> None:
        """Close what the phase before was measuring; a stretch that had not begun by `t` never was."""
        if self.measure_from is not None:
            self.measured_us += max(0, t - self.measure_from)
            self.measure_from = None
            self.closed_at = t
        level = self.current
        if level is not None and level.steady_from is not None:
            level.steady_us += max(0, t - level.steady_from)
            level.steady_from = None
            level.to_us = t
            level.from_us = min(level.from_us, t)

    def _push(self, part: Part) -> None:
        while len(self.parts) > 1 and self.parts[-1].start >= part.start:
            self.parts.pop()
        self.parts.append(part)

    # --- a request ended ------------------------------------------------------------------------------------------

    def route(self, sent_part: Part | None, end: int) -> "Route":
        """Which levels a request counts to, by when it was sent and when it ended."""
        end_part = self.at(end)[0]
        sent_level, end_level = _level_of(sent_part), _level_of(end_part)
        sent = sent_level if sent_part is not None and sent_part.kind == "steady" else None
        ended = end_level if end_part.kind == "steady" else None
        inside = sent if sent_part == end_part else None
        touched = {level for level in (sent_level, end_level) if level is not None} if inside is None else ()
        return Route(sent, ended, inside, tuple(sorted(touched)))

    def finished(self, request: Finished, route: "Route", streamed: bool) -> None:
        """Count a measured request to the levels of its route that still take figures."""
        if (level := self._taking(route.sent)) is not None:
            level.sent_inside(request, streamed)
        if (level := self._taking(route.ended)) is not None:
            level.ended(request)
        if (level := self._taking(route.inside)) is not None:
            level.inside(request, streamed)
        for index in route.excluded:
            if (level := self._taking(index)) is not None:
                level.excluded += 1

    def _taking(self, index: int | None) -> Level | None:
        level = None if index is None else self.levels.get(index)
        return None if level is None or level.frozen is not None else level

    def opened(self, part: Part | None, by: int) -> None:
        """A request sent in `part` is in flight (+1), or no longer (-1)."""
        level = None if part is None or part.level is None else self.levels.get(part.level)
        if level is not None:
            level.open += by

    # --- memory ---------------------------------------------------------------------------------------------------

    def forget(self, before: int) -> None:
        """Parts that ended before `before` own nothing any more."""
        while len(self.parts) > 2 and self.parts[2].start < before:
            del self.parts[1]

    def to_freeze(self, now: int) -> list[Level]:
        """Levels past, without a request in flight."""
        return [
            level
            for level in self.levels.values()
            if level is not self.current and level.frozen is None and level.open == 0
            and level.to_us is not None and now - level.to_us > FREEZE_AFTER_US
        ]  # fmt: skip

    # --- keyframes ------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        return {
            "parts": [[part.start, part.kind, part.level] for part in self.parts],
            "levels": [level.snapshot() for level in self.levels.values()],
            "phase": self.phase,
            "current": None if self.current is None else self.current.index,
            "measured_us": self.measured_us,
            "measure_from": self.measure_from,
            "first_measure": self.first_measure,
            "closed_at": self.closed_at,
            "load": None if self._load is None else list(self._load),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.parts = [Part(*part) for part in state["parts"]]
        self.levels = {level.index: level for level in map(Level.restore, state["levels"])}
        self.phase = state["phase"]
        self.current = None if state["current"] is None else self.levels[state["current"]]
        for name in ("measured_us", "measure_from", "first_measure", "closed_at"):
            setattr(self, name, state[name])
        self._load = None if state["load"] is None else (state["load"][0], state["load"][1])


def _start(part: Part) -> int:
    return part.start


def _level_of(part: Part | None) -> int | None:
    return part.level if part is not None and part.kind in ("settle", "steady") else None


def _count_us(into: Counts, measured: int | None, per_us: int = 1) -> None:
    """Count a time in its log bucket of µs; one that is not defined is not counted."""
    if measured is not None:
        add(into, bucket(measured / per_us))
