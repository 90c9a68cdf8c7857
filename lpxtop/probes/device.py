"""One GPU: which NVML calls give which reading each sample, and what is done where a driver or a card has no answer.

Must not start threads, read a clock or make events.
"""

from typing import Any

from lpxtop.probes import nvml
from lpxtop.probes.host import Host
from lpxtop.probes.inventory import inventory, memory_calls
from lpxtop.probes.nvml import Library
from lpxtop.probes.readings import FieldBatch, Lost, Readings

Row = dict[str, Any]
"""One GPU's values by column; absent when not known. `throttle_ns` is a dict by reason."""

SLOW_COLUMNS = ("pcie_generation", "pcie_width")
_PLAIN_FIELDS = {
    "power_instant": nvml.POWER_INSTANT, "power_average_watts": nvml.POWER_AVERAGE, "power_limit": nvml.POWER_LIMIT,
    "memory_temperature_c": nvml.MEMORY_TEMPERATURE, "energy": nvml.ENERGY,
    "pcie_tx_bytes": nvml.PCIE_TX, "pcie_rx_bytes": nvml.PCIE_RX,
}  # fmt: skip
_COVERED = {"power_instant": "power_watts", "power_limit": "power_limit_watts", "energy": "energy_j"}
"""Fields with plain calls behind them: the last of these says why the column is missing."""
_FALLBACKS = {
    "power_watts": ("nvmlDeviceGetPowerUsage",),
    "power_limit_watts": ("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit"),
    "energy_j": ("nvmlDeviceGetTotalEnergyConsumption",),
}
_SLOW_FIELDS = {"recovery": (nvml.RECOVERY_ACTION, 0), "replays": (nvml.PCIE_REPLAY, 0)}
_SAME_UNIT = ("memory_temperature_c", "pcie_tx_bytes", "pcie_rx_bytes")
_MIN_COUNTER_NS = 1_000_000


