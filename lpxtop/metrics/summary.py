"""The summary of a run: the JSON of `--json`, from exact counts. Schema `lpxtop.summary/1`.

What was not measured is null, never 0. Times are `_ms` or `_s`. Must not format text or know where it goes.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from lpxtop import format
from lpxtop.metrics import exact, quality, screen
from lpxtop.metrics.counts import mostly_known
from lpxtop.metrics.diagnosis import diagnose_levels
from lpxtop.metrics.evidence import Evidence, evidence, serving
from lpxtop.metrics.exact import Exact, Figures
from lpxtop.metrics.gpus import GpuSource, Totals
from lpxtop.metrics.levels import Level
from lpxtop.metrics.servers import COUNTERS
from lpxtop.metrics.state import RunState
from lpxtop.metrics.view import Verdict

SCHEMA = "lpxtop.summary/1"
_LATENCIES = ("ttft", "ttft_due", "ttft_any", "ttfo", "icl", "itl", "tpot", "e2e", "schedule_delay")
_OF_GPU = ("utilization_percent", "memory_used_bytes", "power_watts", "sm_clock_mhz", "temperature_c")


def summary(state: RunState) -> dict[str, Any]:
    """The whole summary. Raises ValueError for a state without exact counts (one restored from a keyframe)."""
    counted = state.exact
    if counted is None or state.client_totals is None:
        raise ValueError("a summary needs a fold with exact counts")
    places, seconds = _measured(state, counted)
    client = state.client_totals.client(state.load)
    verdicts = _verdicts(state, client, counted, seconds)
    causes = diagnose_levels(_evidence(state, counted, verdicts))
    return {
        "schema": SCHEMA,
        "run": _run(state, seconds),
        "requests": _requests(state),
        "tokens": _tokens(state),
        "latency_ms": _latencies(state, counted.all()),
        "throughput": _throughput(state, places, counted.all(), seconds),
        "slo": _slo(state, places, seconds),
        "levels": [_level(state, counted, level) for level in state.timeline.levels.values()],
        "gpu": [gpu for source in state.gpus.values() for gpu in _gpus(source)],
        "server": _server(state),
        "server_latency_ms": _server_latency(state),
        "alerts": _alerts(state),
        "quality": _quality(client, verdicts),
        "verdicts": [_verdict(verdict) for verdict in _together(causes, verdicts)],
    }


# --- the measured time --------------------------------------------------------------------------------------------


def _measured(state: RunState, counted: Exact) -> tuple[list[Figures], float | None]:
    """Where the measurement's arrivals are, and how long it was.

    From the first measured request's due time to the end of measuring, pauses left out. A run that stops after so
    many requests is measured to the end of the last one; any other to the moment the load ended, so that the drain's
    thin tail is not in the rates.
    """
    timeline, counts = state.timeline, state.counts
    if timeline.first_measure is None:
        if counts.first_due is None or counts.last_end is None:
            return [counted.of_part(timeline.parts[0])], None
        return counted.all(), max(0, counts.last_end - counts.first_due) / 1e6 or None
    kinds = ["settle"]
    idle_us = 0 if counts.first_due is None else max(0, counts.first_due - timeline.first_measure)
    measured_us = timeline.measured_us - idle_us
    if timeline.measure_from is not None:
        measured_us += max(0, screen.known_until(state) - timeline.measure_from)
    elif _stopped_by_requests(state) and counts.last_end is not None and timeline.closed_at is not None:
        kinds += ["drain", "ended"]
        measured_us += counts.last_end - timeline.closed_at
    places = [figures for kind, figures in counted.by_kind.items() if kind in kinds]
    return [*places, *counted.levels.values()], measured_us / 1e6 if measured_us > 0 else None


def _stopped_by_requests(state: RunState) -> bool:
    wanted = state.plan.get("stop", {}).get("requests")
    return isinstance(wanted, int) and state.counts.due >= wanted


# --- sections -----------------------------------------------------------------------------------------------------


def _run(state: RunState, seconds: float | None) -> dict[str, Any]:
    header = state.header
    inventory = [gpu for source in state.gpus.values() for gpu in source.inventory]
    if header is None:
        return {"id": None, "duration_s": seconds, "gpus": inventory, "ended": state.reason}
    return {
        "id": header.session,
        "started_at": datetime.fromtimestamp(header.wall_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
        "duration_s": seconds,
        "watched_s": state.t / 1e6 if header.kind == "watch" else None,
        "ended": state.reason,
        "lpxtop": header.lpxtop,
        "kind": header.kind,
        "simulated": header.simulated,
        "target": header.target,
        "plan": header.plan,
        "negotiated": header.negotiated,
        "tags": header.tags,
        "host": header.host,
        "gpus": inventory or header.gpus,
    }


def _requests(state: RunState) -> dict[str, Any]:
    counts = state.counts
    return {
        "due": counts.due,
        "sent": counts.sent,
        "ok": counts.ok,
        "failed": counts.failed,
        "cancelled": counts.by_outcome.get("cancelled", 0),
        "cut": counts.by_outcome.get("cut", 0),
        "open": counts.due - counts.ended,
        "by_outcome": dict(sorted(counts.by_outcome.items())),
        "error_rate": counts.failed / counts.due if counts.due else None,
        "warmup": counts.warmup_due,
    }


def _tokens(state: RunState) -> dict[str, Any]:
    counts = state.counts
    return {
        "input": counts.input_tokens,
        "output": counts.output_tokens,
        "reasoning": counts.reasoning_tokens,
        "cached": counts.cached_tokens,
        "source": counts.token_source,
        "sources": dict(counts.token_sources),
        "per_chunk": counts.usage_tokens / counts.usage_chunks if counts.usage_chunks else None,
        "per_chunk_known": counts.trusted if counts.ended else None,
        "tpot_first_chunk_assumed": counts.first_chunk_assumed,
    }


def _latencies(state: RunState, places: Sequence[Figures]) -> dict[str, Any]:
    """Each latency's figures. `itl` equals `icl` where tokens per chunk are not known (tokens.per_chunk_known)."""
    found = {"icl": exact.gap_quantiles(places, split=False)}
    found["itl"] = exact.gap_quantiles(places, split=True) if state.counts.trusted else found["icl"]
    for key in _LATENCIES:
        if key not in found:
            found[key] = exact.quantiles_of(places, key)
    return {key: exact.as_dict(found[key]) for key in _LATENCIES}


