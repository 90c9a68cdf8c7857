"""Causes seen on the GPUs that serve the endpoint: what holds their clocks down, and one that lags behind.

Thresholds of power, heat and clocks are those of gpu.md 2.4. Each function takes the evidence and returns a finding or
None. NVML tells no cause for a plain hardware slowdown and has no getter for locked clocks; the words keep to that.
"""

from collections.abc import Callable, Sequence
from statistics import median

from lpxtop import format
from lpxtop.metrics.evidence import Evidence, GpuFacts
from lpxtop.metrics.finding import CAUSE, HINT, Finding, about, share

BUSY_SAMPLES = 4
"""Busy samples a rule needs: 2 s at the slowest rate of the probes."""
CAPPED_BITS, CAPPED_TIME = 0.25, 0.10
"""Power wall: share of busy samples with the bit, or of time by the driver's counter (gpu.md 2.4 rule 1)."""
AT_LIMIT = 0.97
"""Mean power against the enforced limit at the wall (rule 1)."""
LOST_CLOCK = 0.02
"""A cap below the limit (rule 2) must cost clock to be a cause: bits flash when the load comes in bursts."""
HOT_SAMPLES, HOT_TIME = 2, 0.01
HOT_MARGIN_C = 5.0
"""Thermal wall: the bit (two samples: a flash is none), the counter, or a margin this small (rule 3). A margin of 0 or
less is not taken by itself: drivers report it wrongly."""
LOCKED_PERCENT, LOCKED_SPREAD, LOCKED_CLOCK, LOCKED_S, LOCKED_PSTATE = 90.0, 0.01, 0.90, 30.0, 2
"""Clocks look locked: busy, constant, well below the maximum, for so long, in P0 to P2 (rule 6)."""
LOW_CLOCK = 0.60
SLOWER = 0.90
"""A GPU's mean clock against the median of its peers."""

_POWER, _HOT, _BRAKE, _PLAIN = ("power cap",), ("thermal", "hw thermal"), ("power brake",), ("hw slowdown",)
_SLOWED = (*_POWER, *_HOT, *_BRAKE, *_PLAIN)


def _busy(evidence: Evidence) -> list[GpuFacts]:
    return [gpu for gpu in evidence.gpus if gpu.busy >= BUSY_SAMPLES]


def _worst(found: Sequence[GpuFacts], of: Callable[[GpuFacts], float]) -> GpuFacts | None:
    return max(found, key=of, default=None)


def _names(found: Sequence[GpuFacts]) -> str:
    """GPU 3; or GPU 3 and 2 more."""
    return found[0].label + (f" and {len(found) - 1} more" if len(found) > 1 else "")


def _clocks(gpu: GpuFacts) -> str:
    if gpu.sm_clock_mhz is None or gpu.sm_clock_max_mhz is None:
        return ""
    return f"; SM clock {format.count(round(gpu.sm_clock_mhz))} of {format.count(round(gpu.sm_clock_max_mhz))} MHz"


def _clock_evidence(gpu: GpuFacts, found: Sequence[GpuFacts]) -> dict[str, float | str | None]:
    return {
        "gpu_label": gpu.label,
        "affected_gpus": len(found),
        "sm_clock_mhz": gpu.sm_clock_mhz,
        "sm_clock_max_mhz": gpu.sm_clock_max_mhz,
        "busy_samples": gpu.busy,
    }


def _capped(gpu: GpuFacts) -> bool:
    by_bits = gpu.held.get("power cap", 0) / gpu.busy >= CAPPED_BITS
    return by_bits or gpu.held_share.get("power_cap", 0.0) >= CAPPED_TIME


def _of_limit(gpu: GpuFacts) -> float | None:
    if gpu.power_watts is None or not gpu.power_limit_watts:
        return None
    return gpu.power_watts / gpu.power_limit_watts


def power_wall(evidence: Evidence) -> Finding | None:
    found = [gpu for gpu in _busy(evidence) if _capped(gpu) and (_of_limit(gpu) or 0.0) >= AT_LIMIT]
    gpu = _worst(found, lambda one: one.clock_lost)
    if gpu is None:
        return None
    return Finding(
        code="power_wall",
        text=f"power wall: {_names(found)} at {about(gpu.power_watts)} of "
        f"{about(gpu.power_limit_watts)} W, clocks held down "
        f"{format.percent(gpu.share(*_POWER))} of the busy time{_clocks(gpu)}",
        next_step="prefill and TTFT feel it, memory-bound decoding hardly: raise the limit if it was lowered "
        "(nvidia-smi -pl), else spread the load over more GPUs",
        weight=CAUSE + share(gpu.clock_lost),
        evidence={
            "power_watts": gpu.power_watts,
            "power_limit_watts": gpu.power_limit_watts,
            "capped_share_ratio": gpu.share(*_POWER),
            **_clock_evidence(gpu, found),
        },
    )


