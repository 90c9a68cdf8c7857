"""What does not change about a GPU: identity, sizes, limits, maxima, modes; asked once. Must not sample."""

from typing import Any

from lpxtop.probes import nvml
from lpxtop.probes.host import Host
from lpxtop.probes.readings import Call, FieldBatch, Readings

Row = dict[str, Any]

_ARCHITECTURES = {2: "Kepler", 3: "Maxwell", 4: "Pascal", 5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada", 9: "Hopper",
                  10: "Blackwell"}  # fmt: skip
_COMPUTE_MODES = {0: "default", 2: "prohibited", 3: "exclusive_process"}
_JETSON_WORDS = ("orin", "xavier", "thor", "tegra", "nvgpu")
_UNIFIED_SHARE = 0.9
"""A GPU that calls this much of the system's memory its own shares it."""


def inventory(readings: Readings, handle: Any, index: int, host: Host) -> Row:
    """A row of `source.descriptor["gpus"]`; what is not known is absent. Raises Lost."""
    row = {"index": index, **_identity(readings, handle), **_modes(readings, handle), **_limits(readings, handle)}
    row |= _memory(readings, handle, row, host) | _link(readings, handle)
    row["thresholds_c"], row["margins_c"] = _thresholds(readings, handle, row.get("architecture"))
    row["zeros"] = _answers_zeros(readings, handle, row, host) or None
    readings.why.clear()
    return {name: value for name, value in row.items() if value is not None and value != {}}


def memory_calls(handle: Any) -> tuple[Call, Call]:
    """Memory with what the driver reserves apart; without it on drivers before 510."""
    return ("nvmlDeviceGetMemoryInfo", handle, nvml.MEMORY_V2), ("nvmlDeviceGetMemoryInfo", handle)


def _identity(readings: Readings, handle: Any) -> Row:
    quietly = readings.quietly
    architecture = quietly("nvmlDeviceGetArchitecture", handle)
    return {
        "uuid": nvml.text(quietly("nvmlDeviceGetUUID", handle)),
        "name": nvml.text(quietly("nvmlDeviceGetName", handle)),
        "pci": _pci(quietly("nvmlDeviceGetPciInfo", handle)),
        "minor": quietly("nvmlDeviceGetMinorNumber", handle),
        "architecture": _ARCHITECTURES.get(architecture),
    }


def _pci(info: Any) -> str | None:
    """As the kernel writes it: 0000:3b:00.0 (NVML's domain has eight digits)."""
    bus = nvml.text(getattr(info, "busId", None))
    return bus.lower()[-12:] if bus else None


def _modes(readings: Readings, handle: Any) -> Row:
    quietly = readings.quietly
    persistence = quietly("nvmlDeviceGetPersistenceMode", handle)
    return {
        "persistence": None if persistence is None else bool(persistence),
        "compute_mode": _COMPUTE_MODES.get(quietly("nvmlDeviceGetComputeMode", handle)),
        "mig": _pair(quietly("nvmlDeviceGetMigMode", handle)),
        "ecc": _pair(quietly("nvmlDeviceGetEccMode", handle)),
    }


def _pair(modes: Any) -> Row | None:
    """Current and pending, as NVML gives switches that take effect with a reset."""
    return None if modes is None else {"current": bool(modes[0]), "pending": bool(modes[1])}


def _limits(readings: Readings, handle: Any) -> Row:
    quietly = readings.quietly
    constraints = quietly("nvmlDeviceGetPowerManagementLimitConstraints", handle) or (None, None)
    enforced = readings.ask(
        "", ("nvmlDeviceGetEnforcedPowerLimit", handle), ("nvmlDeviceGetPowerManagementLimit", handle)
    )
    requested = FieldBatch(readings, handle, {"requested": (nvml.POWER_LIMIT_REQUESTED, 0)}).read()
    return {
        "power_limit_watts": nvml.watts(enforced),
        "power_limit_default_watts": nvml.watts(quietly("nvmlDeviceGetPowerManagementDefaultLimit", handle)),
        "power_limit_min_watts": nvml.watts(constraints[0]),
        "power_limit_max_watts": nvml.watts(constraints[1]),
        "power_limit_requested_watts": nvml.watts(requested.get("requested")),
        "sm_clock_max_mhz": quietly("nvmlDeviceGetMaxClockInfo", handle, nvml.SM_CLOCK),
        "memory_clock_max_mhz": quietly("nvmlDeviceGetMaxClockInfo", handle, nvml.MEMORY_CLOCK),
        "sm_clock_application_mhz": quietly("nvmlDeviceGetClock", handle, nvml.SM_CLOCK, 1),
        "throttle_bits_possible": readings.ask(
            "",
            ("nvmlDeviceGetSupportedClocksEventReasons", handle),
            ("nvmlDeviceGetSupportedClocksThrottleReasons", handle),
        ),
    }


def _link(readings: Readings, handle: Any) -> Row:
    quietly = readings.quietly
    links = FieldBatch(readings, handle, {"links": (nvml.NVLINK_COUNT, 0)}).read()
    return {
        "pcie_generation_max": quietly("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        "pcie_width_max": quietly("nvmlDeviceGetMaxPcieLinkWidth", handle),
        "nvlink_links": links.get("links") or None,
    }


def _thresholds(readings: Readings, handle: Any, architecture: str | None) -> tuple[Row, Row]:
    """Absolute °C up to Ampere, signed offsets to the limit from Ada on; never the one as the other."""
    newer = architecture in ("Ada", "Hopper", "Blackwell")
    margins = FieldBatch(readings, handle, {n: (field, 0) for n, field in nvml.MARGINS.items()}).read() if newer else {}
    if newer or architecture is None:
        return {}, margins
    found = {
        name: readings.quietly("nvmlDeviceGetTemperatureThreshold", handle, kind)
        for name, kind in nvml.THRESHOLDS.items()
    }
    return {name: value for name, value in found.items() if value}, margins


def _memory(readings: Readings, handle: Any, row: Row, host: Host) -> Row:
    memory = readings.ask("memory", *memory_calls(handle))
    total = getattr(memory, "total", None)
    unsupported = readings.why.get("memory") == nvml.reason(3) and not (row.get("mig") or {}).get("current")
    system = host.memory()
    if _is_unified(readings, handle, total, unsupported, system):
        return {"unified_memory": True, "memory_total_bytes": system[0] if system else None}
    return {"memory_total_bytes": total}


def _is_unified(
    readings: Readings, handle: Any, total: int | None, unsupported: bool, system: tuple[int, int] | None
) -> bool:
    """Whether the GPU has no memory of its own (GB10, Jetson). A large card in a small host has a BAR1 and is none."""
    if unsupported or total == 0:
        return True
    if total is None or system is None or total < _UNIFIED_SHARE * system[0]:
        return False
    addressing = readings.quietly("nvmlDeviceGetAddressingMode", handle)
    bar1 = readings.quietly("nvmlDeviceGetBAR1MemoryInfo", handle)
    return addressing == nvml.ADDRESSING_ATS or not getattr(bar1, "bar1Total", 0)


def _answers_zeros(readings: Readings, handle: Any, row: Row, host: Host) -> bool:
    """Whether NVML answers 0 here for want of an answer: no clock range and no temperature, on a Jetson."""
    name = str(row.get("name", "")).lower()
    if not host.is_jetson() and not any(word in name for word in _JETSON_WORDS):
        return False
    temperature = readings.quietly("nvmlDeviceGetTemperature", handle, 0)
    return not row.get("sm_clock_max_mhz") and not temperature
