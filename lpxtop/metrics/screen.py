"""The frame of a state: one frozen `RunView` from the slots, levels, streams and sources. Reads, never changes.

Window figures come from log buckets (within 1 %); each says how much time it covers.
"""

from collections.abc import Sequence
from heapq import nlargest
from typing import TYPE_CHECKING

from lpxtop.metrics import quality
from lpxtop.metrics.counts import mostly_known
from lpxtop.metrics.distribution import bucket_ms, bucket_quantiles, histogram, merged
from lpxtop.metrics.eventlog import codes
from lpxtop.metrics.gpus import slot_means
from lpxtop.metrics.servers import gauge
from lpxtop.metrics.slots import KEPT, SLOT_US, Slot
from lpxtop.metrics.steady import Drift, drift, little
from lpxtop.metrics.streams import Stream
from lpxtop.metrics.view import GpuView, LevelView, LoadView, OpenRequest, RunView, Series, Verdict, WindowView

if TYPE_CHECKING:
    from lpxtop.metrics.state import RunState

OPEN_SHOWN = 50
_LAG_US = 1_000_000
_MIN_PARTIAL_S = 0.25


def view(state: "RunState") -> RunView:
    """Everything a frame shows, but for the diagnosis."""
    header = state.header
    target = {} if header is None else header.target
    window = window_slots(state)
    shown = window_view(state, window)
    client = state.load.of_window(window)
    due = shown.due
    medians = shown.icl.p50, shown.ttft.p50, shown.e2e.p50
    verdicts = judge(state, client, medians, shown.covered_s / due if due else None)
    lines = state.log.lines()
    current = state.timeline.current
    levels = tuple(level_view(state, index) for index in state.timeline.levels)
    return RunView(
        t=state.t,
        phase=state.timeline.phase,
        title="" if header is None else header.tags.get("title", ""),
        target_url=target.get("url") or "",
        model=target.get("model") or "",
        server=_server_name(state),
        kind="run" if header is None else header.kind,
        simulated=header is not None and header.simulated,
        wall_ns=None if header is None else header.wall_ns,
        load=load_view(state),
        window=shown,
        level=None if current is None else next(level for level in levels if level.index == current.index),
        levels=levels,
        series=series(state),
        gpus=gpu_views(state),
        gpu_note=state.gpu_note,
        servers=tuple(server.view(state.t, window) for server in state.servers.values()),
        open_requests=open_requests(state),
        open_count=len(state.streams.by_id),
        events=lines,
        marks=codes(lines),
        quality=quality.view(client, verdicts),
        slo=tuple(str(term) for term in state.slo),
        token_source=state.counts.token_source,
        itl_trusted=state.counts.trusted,
        ended=state.reason,
    )


def _server_name(state: "RunState") -> str:
    header = state.header
    if header is None:
        return ""
    known = header.target.get("server") or header.negotiated.get("server_kind") or ""
    if isinstance(known, dict):
        return " ".join(str(known[name]) for name in ("kind", "version") if known.get(name))
    version = header.negotiated.get("server_version")
    return f"{known} {version}" if known and version and version not in known else str(known)


def load_view(state: "RunState") -> LoadView:
    plan = state.plan.get("load", {})
    live = state.load.live
    applied = [sample.target for sample in live if sample.target is not None]
    rates = [sample.rate for sample in live if sample.rate is not None]
    counts = state.counts
    waiting = sum(1 for stream in state.streams.by_id.values() if stream.sent is None)
    return LoadView(
        mode=plan.get("mode", "closed"),
        target=state.target,
        applied=sum(applied) if applied else None,
        in_flight=sum(sample.in_flight for sample in live) if live else len(state.streams.by_id) - waiting,
        rate=sum(rates) if rates else state.rate,
        max_concurrency=plan.get("max_concurrency", 1024),
        due_not_sent=sum(sample.due_not_sent for sample in live) if live else waiting,
        due=counts.due,
        sent=counts.sent,
        done=dict(counts.by_outcome),
        workers=state.load.workers,
    )


# --- the window ---------------------------------------------------------------------------------------------------