def _throughput(
    state: RunState, places: Sequence[Figures], everything: Sequence[Figures], seconds: float | None
) -> dict[str, Any]:
    chunks, extra, unknown = exact.arrived(places)
    known = state.counts.trusted and mostly_known(unknown, chunks)
    tokens = chunks + extra if known else sum(place.usage_tokens for place in places)
    input_tokens = sum(place.input_tokens for place in places)
    served = bool(state.counts.ended or chunks or extra)
    output = _rate(tokens, seconds) if served else None
    input_ = _rate(input_tokens, seconds) if state.counts.input_tokens is not None else None
    return {
        "output_tokens_per_s": output,
        "output_tokens_by": ("arrival" if known else "finished") if output is not None else None,
        "input_tokens_per_s": input_,
        "total_tokens_per_s": None if output is None or input_ is None else output + input_,
        "chunks_per_s": _rate(chunks, seconds) if served else None,
        "requests_per_s": _rate(sum(place.ok for place in places), seconds) if served else None,
        "tokens_per_s_per_user": exact.as_dict(exact.quantiles_of(everything, "tokens_per_s_per_user")),
        "request_tokens_per_s": exact.as_dict(exact.quantiles_of(everything, "request_tokens_per_s")),
        "energy_per_token_j": _energy_per_token(state, tokens),
        "tokens_per_s_per_gpu": _per_gpu(state, output),
    }


def _rate(amount: int, seconds: float | None) -> float | None:
    return None if seconds is None or seconds <= 0 else amount / seconds


def _energy_per_token(state: RunState, tokens: int) -> float | None:
    joules = [_energy(totals)[0] for source in serving(state) for totals in source.totals]
    if not joules or tokens <= 0 or any(value is None for value in joules):
        return None
    return sum(value for value in joules if value is not None) / tokens