def power_capped_elsewhere(evidence: Evidence) -> Finding | None:
    """Capped, at the moment of the cap far below the limit, and slower for it."""
    found = [
        gpu
        for gpu in _busy(evidence)
        if gpu.capped_low / gpu.busy >= CAPPED_BITS and gpu.clock_lost >= LOST_CLOCK and _of_limit(gpu) is not None
    ]
    gpu = _worst(found, lambda one: one.clock_lost)
    if gpu is None:
        return None
    return Finding(
        code="power_capped_elsewhere",
        text=f"{_names(found)} is power-capped at {about(gpu.power_watts)} W, far below its limit of "
        f"{about(gpu.power_limit_watts)} W: something outside the driver caps it{_clocks(gpu)}",
        next_step="ask for the chassis's or the management controller's power policy, and check the power cables",
        weight=CAUSE + share(gpu.clock_lost),
        evidence={
            "power_watts": gpu.power_watts,
            "power_limit_watts": gpu.power_limit_watts,
            "capped_share_ratio": gpu.capped_low / gpu.busy,
            **_clock_evidence(gpu, found),
        },
    )


def _hot(gpu: GpuFacts) -> bool:
    seen = max(gpu.held.get(reason, 0) for reason in _HOT)
    timed = max(gpu.held_share.get(reason, 0.0) for reason in ("thermal", "hw_thermal"))
    return seen >= HOT_SAMPLES or timed >= HOT_TIME or _near(gpu)


def _near(gpu: GpuFacts) -> bool:
    return gpu.margin_c is not None and 0 < gpu.margin_c <= HOT_MARGIN_C


def thermal_wall(evidence: Evidence) -> Finding | None:
    found = [gpu for gpu in _busy(evidence) if _hot(gpu)]
    gpu = _worst(found, lambda one: one.share(*_HOT))
    if gpu is None:
        return None
    held = gpu.share(*_HOT)
    hottest = "" if gpu.temperature_c is None else f", up to {about(gpu.temperature_c)} °C"
    said = (
        f"thermal wall: {_names(found)} slowed for heat {format.percent(held)} of the busy time"
        if held > 0
        else f"{_names(found)} is close to its thermal limit, {about(gpu.margin_c)} °C below"
    )
    return Finding(
        code="thermal_wall",
        text=f"{said}{hottest}{_clocks(gpu)}",
        next_step="check fans, inlet air and dust; with a core well below its limit it is the memory that is hot",
        level="error" if gpu.held.get("hw thermal", 0) >= HOT_SAMPLES else "warn",
        weight=CAUSE + share(max(held, gpu.clock_lost)) if held > 0 else HINT + 0.9,
        evidence={
            "thermal_share_ratio": held,
            "temperature_c": gpu.temperature_c,
            "margin_c": gpu.margin_c,
            **_clock_evidence(gpu, found),
        },
    )


def power_brake(evidence: Evidence) -> Finding | None:
    found = [gpu for gpu in evidence.gpus if gpu.share(*_BRAKE) > 0]
    gpu = _worst(found, lambda one: one.share(*_BRAKE))
    if gpu is None:
        return None
    seen = gpu.held.get("power brake", 0)
    return Finding(
        code="power_brake",
        text=f"power brake: the power supply or chassis slowed {_names(found)} "
        f"({format.percent(gpu.share(*_BRAKE))} of the busy time){_clocks(gpu)}",
        next_step="it is the hardware or the rack: check power supplies, cables and the chassis's power budget",
        level="error" if seen > 1 else "warn",
        weight=CAUSE + share(max(0.5, gpu.clock_lost)),
        evidence={
            "brake_share_ratio": gpu.share(*_BRAKE),
            "brake_samples": seen,
            **_clock_evidence(gpu, found),
        },
    )


def hw_slowdown(evidence: Evidence) -> Finding | None:
    """The plain bit, in two samples and with none of those that say why: no cause is named."""
    found = [
        gpu for gpu in _busy(evidence)
        if gpu.held.get("hw slowdown", 0) >= 2 and gpu.share("hw thermal", *_BRAKE) == 0
    ]  # fmt: skip
    gpu = _worst(found, lambda one: one.share(*_PLAIN))
    if gpu is None:
        return None
    return Finding(
        code="hw_slowdown",
        text=f"the hardware slowed {_names(found)} {format.percent(gpu.share(*_PLAIN))} of the busy time and does not "
        f"say why{_clocks(gpu)}",
        next_step="watch it for ten minutes (lpxtop watch); if it returns, look at power and cooling, and at dmesg for "
        "XID messages",
        weight=HINT + share(gpu.clock_lost),
        evidence={
            "slowdown_share_ratio": gpu.share(*_PLAIN),
            "slowdown_samples": gpu.held["hw slowdown"],
            **_clock_evidence(gpu, found),
        },
    )


