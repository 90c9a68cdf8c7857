"""One recording folded for comparing: each level's exact figures, and beside them its samples by second.

The figures are those of the summary, from the same state; the samples only serve to tell how far the figures wander.
Must not compare anything.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from lpxtop.events.records import TICK_US, AnyEvent, Arrivals, Finished, Gpu, Source
from lpxtop.metrics import definitions, exact, screen
from lpxtop.metrics.counts import mostly_known
from lpxtop.metrics.definitions import ANSWERED
from lpxtop.metrics.distribution import Counts, count_all, merge, merged, split_correction, tick_bucket
from lpxtop.metrics.gpus import GpuSource, cell
from lpxtop.metrics.levels import Level, Part
from lpxtop.metrics.resampling import Stretch
from lpxtop.metrics.state import RunState
from lpxtop.metrics.streams import Stream, is_buffered
from lpxtop.metrics.summary import summary

SECOND_US = 1_000_000
PERCENTILES = ("p50", "p95", "p99")
TIMES = ("ttft", "ttft_due", "tpot", "e2e")
_GPU_GAP_US = 5_000_000

Figure = tuple[str, str | None]
"""A metric's key and its percentile, None where it has none."""


class LevelSample(msgspec.Struct, frozen=True, kw_only=True):
    """One load of one run. `figures` hold what was measured, None where samples were too few; `counts` the samples
    behind each metric."""

    seconds: float
    steady: bool | None
    ended: int
    failed: int
    figures: dict[Figure, float | None]
    counts: dict[str, int]
    stretches: tuple[Stretch, ...]