def _per_gpu(state: RunState, output: float | None) -> float | None:
    gpus = sum(max(len(source.inventory), len(source.totals)) for source in serving(state))
    return output / gpus if output is not None and gpus else None


def _slo(state: RunState, places: Sequence[Figures], seconds: float | None) -> dict[str, Any]:
    """Attainment over every request due, minus cut and cancelled."""
    counts = state.counts
    if not state.slo:
        return {"terms": [], "attainment": None, "goodput_requests_per_s": None}
    judged = counts.due - counts.by_outcome.get("cut", 0) - counts.by_outcome.get("cancelled", 0)
    return {
        "terms": [str(term) for term in state.slo],
        "attainment": counts.good / judged if judged > 0 else None,
        "goodput_requests_per_s": _rate(sum(place.good for place in places), seconds) if judged > 0 else None,
        "good": counts.good,
        "judged": judged,
    }


def _level(state: RunState, counted: Exact, level: Level) -> dict[str, Any]:
    """One level's own figures, after its settle time."""
    figures = counted.level(level.index)
    seen = screen.level_view(state, level.index)
    seconds = None if level.frozen is not None else level.measured_us(screen.known_until(state)) / 1e6
    seconds = level.steady_us / 1e6 if seconds is None else seconds
    known = state.counts.trusted and mostly_known(figures.unknown, figures.chunks)
    tokens = figures.chunks + figures.extra if known else figures.usage_tokens
    measured = seconds > 0
    return {
        "index": level.index,
        "concurrency": seen.concurrency,
        "rate": seen.rate,
        "from_s": seen.from_us / 1e6,
        "to_s": None if seen.to_us is None else seen.to_us / 1e6,
        "measured_s": seconds,
        "steady": seen.steady,
        "requests": {"ended": seen.requests, "failed": seen.failed, "excluded": seen.excluded},
        "latency_ms": _latencies(state, [figures]),
        "throughput": {
            "output_tokens_per_s": tokens / seconds if measured else None,
            "input_tokens_per_s": figures.input_tokens / seconds if measured else None,
            "requests_per_s": figures.ok / seconds if measured else None,
            "tokens_per_s_per_user": exact.as_dict(exact.quantiles_of([figures], "tokens_per_s_per_user")),
        },
        "goodput_requests_per_s": figures.good / seconds if measured and state.slo else None,
    }


# --- GPUs and the server ------------------------------------------------------------------------------------------


def _gpus(source: GpuSource) -> list[dict[str, Any]]:
    count = max(len(source.inventory), len(source.totals))
    return [_gpu(source, gpu) for gpu in range(count)]


def _gpu(source: GpuSource, gpu: int) -> dict[str, Any]:
    known = source.inventory[gpu] if gpu < len(source.inventory) else {}
    totals = source.totals[gpu] if gpu < len(source.totals) else Totals()
    energy_j, energy_source = _energy(totals)
    return {
        "source": source.src,
        "host": source.host,
        "index": known.get("index", gpu),
        "uuid": known.get("uuid"),
        "name": known.get("name"),
        **{name: totals.mean_max(name) for name in _OF_GPU},
        "energy_j": energy_j,
        "energy_source": energy_source,
        "throttled": {reason: seconds for reason, seconds in totals.throttled_s.items() if seconds > 0},
    }


def _energy(totals: Totals) -> tuple[float | None, str | None]:
    """The counter's difference; where the driver has none, power integrated over the samples."""
    if totals.counted_us and totals.counted_us >= totals.integrated_us:
        return totals.energy_counter_j, "counter"
    if totals.integrated_us:
        return totals.energy_integrated_j, "integrated"
    return None, None


def _alerts(state: RunState) -> list[dict[str, Any]]:
    """Each stretch of throttling, queueing, full KV cache or preemptions; `to_s` is null where it held to the end."""
    return [*_gpu_alerts(state), *_server_alerts(state)]


