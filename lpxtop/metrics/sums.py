"""What diagnosis looks at, as sums that add up: of a second, of a window, of a load level. Only measured time.

The screen adds the sums of its last seconds, a summary has them per level, and both are read by the same function.
Must not judge and must not know the state.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from lpxtop.events.buckets import bucket
from lpxtop.events.records import Finished, Gpu
from lpxtop.metrics import definitions
from lpxtop.metrics.distribution import Counts, add, merge

THROTTLE_WORDS = {0x4: "power cap", 0x8: "hw slowdown", 0x20: "thermal", 0x40: "hw thermal", 0x80: "power brake"}
"""NVML clock-event bits that hold clocks down. Idle (0x1), application clocks (0x2) and display (0x100) are none."""
BUSY_PERCENT = 70.0
"""A GPU sample counts as busy from here on (gpu.md 2.4: the rules look at a busy window, utilisation ≥ 70 %)."""
STALLED_S, NO_FIRST_TOKEN_S = 5.0, 30.0
"""Silence that is a stall: after a first token, and before one (a long prompt takes its time)."""
FAR_BELOW_LIMIT = 0.80
"""Power against the limit below which a power cap is not the driver's own (gpu.md 2.4 rule 2)."""
KV_FULL = 0.9
"""KV usage above which the cache counts as full (the design's rule of queueing)."""

_OF_EVERY_SAMPLE = ("utilization_percent", "memory_utilization_percent")
_OF_BUSY_SAMPLES = ("power_watts", "power_limit_watts", "sm_clock_mhz", "temperature_c")


class Range(msgspec.Struct, array_like=True):
    """Sum, count, lowest and highest of what was measured."""

    total: float = 0.0
    n: int = 0
    low: float = 0.0
    high: float = 0.0

    def add(self, value: float) -> None:
        self.join(Range(value, 1, value, value))

    def join(self, other: "Range") -> None:
        if not other.n:
            return
        self.low = min(self.low, other.low) if self.n else other.low
        self.high = max(self.high, other.high) if self.n else other.high
        self.total += other.total
        self.n += other.n

    @property
    def mean(self) -> float | None:
        return self.total / self.n if self.n else None


class GpuSums(msgspec.Struct, omit_defaults=True):
    """One GPU. `of` holds utilisation over all samples, power, clock and temperature over the busy ones.

    `held` counts busy samples by throttle reason, `capped_low` those power-capped far below the limit; `held_s` are the
    driver's counters over `counted_s`; `busy_s` is the time between busy samples.
    """

    samples: int = 0
    busy: int = 0
    busy_s: float = 0.0
    of: dict[str, Range] = {}
    held: dict[str, int] = {}
    capped_low: int = 0
    held_s: dict[str, float] = {}
    counted_s: float = 0.0
    margin_c: Range = msgspec.field(default_factory=Range)
    pstate: Range = msgspec.field(default_factory=Range)

    def sample(self, event: Gpu, gpu: int, limit_watts: float | None = None) -> None:
        """One sample of a GPU, by its place in the columns; `limit_watts` holds where the sample has no limit."""
        self.samples += 1
        for name in _OF_EVERY_SAMPLE:
            self._value(name, _cell(event, name, gpu))
        utilization = _cell(event, "utilization_percent", gpu)
        margin = _cell(event, "thermal_margin_c", gpu)
        if margin is not None:
            self.margin_c.add(margin)
        if utilization is None or utilization < BUSY_PERCENT:
            return
        self.busy += 1
        for name in _OF_BUSY_SAMPLES:
            self._value(name, _cell(event, name, gpu))
        if (pstate := _cell(event, "pstate", gpu)) is not None:
            self.pstate.add(pstate)
        bits = _cell(event, "throttle_bits", gpu)
        for bit, word in THROTTLE_WORDS.items():
            if bits is not None and bits & bit:
                self.held[word] = self.held.get(word, 0) + 1
        power, limit = _cell(event, "power_watts", gpu), _cell(event, "power_limit_watts", gpu)
        limit = limit_watts if limit is None else limit
        if bits is not None and bits & 0x4 and power is not None and limit is not None:
            self.capped_low += power < FAR_BELOW_LIMIT * limit

    def _value(self, name: str, value: float | None) -> None:
        if value is not None:
            self.of.setdefault(name, Range()).add(value)

    def interval(self, seconds: float, busy: bool, held: Iterable[tuple[str, float]] | None) -> None:
        """The time between two samples, and what the driver's counters say was held in it (None: no counters)."""
        self.busy_s += seconds if busy else 0.0
        if held is None:
            return
        self.counted_s += seconds
        for reason, held_s in held:
            self.held_s[reason] = self.held_s.get(reason, 0.0) + held_s

    def join(self, other: "GpuSums") -> None:
        self.samples += other.samples
        self.busy += other.busy
        self.busy_s += other.busy_s
        self.capped_low += other.capped_low
        self.counted_s += other.counted_s
        for name, values in other.of.items():
            self.of.setdefault(name, Range()).join(values)
        for word, n in other.held.items():
            self.held[word] = self.held.get(word, 0) + n
        for word, seconds in other.held_s.items():
            self.held_s[word] = self.held_s.get(word, 0.0) + seconds
        self.margin_c.join(other.margin_c)
        self.pstate.join(other.pstate)