class RunSample(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `levels` by ("concurrency", 16) or ("rate", 2.5); `input_lengths` and
    `output_lengths` of whole answers, in tokens."""

    label: str
    summary: dict[str, Any]
    levels: dict[tuple[str, float], LevelSample]
    input_lengths: list[int]
    output_lengths: list[int]
    drivers: tuple[str, ...] = ()
    power_limits: tuple[float | None, ...] = ()
    gpu_names: tuple[str, ...] = ()
    prompts: dict[str, Any] = {}


class _Seconds:
    """The samples of one level while they come in, by second of session time."""

    def __init__(self) -> None:
        self.times: dict[str, tuple[list[int], list[float]]] = {key: ([], []) for key in TIMES}
        self.icl: dict[int, Counts] = {}
        self.split: dict[int, Counts] = {}
        self.sums: dict[str, dict[int, float]] = {
            name: {} for name in ("tokens", "usage_tokens", "ok", "ended", "failed", "good", "energy")
        }
        self.energy_known = True

    def add(self, name: str, second: int, amount: float) -> None:
        sums = self.sums[name]
        sums[second] = sums.get(second, 0.0) + amount

    def value(self, key: str, second: int, request: Finished) -> None:
        value = definitions.BY_KEY[key].value(request)
        if value is not None:
            self.times[key][0].append(second)
            self.times[key][1].append(value)

    def stretch(self, *, trusted: bool, judged: bool) -> Stretch | None:
        """The whole seconds between the first and the last that saw something; those at the edges are cut, so rates
        are not taken from half a second, and a request of an edge counts to its neighbour."""
        seen = self.sums["tokens"].keys() | self.sums["ended"].keys()
        if len(seen) < 3:
            return None
        first, last = min(seen) + 1, max(seen) - 1
        size = last - first + 1

        def place(second: int) -> int:
            return min(max(second - first, 0), size - 1)

        def column(name: str) -> list[float]:
            return [self.sums[name].get(second, 0.0) for second in range(first, last + 1)]

        names = [name for name in self.sums if name not in ("energy", "good")]
        names += ["energy"] if self.sums["energy"] and self.energy_known else []
        names += ["good"] if judged else []
        columns: dict[str, Sequence[float]] = {name: column(name) for name in names}
        if not trusted:
            columns["tokens"] = columns["usage_tokens"]
        return Stretch(
            cells=size,
            requests={key: ([place(at) for at in at_], values) for key, (at_, values) in self.times.items()},
            gaps={"icl": _moved(self.icl, place), "itl": self._per_token(place, trusted)},
            sums=columns,
        )

    def _per_token(self, place: Any, trusted: bool) -> dict[int, Counts]:
        if not trusted:
            return _moved(self.icl, place)
        both = {at: merged((self.icl.get(at, {}), self.split.get(at, {}))) for at in self.icl.keys() | self.split}
        return _moved(both, place)


def _moved(by_second: dict[int, Counts], place: Any) -> dict[int, Counts]:
    moved: dict[int, Counts] = {}
    for second, counts in by_second.items():
        merge(moved.setdefault(place(second), {}), counts)
    return moved


class Sampler:
    """A fold like the state's, with samples beside. Apply every event in order, then ask for `sample`."""

    def __init__(self) -> None:
        self.state = RunState(exact=True)
        self._levels: dict[int, _Seconds] = {}
        self._input_lengths: list[int] = []
        self._output_lengths: list[int] = []
        self._drivers: set[str] = set()

    def apply(self, event: AnyEvent) -> None:
        """Fold one event. Samples are taken before the state moves on, while it still knows the request."""
        if isinstance(event, Arrivals):
            self._arrivals(event)
        elif isinstance(event, Finished) and not event.warmup:
            self._finished(event)
        elif isinstance(event, Gpu):
            self._gpu(event)
        elif isinstance(event, Source) and event.kind == "gpu" and event.descriptor.get("driver"):
            self._drivers.add(str(event.descriptor["driver"]))
        self.state.apply(event)

    def _level(self, part: Part) -> _Seconds | None:
        if part.kind != "steady" or part.level is None:
            return None
        return self._levels.setdefault(part.level, _Seconds())

    # --- requests -------------------------------------------------------------------------------------------------

    def _finished(self, event: Finished) -> None:
        state = self.state
        stream = state.streams.by_id.get((event.src, event.id))
        part = stream.part if stream is not None else None
        if part is None and event.sent is not None:
            part = state.timeline.at(event.sent)[0]
        end = event.t if event.sent is None or event.end_us is None else event.sent + event.end_us
        end_part = state.timeline.at(end)[0]
        streamed = not is_buffered(event, stream)
        self._ended(event, end, self._level(end_part), streamed)
        if event.outcome == "ok":
            self._lengths(event)
        level = None if part is None else self._level(part)
        if level is not None and event.sent is not None:
            self._times(event, level, streamed, inside=part == end_part)

    def _lengths(self, event: Finished) -> None:
        if event.input_tokens is not None:
            self._input_lengths.append(event.input_tokens)
        if event.output_tokens is not None:
            self._output_lengths.append(event.output_tokens)

    def _ended(self, event: Finished, end: int, level: _Seconds | None, streamed: bool) -> None:
        if level is None:
            return
        second = end // SECOND_US
        good = bool(self.state.slo) and streamed and all(term.met(event) for term in self.state.slo)
        level.add("ended", second, 1)
        level.add("ok", second, event.outcome == "ok")
        level.add("failed", second, definitions.failed(event))
        level.add("good", second, good and event.outcome == "ok")
        level.add("usage_tokens", second, 0 if event.output_tokens is None else event.output_tokens)
        if not event.chunks and event.outcome in ANSWERED and event.output_tokens is not None:
            level.add("tokens", second, event.output_tokens)

    @staticmethod
    def _times(event: Finished, level: _Seconds, streamed: bool, *, inside: bool) -> None:
        second = (event.sent or 0) // SECOND_US
        if event.outcome == "ok" and streamed:
            level.value("ttft", second, event)
            level.value("ttft_due", second, event)
            if inside:
                level.value("tpot", second, event)
        if inside and event.outcome in ANSWERED:
            level.value("e2e", second, event)

    # --- tokens ---------------------------------------------------------------------------------------------------

    def _arrivals(self, event: Arrivals) -> None:
        slots = self.state.streams.by_slot.get(event.src, {})
        if len(event.n) != len(event.slot) or sum(event.n) != len(event.gap):
            return
        tokens = dict(event.tokens)
        start = 0
        for slot, n in zip(event.slot, event.n, strict=True):
            stream = slots.get(slot)
            if stream is not None and stream.sent is not None and not stream.warmup and not stream.lost:
                self._batch(stream, event.gap[start : start + n], start, tokens)
            start += n

    def _batch(self, stream: Stream, gaps: list[int], start: int, tokens: dict[int, int]) -> None:
        """Gaps go to the second in which their request was sent: a request's gaps are drawn together."""
        arrived = stream.last + sum(gaps) * TICK_US
        level = self._level(self.state.timeline.at(arrived)[0])
        if level is None:
            return
        extra = sum(max(0, tokens[index] - 1) for index in range(start, start + len(gaps)) if index in tokens)
        level.add("tokens", arrived // SECOND_US, len(gaps) + extra)
        begins = stream.chunks == 0
        second = (arrived if stream.sent is None else stream.sent) // SECOND_US
        count_all(level.icl.setdefault(second, {}), map(tick_bucket, gaps[begins:]))
        if extra:
            shared: dict[int, list[int]] = {}
            for at, gap in enumerate(gaps[begins:], start + begins):
                if tokens.get(at, 1) > 1:
                    shared.setdefault(tokens[at], []).append(gap)
            merge(level.split.setdefault(second, {}), split_correction(shared))

    # --- energy ---------------------------------------------------------------------------------------------------

    def _serves(self, source: GpuSource) -> bool:
        simulated = self.state.header is not None and self.state.header.simulated
        return simulated or source.serves_target

    def _gpu(self, event: Gpu) -> None:
        source = self.state.gpus.get(event.src)
        before = None if source is None else source.last
        part = self.state.timeline.at(event.t)[0]
        level = self._level(part)
        if source is None or level is None or not self._serves(source):
            return
        if before is None or before.t < part.start or not 0 < event.t - before.t <= _GPU_GAP_US:
            return
        for gpu in range(max(len(source.inventory), len(event.status))):
            joules = _energy(before, event, gpu)
            if joules is None:
                level.energy_known = False
            else:
                level.add("energy", event.t // SECOND_US, joules)

    # --- out ------------------------------------------------------------------------------------------------------

    def sample(self, label: str) -> RunSample:
        """What was measured, by load. Call after the last event."""
        state = self.state
        sources = list(state.gpus.values())
        inventory = [gpu for source in sources for gpu in source.inventory]
        limits = [limit for source in sources for limit in _power_limits(source)]
        prompts = {} if state.header is None else state.header.prompts
        return RunSample(
            label=label,
            summary=summary(state),
            levels=self._samples(),
            input_lengths=self._input_lengths,
            output_lengths=self._output_lengths,
            power_limits=tuple(limits),
            gpu_names=tuple(str(gpu.get("name", "?")) for gpu in inventory),
            prompts=prompts,
            drivers=tuple(sorted(self._drivers)),
        )

    def _samples(self) -> dict[tuple[str, float], LevelSample]:
        loads: dict[tuple[str, float], list[Level]] = {}
        for level in self.state.timeline.levels.values():
            rate = level.rate if level.frozen is None else level.frozen.rate
            concurrency = level.concurrency if level.frozen is None else level.frozen.concurrency
            if rate is not None:
                loads.setdefault(("rate", rate), []).append(level)
            elif concurrency is not None:
                loads.setdefault(("concurrency", float(concurrency)), []).append(level)
        found = {load: self._sample(levels) for load, levels in loads.items()}
        return {load: sample for load, sample in found.items() if sample is not None}

    def _sample(self, levels: list[Level]) -> LevelSample | None:
        """Stretches at the same load count as one level."""
        state, counted = self.state, self.state.exact
        if counted is None:
            return None
        seen = [screen.level_view(state, level.index) for level in levels]
        places = [counted.level(level.index) for level in levels]
        seconds = sum(_measured_s(state, level) for level in levels)
        trusted = state.counts.trusted and mostly_known(
            sum(place.unknown for place in places), sum(place.chunks for place in places)
        )
        held = [self._levels[level.index] for level in levels if level.index in self._levels]
        stretches = [one.stretch(trusted=trusted, judged=bool(state.slo)) for one in held]
        if seconds <= 0:
            return None
        figures, counts = _latencies(places, trusted)
        energy = sum(sum(one.sums["energy"].values()) for one in held) if all(one.energy_known for one in held) else 0
        chunks, extra, _ = exact.arrived(places)
        tokens = chunks + extra if trusted else sum(place.usage_tokens for place in places)
        ended, failed = sum(view.requests for view in seen), sum(view.failed for view in seen)
        figures |= {
            ("output_tokens_per_s", None): tokens / seconds,
            ("goodput", None): sum(place.good for place in places) / seconds if state.slo else None,
            ("error_rate", None): failed / ended if ended else None,
            ("energy_per_token_j", None): energy / tokens if energy > 0 and tokens else None,
        }
        steady = [view.steady for view in seen]
        return LevelSample(
            seconds=seconds,
            steady=False if False in steady else None if None in steady else True,
            ended=ended,
            failed=failed,
            figures=figures,
            counts=counts,
            stretches=tuple(stretch for stretch in stretches if stretch is not None),
        )


def _latencies(places: list[exact.Figures], trusted: bool) -> tuple[dict[Figure, float | None], dict[str, int]]:
    found = {key: exact.quantiles_of(places, key) for key in TIMES}
    found["icl"] = exact.gap_quantiles(places, split=False)
    found["itl"] = exact.gap_quantiles(places, split=trusted)
    figures: dict[Figure, float | None] = {
        (key, name): getattr(quantiles, name) for key, quantiles in found.items() for name in PERCENTILES
    }
    return figures, {key: quantiles.count for key, quantiles in found.items()}


def _measured_s(state: RunState, level: Level) -> float:
    running = level.frozen is None
    return (level.measured_us(screen.known_until(state)) if running else level.steady_us) / 1e6


def _energy(before: Gpu, event: Gpu, gpu: int) -> float | None:
    """The counter's difference, else power integrated; J."""
    counted, counted_before = cell(event.energy_j, gpu), cell(before.energy_j, gpu)
    if counted is not None and counted_before is not None and counted >= counted_before:
        return float(counted - counted_before)
    watts = [value for value in (cell(before.power_watts, gpu), cell(event.power_watts, gpu)) if value is not None]
    if len(watts) < 2:
        return None
    return sum(watts) / 2 * (event.t - before.t) / 1e6


def _power_limits(source: GpuSource) -> list[float | None]:
    last = [] if source.last is None else source.last.power_limit_watts
    size = max(len(source.inventory), len(last))
    planned = [gpu.get("power_limit_watts") for gpu in source.inventory]
    return [next((v for v in (cell(last, gpu), cell(planned, gpu)) if v is not None), None) for gpu in range(size)]