class Device:
    """One GPU (or MIG instance). `lost` says why its handle is not used any more."""

    def __init__(self, library: Library, index: int, host: Host, driver: str | None) -> None:
        self.index = index
        self.lost: str | None = None
        self.readings = Readings(library)
        self.handle: Any = None
        self.inventory: Row = {"index": index}
        self._library, self._host, self._driver = library, host, driver
        self._slow: Row = {}
        self._throttle_before: dict[str, int] = {}
        self._held_samples: dict[str, int] = {}
        self.open()

    def open(self) -> None:
        """Get a handle and read what does not change. Without one, `inventory["error"]` says why."""
        try:
            self.handle = self._handle()
            if self.handle is None:
                self.inventory["error"] = self.readings.why.get("handle", "cannot be opened")
                return
            self.inventory.pop("error", None)
            self.lost = None
            self.inventory |= inventory(self.readings, self.handle, self.index, self._host)
        except Lost as lost:
            self.lost = str(lost)
        self.readings.mig = bool(self.inventory.get("mig", {}).get("current"))
        self._fields = FieldBatch(self.readings, self.handle, self._field_table())
        self._slow_fields = FieldBatch(self.readings, self.handle, _SLOW_FIELDS)

    def _handle(self) -> Any:
        """By index at first; a GPU that was lost comes back under its UUID."""
        uuid = self.inventory.get("uuid")
        call = ("nvmlDeviceGetHandleByIndex", self.index) if uuid is None else ("nvmlDeviceGetHandleByUUID", uuid)
        return self.readings.ask("handle", call)

    def _field_table(self) -> dict[str, tuple[int, int]]:
        fields = {name: (number, 0) for name, number in _PLAIN_FIELDS.items()}
        throttle = nvml.THROTTLE_FIELDS | nvml.moving_throttle_fields(self._driver)
        fields |= {f"throttle.{name}": (number, 0) for name, number in throttle.items()}
        if self.inventory.get("nvlink_links"):
            fields |= {
                "nvlink_tx": (nvml.NVLINK_TX_KIB, nvml.ALL_LINKS),
                "nvlink_rx": (nvml.NVLINK_RX_KIB, nvml.ALL_LINKS),
            }
        return fields

    # --- each sample -------------------------------------------------------------------------------------------

    def read(self, slow: bool) -> Row:
        """One sample; with `slow` also what changes seldom and the processes. Raises Lost."""
        self.readings.begin()
        if self.handle is None:
            return {}
        fields = self._fields.read()
        row = {**self._plain(), **self._memory(), **self._from_fields(fields)}
        row["thermal_margin_c"] = self._margin(row)
        row["throttle_ns"] = self._throttle(fields, row.get("throttle_bits"))
        if slow:
            self._read_slow(row)
        row |= self._slow
        if self.inventory.get("zeros"):
            row = self._without_zeros(row)
        return {name: value for name, value in row.items() if value is not None}

    def _plain(self) -> Row:
        ask, handle = self.readings.ask, self.handle
        rates = ask("utilization_percent", ("nvmlDeviceGetUtilizationRates", handle))
        pstate = ask("pstate", ("nvmlDeviceGetPerformanceState", handle))
        return {
            "utilization_percent": getattr(rates, "gpu", None),
            "memory_utilization_percent": getattr(rates, "memory", None),
            "sm_clock_mhz": ask("sm_clock_mhz", ("nvmlDeviceGetClockInfo", handle, nvml.SM_CLOCK)),
            "memory_clock_mhz": ask("memory_clock_mhz", ("nvmlDeviceGetClockInfo", handle, nvml.MEMORY_CLOCK)),
            "pstate": pstate if pstate is not None and 0 <= pstate <= 15 else None,  # 32 is "unknown"
            "temperature_c": ask(
                "temperature_c", ("nvmlDeviceGetTemperatureV", handle, 0), ("nvmlDeviceGetTemperature", handle, 0)
            ),
            "throttle_bits": ask(
                "throttle_bits",
                ("nvmlDeviceGetCurrentClocksEventReasons", handle),
                ("nvmlDeviceGetCurrentClocksThrottleReasons", handle),
            ),
        }

    def _memory(self) -> Row:
        if self.inventory.get("unified_memory"):
            return self._system_memory()
        memory = self.readings.ask("memory_used_bytes", *memory_calls(self.handle))
        if memory is None:
            return {}
        # without v2, `used` contains what the driver reserves
        return {
            "memory_used_bytes": int(memory.used),
            "memory_total_bytes": int(memory.total),
            "memory_reserved_bytes": getattr(memory, "reserved", None),
        }

    def _system_memory(self) -> Row:
        memory = self._host.memory()
        if memory is None:
            self.readings.why["memory_used_bytes"] = "shared with the system, which does not say"
            return {}
        total, available = memory
        return {"memory_used_bytes": total - available, "memory_total_bytes": total}

    def _from_fields(self, fields: Row) -> Row:
        ask, handle = self.readings.ask, self.handle
        row: Row = {name: fields.get(name) for name in _SAME_UNIT}
        row["power_average_watts"] = nvml.watts(fields.get("power_average_watts"))
        for name, column in _COVERED.items():
            value = fields.get(name)
            if value is None:
                value = ask(column, *((call, handle) for call in _FALLBACKS[column]))
            else:
                self.readings.why.pop(column, None)
            self.readings.why.pop(name, None)
            row[column] = nvml.watts(value)  # mJ to J is the same step as mW to W
        for name in ("nvlink_tx", "nvlink_rx"):
            if fields.get(name) is not None:
                row[f"{name}_bytes"] = fields[name] * 1024
        if not row["memory_temperature_c"]:  # cards without the sensor may say 0
            row["memory_temperature_c"] = None
        return row

    # --- heat and throttling -----------------------------------------------------------------------------------

    def _margin(self, row: Row) -> float | None:
        """°C left until the GPU slows down. A margin of 0 or less is believed only when the GPU says it is too hot."""
        margin = self.readings.ask("thermal_margin_c", ("nvmlDeviceGetMarginTemperature", self.handle))
        if margin is not None:
            hot = (row.get("throttle_bits") or 0) & nvml.THERMAL_BITS
            if margin > 0 or hot:
                return float(margin)
            self.readings.why["thermal_margin_c"] = f"the driver gives a margin of {margin} for a GPU that is not hot"
            return None
        slowdown = self.inventory.get("thresholds_c", {}).get("slowdown")
        if slowdown is None or row.get("temperature_c") is None:
            return None
        self.readings.why.pop("thermal_margin_c", None)
        return float(slowdown - row["temperature_c"])

    def _throttle(self, fields: Row, bits: int | None) -> dict[str, int]:
        """Nanoseconds per reason. A counter that goes back, or stands near zero while its reason holds, is another
        quantity under the same number: it is dropped for good."""
        found = {}
        for key, value in fields.items():
            prefix, _, name = key.partition(".")
            if prefix != "throttle" or value is None:
                continue
            if self._is_no_counter(name, value, bits):
                self._fields.drop(key, "the driver gives another quantity under this number")
                continue
            self._throttle_before[name] = found[name] = int(value)
        return found

    def _is_no_counter(self, name: str, value: int, bits: int | None) -> bool:
        held = bits is not None and bool(bits & nvml.THROTTLE_BITS.get(name, 0))
        self._held_samples[name] = self._held_samples.get(name, 0) + 1 if held else 0
        moved_back = value < self._throttle_before.get(name, 0)
        # four samples in a row are a second or more
        return moved_back or (name in nvml.MOVING_FIELDS and self._held_samples[name] > 4 and value < _MIN_COUNTER_NS)

    # --- seldom ------------------------------------------------------------------------------------------------

    def _read_slow(self, row: Row) -> None:
        ask, handle = self.readings.ask, self.handle
        self._slow = {
            "pcie_generation": ask("pcie_generation", ("nvmlDeviceGetCurrPcieLinkGeneration", handle)),
            "pcie_width": ask("pcie_width", ("nvmlDeviceGetCurrPcieLinkWidth", handle)),
        }
        row["processes"] = self._processes(row.get("memory_total_bytes"))
        row["health"] = self._health()

    def _processes(self, total_bytes: int | None) -> list[Row] | None:
        found: dict[int, Row] = {}
        known = False
        for kind in ("Compute", "Graphics", "MPSCompute"):
            column = "processes" if kind == "Compute" else f"processes.{kind}"
            processes = self.readings.ask(column, (f"nvmlDeviceGet{kind}RunningProcesses_v3", self.handle))
            if kind != "Compute":
                self.readings.why.pop(column, None)
            known = known or processes is not None
            for process in processes or ():
                row = _process(process, kind.lower().removeprefix("mps"), total_bytes)
                if row is not None and row["pid"] not in found:
                    row["name"] = self._host.process_name(row["pid"])
                    found[row["pid"]] = {name: value for name, value in row.items() if value is not None}
        return list(found.values()) if known else None

    def _health(self) -> Row:
        """Errors so far. An answer about row remapping does not mean that the card has it (GeForce says 0)."""
        quietly, handle = self.readings.quietly, self.handle
        corrected, uncorrected = (quietly("nvmlDeviceGetTotalEccErrors", handle, kind, 0) for kind in (0, 1))
        remapped = quietly("nvmlDeviceGetRemappedRows", handle) or (None,) * 4
        fields = self._slow_fields.read()
        for name in _SLOW_FIELDS:
            self.readings.why.pop(name, None)
        found = {
            "ecc_corrected": corrected,
            "ecc_uncorrected": uncorrected,
            "rows_remapped_corrected": remapped[0],
            "rows_remapped_uncorrected": remapped[1],
            "remap_pending": remapped[2],
            "remap_failure": remapped[3],
            "retired_pages_pending": quietly("nvmlDeviceGetRetiredPagesPendingStatus", handle),
            "pcie_replays": fields.get("replays"),
            "recovery_action": nvml.RECOVERY.get(fields.get("recovery", 0)),
            "fan_percent": quietly("nvmlDeviceGetFanSpeed", handle),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _without_zeros(self, row: Row) -> Row:
        """A board whose NVML answers 0 to everything knows nothing."""
        kept = {name: value for name, value in row.items() if value not in (0, 0.0)}
        for name in row.keys() - kept.keys():
            self.readings.why[name] = "always 0 on this board (on a Jetson use tegrastats)"
        return kept


class MigInstance:
    """A MIG device: a part of a GPU with its own memory. Everything else is the whole GPU's."""

    def __init__(self, library: Library, parent: Device, handle: Any) -> None:
        self.index = parent.index
        self.lost: str | None = None
        self.readings = Readings(library)
        self.handle = handle
        quietly = self.readings.quietly
        memory = quietly("nvmlDeviceGetMemoryInfo", handle)
        found = {
            "index": parent.index,
            "uuid": nvml.text(quietly("nvmlDeviceGetUUID", handle)),
            "name": nvml.text(quietly("nvmlDeviceGetName", handle)),
            "pci": parent.inventory.get("pci"),
            "memory_total_bytes": getattr(memory, "total", None),
            "mig_instance": {
                "gpu_instance": quietly("nvmlDeviceGetGpuInstanceId", handle),
                "compute_instance": quietly("nvmlDeviceGetComputeInstanceId", handle),
            },
        }
        self.inventory: Row = {name: value for name, value in found.items() if value is not None}

    def open(self) -> None:
        """An instance that is gone stays gone: its handle belongs to the GPU that was lost."""

    def read(self, slow: bool) -> Row:
        """Memory. Raises Lost."""
        del slow
        self.readings.begin()
        memory = self.readings.ask("memory_used_bytes", *memory_calls(self.handle))
        return (
            {} if memory is None else {"memory_used_bytes": int(memory.used), "memory_total_bytes": int(memory.total)}
        )


def mig_instances(library: Library, parent: Device) -> list[MigInstance]:
    """The MIG devices of a GPU in MIG mode."""
    if not parent.readings.mig or parent.handle is None:
        return []
    count = library.get("nvmlDeviceGetMaxMigDeviceCount", parent.handle) or 0
    handles = (library.get("nvmlDeviceGetMigDeviceHandleByIndex", parent.handle, place) for place in range(count))
    return [MigInstance(library, parent, handle) for handle in handles if handle is not None]


def _process(process: Any, kind: str, total_bytes: int | None) -> Row | None:
    """A row of NVML's list; None for one that cannot be true (drivers and bindings have disagreed about its layout)."""
    pid, memory = process.pid, process.usedGpuMemory
    if not 0 < pid < 2**22 + 1 or (memory is not None and total_bytes is not None and memory > total_bytes):
        return None
    instance = process.gpuInstanceId if process.gpuInstanceId != nvml.NO_INSTANCE else None
    return {"pid": pid, "kind": kind, "memory_bytes": memory, "gpu_instance": instance}