def _cell(event: Gpu, column: str, gpu: int) -> Any:
    values = getattr(event, column)
    return values[gpu] if gpu < len(values) else None


class RequestSums(msgspec.Struct, omit_defaults=True):
    """Our requests by their end. `fit` sums 1, x, y, xx, xy, yy of x = prompt tokens that were computed (cached ones
    are not) and y = TTFT in ms; `rtt` are log buckets of µs; `silent` are those that ended without an answer after a
    stall."""

    ended: int = 0
    outcomes: dict[str, int] = {}
    silent: int = 0
    rtt: Counts = {}
    fit: list[float] = []
    input_tokens: int = 0
    cached_tokens: int = 0

    def request(self, event: Finished, streamed: bool) -> None:
        """One measured request that ended."""
        self.ended += 1
        self.outcomes[event.outcome] = self.outcomes.get(event.outcome, 0) + 1
        self.silent += _silent(event)
        if event.rtt_us is not None:
            add(self.rtt, bucket(event.rtt_us))
        if event.input_tokens is None:
            return
        if event.cached_tokens is not None:
            self.input_tokens += event.input_tokens
            self.cached_tokens += event.cached_tokens
        ttft_us = definitions.ttft(event)
        if event.outcome == "ok" and streamed and ttft_us is not None:
            computed = event.input_tokens - (0 if event.cached_tokens is None else event.cached_tokens)
            self._fit(computed, ttft_us / 1000)

    def _fit(self, x: float, y: float) -> None:
        row = (1.0, x, y, x * x, x * y, y * y)
        self.fit = [a + b for a, b in zip(self.fit, row, strict=True)] if self.fit else list(row)

    def join(self, other: "RequestSums") -> None:
        self.ended += other.ended
        self.silent += other.silent
        for outcome, n in other.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + n
        merge(self.rtt, other.rtt)
        if other.fit:
            self.fit = [a + b for a, b in zip(self.fit, other.fit, strict=True)] if self.fit else list(other.fit)
        self.input_tokens += other.input_tokens
        self.cached_tokens += other.cached_tokens


def _silent(event: Finished) -> bool:
    if event.end_us is None or event.outcome in definitions.ANSWERED:
        return False
    if event.last_token_us is None:
        return event.end_us >= NO_FIRST_TOKEN_S * 1e6
    return event.end_us - event.last_token_us >= STALLED_S * 1e6


class ServerSums(msgspec.Struct):
    """One scraped server. `of` holds gauges, `queued` and `full` count the scrapes with somebody waiting and with a
    full KV cache, `gained` is what counters (and histograms' sums and counts) grew by."""

    scrapes: int = 0
    queued: int = 0
    full: int = 0
    of: dict[str, Range] = {}
    gained: dict[str, float] = {}
    last: dict[str, float] = {}

    def scrape(self, values: Mapping[str, float], gauges: Iterable[str], counters: Iterable[str]) -> None:
        """The values of one scrape; a counter that went back began again at 0."""
        self.scrapes += 1
        for name in gauges:
            if (value := values.get(name)) is not None:
                self.of.setdefault(name, Range()).add(value)
        self.queued += values.get("waiting", 0.0) > 0
        self.full += values.get("kv_usage", 0.0) > KV_FULL
        for name in counters:
            if (value := values.get(name)) is None:
                continue
            if (before := self.last.get(name)) is not None:
                self.gained[name] = self.gained.get(name, 0.0) + (value - before if value >= before else value)
            self.last[name] = value


class Sums(msgspec.Struct, omit_defaults=True):
    """Everything of a stretch: our requests, GPUs by source, and (not in a second's: scrapes lie there themselves)
    servers and requests in flight by source as [sum, samples]."""

    requests: RequestSums = msgspec.field(default_factory=RequestSums)
    gpus: dict[str, list[GpuSums]] = {}
    servers: dict[str, ServerSums] = {}
    in_flight: dict[str, list[int]] = {}

    def of_gpu(self, src: str, gpu: int) -> GpuSums:
        rows = self.gpus.setdefault(src, [])
        while len(rows) <= gpu:
            rows.append(GpuSums())
        return rows[gpu]

    def load(self, src: str, total: int, samples: int) -> None:
        """Requests in flight, summed over samples of a load process."""
        row = self.in_flight.setdefault(src, [0, 0])
        row[0] += total
        row[1] += samples

    def join(self, other: "Sums") -> None:
        """Requests and GPUs of another stretch; its servers and load are added by their own."""
        self.requests.join(other.requests)
        for src, rows in other.gpus.items():
            for gpu, row in enumerate(rows):
                self.of_gpu(src, gpu).join(row)

    @property
    def empty(self) -> bool:
        return not (self.requests.ended or self.gpus or self.servers or self.in_flight)