def _server_alerts(state: RunState) -> list[dict[str, Any]]:
    return [
        {"code": code, "from_s": begin / 1e6, "to_s": None if end is None else end / 1e6, "server": server.url}
        for server in state.servers.values()
        for code, begin, end in server.held()
    ]


def _gpu_alerts(state: RunState) -> list[dict[str, Any]]:
    return [
        {
            "code": f"throttled_{word.replace(' ', '_')}",
            "from_s": begin / 1e6,
            "to_s": None if end is None else end / 1e6,
            "gpu": source.label(gpu),
        }
        for source in state.gpus.values()
        for gpu, word, begin, end in source.held()
    ]


def _server(state: RunState) -> dict[str, Any]:
    """First, last, mean and highest of each concept, and what a counter gained; with several servers the source is in
    front of the name."""
    many = len(state.servers) > 1
    return {
        f"{server.src}/{name}" if many else name: {
            "first": first, "last": last, "mean": total / n if n else None, "max": highest,
            **({"gained": gained} if name in COUNTERS else {}),
        }
        for server in state.servers.values()
        for name, (first, last, total, n, highest, gained) in server.totals.items()
    }  # fmt: skip


def _server_latency(state: RunState) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for server in state.servers.values():
        for name in server.histograms:
            if name not in found and (gained := server.quantiles_ms(name)):
                found[name] = gained
    return found


# --- quality ------------------------------------------------------------------------------------------------------


def _verdicts(state: RunState, client: quality.Client, counted: Exact, seconds: float | None) -> tuple[Verdict, ...]:
    everything, due = counted.all(), state.counts.due
    ttft, e2e = (exact.quantiles_of(everything, key).p50 for key in ("ttft", "e2e"))
    medians = exact.gap_quantiles(everything, split=False).p50, ttft, e2e
    return screen.judge(state, client, medians, seconds / due if seconds is not None and due else None)


def _evidence(state: RunState, counted: Exact, verdicts: tuple[Verdict, ...]) -> dict[str, Evidence]:
    """What each load level showed, by its name; a session of one level is judged by the figures of the whole."""
    measured = {index: sums for index, sums in state.sums.items() if not sums.empty}
    views = [screen.level_view(state, index) for index in state.timeline.levels]
    found: dict[str, Evidence] = {}
    for index, sums in measured.items():
        places = counted.all() if len(measured) == 1 or index is None else [counted.level(index)]
        ttft = exact.quantiles_of(places, "ttft").p50
        name = _level_name(state, index)
        if name in found and index is not None:
            name = f"{name} (from {format.duration(state.timeline.levels[index].from_us / 1e6)})"
        found[name] = evidence(state, sums, ttft_p50_ms=ttft, level=index, levels=views, quality=verdicts)
    return found


def _level_name(state: RunState, index: int | None) -> str:
    level = None if index is None else state.timeline.levels.get(index)
    if level is None:
        return "before the first level"
    seen = screen.level_view(state, level.index)
    if seen.rate is not None:
        return format.with_unit(seen.rate, "req/s")
    return f"{format.count(seen.concurrency)} in flight"


def _together(causes: Sequence[Verdict], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Causes, weightiest first, then what quality says beyond them."""
    said = {verdict.code for verdict in causes}
    return [*causes, *(verdict for verdict in verdicts if verdict.code not in said)]


def _quality(client: quality.Client, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    view = quality.view(client, tuple(verdicts))
    return {
        "timestamp_source": view.timestamp_source,
        "read_delay_us": {"p50": quality.percentile_us(client.read_delay, 500), "p99": view.read_delay_us_p99},
        "coalesced_ratio": view.coalesced_ratio,
        "loop_lag_ms": {"p99": view.loop_lag_ms_p99},
        "send_lateness_ms": {"p99": view.send_lateness_ms_p99},
        "client_cpu_ratio": view.client_cpu_ratio,
        "user_stamps": client.user_stamps if client.events else None,
        "dropped_events": client.dropped_events,
        "verdicts": [verdict.code for verdict in verdicts],
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    found = {"code": verdict.code, "level": verdict.level, "text": verdict.text, "evidence": verdict.evidence}
    return found if verdict.next_step is None else found | {"next": verdict.next_step}