def _of_max(gpu: GpuFacts) -> float | None:
    if gpu.sm_clock_mhz is None or not gpu.sm_clock_max_mhz:
        return None
    return gpu.sm_clock_mhz / gpu.sm_clock_max_mhz


def _free(gpu: GpuFacts) -> bool:
    return gpu.share(*_SLOWED) == 0


def _locked(gpu: GpuFacts) -> bool:
    low, high = gpu.sm_clock_low_mhz, gpu.sm_clock_high_mhz
    if low is None or high is None or not high or (gpu.utilization_percent or 0.0) < LOCKED_PERCENT:
        return False
    constant = (high - low) / high <= LOCKED_SPREAD and gpu.busy_s >= LOCKED_S
    in_state = gpu.pstate is not None and gpu.pstate <= LOCKED_PSTATE
    return constant and in_state and (_of_max(gpu) or 1.0) <= LOCKED_CLOCK and _free(gpu)


def clocks_locked(evidence: Evidence) -> Finding | None:
    found = [gpu for gpu in _busy(evidence) if _locked(gpu)]
    gpu = _worst(found, lambda one: one.clock_lost)
    if gpu is None:
        return None
    return Finding(
        code="clocks_locked",
        text=f"the clocks of {_names(found)} look locked: busy, nothing holds them, and constant for "
        f"{format.duration(gpu.busy_s)}{_clocks(gpu)}",
        next_step="nvidia-smi -rgc lifts a lock (and -rac an application clock), if nobody meant it",
        weight=CAUSE + share(gpu.clock_lost),
        evidence={
            "constant_s": gpu.busy_s,
            "sm_clock_low_mhz": gpu.sm_clock_low_mhz,
            "sm_clock_high_mhz": gpu.sm_clock_high_mhz,
            "utilization_percent": gpu.utilization_percent,
            **_clock_evidence(gpu, found),
        },
    )


def clocks_low(evidence: Evidence) -> Finding | None:
    """Busy at a fraction of the clock and nothing reported holds it: an idle state that it does not leave."""
    found = [gpu for gpu in _busy(evidence) if (_of_max(gpu) or 1.0) <= LOW_CLOCK and _free(gpu)]
    gpu = _worst(found, lambda one: one.clock_lost)
    if gpu is None:
        return None
    state = f" in P{gpu.pstate:.0f}" if gpu.pstate is not None else ""
    off = " Persistence mode is off." if gpu.persistence is False else ""
    return Finding(
        code="clocks_low",
        text=f"{_names(found)} works at low clocks{state} and the driver reports nothing that holds them{_clocks(gpu)}",
        next_step=f"look at nvidia-smi -q -d CLOCK,PERFORMANCE for a limit that somebody set.{off}",
        weight=CAUSE + share(gpu.clock_lost),
        evidence={"performance_state": gpu.pstate, **_clock_evidence(gpu, found)},
    )


def persistence_off(evidence: Evidence) -> Finding | None:
    found = [gpu for gpu in evidence.gpus if gpu.persistence is False and gpu.samples]
    if not found:
        return None
    return Finding(
        code="persistence_off",
        text=f"persistence mode is off on {_names(found)}: without a process the driver unloads, and the next start "
        "pays for it",
        next_step="nvidia-smi -pm 1, or run nvidia-persistenced",
        level="info",
        weight=HINT,
        evidence={"gpu_label": found[0].label, "affected_gpus": len(found)},
    )


def slower_gpu(evidence: Evidence) -> Finding | None:
    """One GPU's clock against the median of the others of its source: in a group all wait for the slowest."""
    found: list[tuple[float, GpuFacts, float]] = []
    for gpu in _busy(evidence):
        peers = [
            one.sm_clock_mhz for one in _busy(evidence)
            if one is not gpu and one.source == gpu.source and one.sm_clock_mhz is not None
        ]  # fmt: skip
        if peers and gpu.sm_clock_mhz is not None and gpu.sm_clock_mhz <= SLOWER * median(peers):
            found.append((gpu.sm_clock_mhz / median(peers), gpu, median(peers)))
    if not found:
        return None
    part, gpu, peers_mhz = min(found, key=lambda one: one[0])
    return Finding(
        code="slower_gpu",
        text=f"{gpu.label} is slower than its peers: SM clock {format.count(round(gpu.sm_clock_mhz or 0))} MHz, theirs "
        f"{format.count(round(peers_mhz))} MHz; GPUs that work together wait for the slowest",
        next_step=f"compare it with a neighbour: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {_number(gpu)}",
        weight=CAUSE + share(1 - part),
        evidence={"peers_sm_clock_mhz": peers_mhz, "of_peers_ratio": part, **_clock_evidence(gpu, [gpu])},
    )


def _number(gpu: GpuFacts) -> str:
    return gpu.label.removeprefix("GPU ").partition(" ")[0]