def window_slots(state: "RunState") -> list[Slot]:
    """The slots of the last `window_s` seconds, the one that still fills included."""
    seconds = min(KEPT, max(1, round(state.window_s)))
    return state.ring.since(state.t // SLOT_US - seconds + 1)


def known_until(state: "RunState") -> int:
    """Up to when arrivals are known: the last frame of a load process, or now when they are long silent."""
    horizon = state.load.horizon
    return horizon if state.t - horizon <= _LAG_US else state.t


def covered_s(state: "RunState") -> float:
    """How much of the window there was load for."""
    seconds = min(KEPT, max(1, round(state.window_s)))
    if state.counts.first_due is None:
        return 0.0
    begin = max((state.t // SLOT_US - seconds + 1) * SLOT_US, state.counts.first_due)
    return max(0, known_until(state) - begin) / 1e6


def window_view(state: "RunState", window: Sequence[Slot]) -> WindowView:
    """What users felt in the window."""
    covered = covered_s(state)
    trusted = state.counts.trusted
    icl = merged(slot.icl for slot in window)
    split = merged(slot.split for slot in window)
    gaps = bucket_quantiles(icl)
    ttft = merged(slot.ttft for slot in window)
    chunks, extra = sum(slot.chunks for slot in window), sum(slot.extra for slot in window)
    usage, usage_chunks = sum(slot.usage_tokens for slot in window), sum(slot.usage_chunks for slot in window)
    known = trusted and mostly_known(sum(slot.unknown for slot in window), chunks)
    tokens: int | None = chunks + extra if known else usage if usage else None
    ok, failed = sum(slot.ok for slot in window), sum(slot.failed for slot in window)
    per_chunk = (chunks + extra, chunks) if known else (usage, usage_chunks)

    def rate(n: int | None) -> float | None:
        return None if n is None or covered <= 0 else n / covered

    return WindowView(
        window_s=state.window_s,
        covered_s=covered,
        output_tokens_per_s=rate(tokens),
        chunks_per_s=rate(chunks),
        input_tokens_per_s=rate(sum(slot.input_tokens for slot in window)),
        requests_per_s=rate(ok),
        tokens_per_chunk=per_chunk[0] / per_chunk[1] if per_chunk[1] else None,
        due=sum(slot.due for slot in window),
        ok=ok,
        failed=failed,
        error_rate=failed / (ok + failed) if ok + failed else None,
        ttft=bucket_quantiles(ttft),
        icl=gaps,
        itl=bucket_quantiles(merged((icl, split))) if known and split else gaps,
        tpot=bucket_quantiles(merged(slot.tpot for slot in window)),
        e2e=bucket_quantiles(merged(slot.e2e for slot in window)),
        goodput_requests_per_s=rate(sum(slot.good for slot in window)) if state.slo else None,
        ttft_histogram=histogram(ttft),
    )


# --- levels and their steadiness ----------------------------------------------------------------------------------


def level_view(state: "RunState", index: int) -> LevelView:
    level = state.timeline.levels[index]
    if level.frozen is not None:
        return level.frozen
    return level.view(known_until(state), state.counts.trusted, steady(state, index))


def steady_slots(state: "RunState", index: int) -> list[Slot | None]:
    """One entry per whole second of the level's last measured stretch (None: nothing happened in it)."""
    parts = state.timeline.parts
    found = [place for place, part in enumerate(parts) if part.kind == "steady" and part.level == index]
    if not found:
        return []
    place = found[-1]
    end = parts[place + 1].start if place + 1 < len(parts) else known_until(state)
    first = max(-(-parts[place].start // SLOT_US), state.ring.newest - KEPT + 1)
    return [state.ring.slots.get(second) for second in range(first, end // SLOT_US)]


def drifts(state: "RunState", index: int) -> tuple[Drift, ...]:
    """Trends of throughput, TTFT and in-flight within a level; empty when it is too short to tell."""
    slots = steady_slots(state, index)
    series_of = (
        ("throughput", [None if slot is None else float(slot.chunks + slot.extra) for slot in slots]),
        ("ttft", [None if slot is None else _p50_ms(slot) for slot in slots]),
        ("in_flight", [None if slot is None else in_flight(slot) for slot in slots]),
    )
    return tuple(found for what, values in series_of if (found := drift(what, values)) is not None)


def steady(state: "RunState", index: int) -> bool | None:
    """Whether the level shows no drift; None when it is too short to tell."""
    found = drifts(state, index)
    return not any(trend.real for trend in found) if found else None


def _p50_ms(slot: Slot) -> float | None:
    return bucket_ms(slot.first_token_row()[0])


def in_flight(slot: Slot) -> float | None:
    """Mean of the second's samples, summed over load processes."""
    rows = [total / n for total, n in slot.in_flight.values() if n]
    return sum(rows) if rows else None


def judge(
    state: "RunState",
    client: quality.Client,
    medians_ms: tuple[float | None, float | None, float | None],
    seconds_per_send: float | None,
) -> tuple[Verdict, ...]:
    """The quality verdicts: of the client (over a window or a run), the answers since the start, and the level.

    `medians_ms` are those of ICL, TTFT and E2E over what the client's figures cover.
    """
    current = state.timeline.current
    slots = [] if current is None else steady_slots(state, current.index)
    sampling = state.plan.get("sampling", {})
    return quality.judge(
        quality.Evidence(
            client=client,
            answers=state.counts.answers(ignore_eos=bool(sampling.get("ignore_eos", False))),
            icl_p50_ms=medians_ms[0],
            ttft_p50_ms=medians_ms[1],
            e2e_p50_ms=medians_ms[2],
            open_loop=state.plan.get("load", {}).get("mode") in ("constant", "poisson"),
            seconds_per_send=seconds_per_send,
            drifts=() if current is None else drifts(state, current.index),
            little=little(
                [None if slot is None else in_flight(slot) for slot in slots],
                sum(slot.ended for slot in slots if slot is not None),
                sum(slot.residence_us for slot in slots if slot is not None),
            ),
        )
    )


# --- charts, GPUs, open requests ----------------------------------------------------------------------------------


def chart_slots(state: "RunState") -> tuple[int, list[Slot | None]]:
    """The first second of the chart and one entry per second up to now."""
    slots = state.ring.slots
    now = state.t // SLOT_US
    if not slots:
        return now, []
    first = max(min(slots), now - KEPT + 1)
    return first, [slots.get(second) for second in range(first, now + 1)]


def series(state: "RunState") -> Series:
    first, slots = chart_slots(state)
    known = state.counts.trusted
    until = known_until(state)
    gaps = [[None] * 3 if slot is None else slot.gap_row(known) for slot in slots]
    ttft = [[None] * 3 if slot is None else slot.first_token_row() for slot in slots]
    spans = [_filled_s(first + place, until) for place in range(len(slots))]
    gpus = [(None, None, None) if slot is None else slot_means(slot) for slot in slots]
    flying = [None if slot is None else in_flight(slot) for slot in slots]

    def rates(amounts: Sequence[int | None]) -> tuple[float | None, ...]:
        """Per second; nothing was measured where nothing arrived and no load process spoke."""
        return tuple(
            None if amount is None or span is None or (amount == 0 and here is None) else amount / span
            for amount, span, here in zip(amounts, spans, flying, strict=True)
        )

    def column(rows: Sequence[Sequence[int | None]], place: int) -> tuple[float | None, ...]:
        return tuple(bucket_ms(row[place]) for row in rows)

    return Series(
        start_us=first * SLOT_US,
        itl_p50_ms=column(gaps, 0),
        itl_p95_ms=column(gaps, 1),
        itl_p99_ms=column(gaps, 2),
        ttft_p50_ms=column(ttft, 0),
        ttft_p95_ms=column(ttft, 1),
        output_tokens_per_s=rates([None if slot is None or not known else slot.chunks + slot.extra for slot in slots]),
        chunks_per_s=rates([None if slot is None else slot.chunks for slot in slots]),
        in_flight=tuple(flying),
        requests_per_s=rates([None if slot is None else slot.ok for slot in slots]),
        failed=tuple(0 if slot is None else slot.failed for slot in slots),
        gpu_utilization_percent=tuple(row[0] for row in gpus),
        gpu_memory_ratio=tuple(row[1] for row in gpus),
        gpu_power_watts=tuple(row[2] for row in gpus),
        waiting=tuple(None if slot is None else gauge(slot, "waiting") for slot in slots),
        kv_usage=tuple(None if slot is None else gauge(slot, "kv_usage") for slot in slots),
    )


def _filled_s(second: int, until: int) -> float | None:
    """How much of a second is known; None while it is too little to make a rate of."""
    filled = min(1.0, (until - second * SLOT_US) / SLOT_US)
    return filled if filled >= _MIN_PARTIAL_S else None


def gpu_views(state: "RunState") -> tuple[GpuView, ...]:
    _, slots = chart_slots(state)
    simulated = state.header is not None and state.header.simulated
    return tuple(gpu for source in state.gpus.values() for gpu in source.views(state.t, slots, simulated))


def open_requests(state: "RunState") -> tuple[OpenRequest, ...]:
    """The oldest requests in flight, oldest first."""
    oldest = nlargest(OPEN_SHOWN, state.streams.by_id.values(), key=lambda stream: state.t - _begin(stream))
    return tuple(
        OpenRequest(
            source=stream.src,
            id=stream.id,
            age_s=(state.t - _begin(stream)) / 1e6,
            sent=stream.sent is not None,
            ttft_ms=None if stream.first is None else stream.first / 1000,
            tokens=stream.tokens,
            silent_s=max(0, state.t - stream.last) / 1e6,
        )
        for stream in oldest
    )


def _begin(stream: Stream) -> int:
    return stream.due if stream.sent is None else stream.sent
