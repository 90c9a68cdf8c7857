"""Causes seen across the load levels that were visited: over the knee, decode bound by memory bandwidth.

Each function takes the evidence and returns a finding or None; both need two levels with figures. The knee's words are
those of wire-metrics-stats.md D.4: throughput flat, latency rising.
"""

from lpxtop import format
from lpxtop.metrics.causes_server import mean_utilization
from lpxtop.metrics.evidence import Evidence, LevelFacts
from lpxtop.metrics.finding import CAUSE, HINT, Finding, about, share

LEVEL_REQUESTS = 8
"""Requests a level needs before it is compared."""
MORE_LOAD = 1.5
FLAT_THROUGHPUT, RISING_LATENCY = 1.10, 1.30
"""With half as much load again: at most a tenth more throughput, at least three tenths more latency."""
BUSY_PERCENT, MEMORY_BUSY_PERCENT = 90.0, 60.0
"""SMs and memory controller that count as busy; utilisation is mere presence (gpu.md 2.4 rule 7), so ITL counts too."""
DOUBLE_LOAD, FLAT_ITL = 2.0, 1.25


def _current(evidence: Evidence) -> LevelFacts | None:
    return next((level for level in evidence.levels if level.index == evidence.level), None)


def _compared(evidence: Evidence, more: float) -> tuple[LevelFacts, LevelFacts] | None:
    """The current level, and the nearest one below it with less load by at least this factor."""
    now = _current(evidence)
    if now is None or now.requests < LEVEL_REQUESTS:
        return None
    below = [one for one in evidence.levels if one.requests >= LEVEL_REQUESTS and one.load * more <= now.load]
    return (below[-1], now) if below else None


def over_knee(evidence: Evidence) -> Finding | None:
    pair = _compared(evidence, MORE_LOAD)
    if pair is None:
        return None
    before, now = pair
    if not before.output_tokens_per_s or now.output_tokens_per_s is None:
        return None
    if not before.e2e_p50_ms or now.e2e_p50_ms is None:
        return None
    gained, slower = now.output_tokens_per_s / before.output_tokens_per_s, now.e2e_p50_ms / before.e2e_p50_ms
    if gained > FLAT_THROUGHPUT or slower < RISING_LATENCY:
        return None
    return Finding(
        code="over_knee",
        text=f"over the knee: from {about(before.load)} to {about(now.load)} throughput went "
        f"{about(before.output_tokens_per_s)} → {about(now.output_tokens_per_s)} tok/s and a "
        f"request {format.latency(before.e2e_p50_ms)} → {format.latency(now.e2e_p50_ms)}",
        next_step=f"go back towards {about(before.load)}: more load only makes everybody wait",
        weight=CAUSE + share(1 - 1 / slower),
        evidence={
            "load_before": before.load,
            "load_now": now.load,
            "before_tokens_per_s": before.output_tokens_per_s,
            "now_tokens_per_s": now.output_tokens_per_s,
            "before_e2e_p50_ms": before.e2e_p50_ms,
            "now_e2e_p50_ms": now.e2e_p50_ms,
        },
    )


def decode_bound(evidence: Evidence) -> Finding | None:
    pair, busy = _compared(evidence, DOUBLE_LOAD), mean_utilization(evidence.gpus)
    memory = [gpu.memory_utilization_percent for gpu in evidence.gpus if gpu.memory_utilization_percent is not None]
    if pair is None or busy is None or busy < BUSY_PERCENT or not memory or min(memory) < MEMORY_BUSY_PERCENT:
        return None
    before, now = pair
    if not before.itl_p50_ms or now.itl_p50_ms is None or now.itl_p50_ms / before.itl_p50_ms > FLAT_ITL:
        return None
    return Finding(
        code="decode_bound",
        text=f"decode is bound by memory bandwidth: memory controller {about(min(memory))}% busy, and ITL "
        f"{format.latency(before.itl_p50_ms)} → {format.latency(now.itl_p50_ms)} from "
        f"{about(before.load)} to {about(now.load)}",
        next_step="a larger batch costs little latency here; a single stream gets faster with a smaller model, fewer "
        "bits, or speculative decoding",
        level="info",
        weight=HINT + share(min(memory) / 100),
        evidence={
            "utilization_percent": busy,
            "memory_utilization_percent": min(memory),
            "before_itl_p50_ms": before.itl_p50_ms,
            "now_itl_p50_ms": now.itl_p50_ms,
            "load_before": before.load,
            "load_now": now.load,
        },
    )
