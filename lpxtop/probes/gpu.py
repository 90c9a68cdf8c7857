"""The GPUs of this host through NVML: an event source. The only module that imports pynvml; never blocks the loop.

One daemon thread, one initialisation, at most 4 samples a second. A reading that a GPU or driver does not have is
asked for once and then left alone: its column stays None, with the reason in `notes`. Must not set anything.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from lpxtop.clock import Clock, SystemClock, session_us
from lpxtop.events.records import AnyEvent, Gpu, Source

MAX_HZ = 4.0
STALE_S = 3.0
"""Without a sample for so long the GPU's figures are called stale: a call hangs."""
COST_SHARE = 0.1
PERMANENT = {3: "not supported on this GPU", 4: "no permission", 13: "the driver is too old for this reading",
             25: "the driver is too old for this reading", 26: "no longer offered by the driver"}  # fmt: skip
LOST = {15: "the GPU fell off the bus", 16: "the GPU must be reset"}
INIT_PROBLEMS = {
    9: "the NVIDIA kernel driver is not loaded (nvidia-smi would say the same): load it, or reboot",
    12: "NVML is not on this host (no libnvidia-ml.so.1): no NVIDIA driver here, or a container started without --gpus",
    4: "no permission to open the GPUs: check /dev/nvidia* and the container's device rules",
    17: "the system blocks the GPUs (cgroup or device policy)",
    18: "driver and library versions do not match: reboot, or reload the kernel module",
    999: "NVML says 'unknown error'; in a container, restart it (device access is lost after a daemon-reload)",
}
_NO_LIBRARY_NOTE = "no NVIDIA GPU readings: "
_FIELD_POWER_AVERAGE, _FIELD_POWER_INSTANT, _FIELD_MEMORY_TEMPERATURE = 185, 186, 82
_THROTTLE_FIELDS = {"power_cap": 74, "thermal_violation": 75, "sync_boost": 76, "board_limit": 77, "reliability": 79}
"""Cumulative nanoseconds per reason; these ids mean the same in every driver (others were renumbered)."""


class GpuSource:
    """NVML as events: `source` joined with the inventory, then `gpu` samples; or `source` unavailable and the end.

    `select` is `nvml` for all GPUs, `nvml:0-3,5` for some by NVML's index.
    """

    def __init__(
        self,
        origin_ns: int,
        *,
        name: str = "gpu0",
        select: str | None = None,
        hz: float = 2.0,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self._origin_ns = origin_ns
        self._indices = parse_selection(select)
        self._period_s = 1.0 / min(hz, MAX_HZ)
        self._clock: Clock = clock or SystemClock()
        self._stop = threading.Event()
        self._closed = asyncio.Event()
        self._seq = 0

    async def close(self) -> None:
        """The thread is told and not waited for: a driver call may hang for a minute."""
        self._stop.set()
        self._closed.set()

    async def __aiter__(self) -> AsyncIterator[AnyEvent]:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

        def put(item: dict[str, Any] | None) -> None:
            if not self._closed.is_set():
                loop.call_soon_threadsafe(queue.put_nowait, item)

        threading.Thread(target=self._sample_forever, args=(put,), name="nvml", daemon=True).start()
        closed = asyncio.ensure_future(self._closed.wait())
        last: dict[str, Any] | None = None
        try:
            while not self._closed.is_set():
                getter = asyncio.ensure_future(queue.get())
                done, _ = await asyncio.wait(
                    {getter, closed}, timeout=STALE_S, return_when=asyncio.FIRST_COMPLETED
                )  # fmt: skip
                if getter not in done:
                    getter.cancel()
                    if closed in done:
                        return
                    if last is not None:
                        yield self._stale(last)
                    continue
                item = getter.result()
                if item is None:
                    return
                last = item if "columns" in item else last
                for event in self._events(item):
                    yield event
        finally:
            closed.cancel()
            self._stop.set()

    # --- events ------------------------------------------------------------------------------------------------

    def _stamp(self, monotonic_ns: int | None = None) -> dict[str, Any]:
        self._seq += 1
        at = self._clock.monotonic_ns() if monotonic_ns is None else monotonic_ns
        return {"t": session_us(at, self._origin_ns), "src": self.name, "seq": self._seq - 1}

    def _events(self, item: dict[str, Any]) -> list[AnyEvent]:
        if "unavailable" in item:
            return [Source(**self._stamp(), kind="gpu", state="unavailable", text=item["unavailable"])]
        if "inventory" in item:
            return [Source(**self._stamp(), kind="gpu", state="joined", descriptor=item["inventory"])]
        events: list[AnyEvent] = [
            Source(**self._stamp(), kind="gpu", state="failed", text=text) for text in item.get("failed", ())
        ]
        return [*events, Gpu(**self._stamp(item["at_ns"]), **item["columns"])]

    def _stale(self, last: dict[str, Any]) -> Gpu:
        """No sample came: the count of GPUs is still known, their figures are not."""
        return Gpu(**self._stamp(), status=["stale"] * len(last["columns"]["status"]))

    # --- the thread --------------------------------------------------------------------------------------------

    def _sample_forever(self, put: Callable[[dict[str, Any] | None], None]) -> None:
        try:
            devices = self._open(put)
        except Exception as error:  # whatever a driver does, the run goes on without GPU readings
            put({"unavailable": f"{_NO_LIBRARY_NOTE}{error}"})
            devices = []
        if not devices:
            put(None)
            return
        while not self._stop.is_set():
            begin = self._clock.monotonic_ns()
            put(sample(devices, begin))
            spent_s = (self._clock.monotonic_ns() - begin) / 1e9
            self._stop.wait(max(self._period_s, spent_s / COST_SHARE) - spent_s)

    def _open(self, put: Callable[[dict[str, Any] | None], None]) -> "list[Device]":
        try:
            import pynvml
        except ImportError:
            put({"unavailable": f"{_NO_LIBRARY_NOTE}the package nvidia-ml-py is not installed"})
            return []
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            code = int(getattr(error, "value", 999))
            put({"unavailable": _NO_LIBRARY_NOTE + INIT_PROBLEMS.get(code, f"NVML: {error}")})
            return []
        devices = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            if self._indices is None or index in self._indices:
                devices.append(Device(pynvml, index))
        if not devices:
            put({"unavailable": f"{_NO_LIBRARY_NOTE}NVML works but shows no GPU"})
            return []
        put({"inventory": {"gpus": [device.inventory() for device in devices], **_system(pynvml)}})
        return devices


class Device:
    """One GPU. Remembers which readings it does not have, and why."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml, self.index = nvml, index
        self.missing: dict[str, str] = {}
        self.lost: str | None = None
        self.told_lost = False
        self._handle: Any = None
        self._handle = self._ask("handle", lambda: nvml.nvmlDeviceGetHandleByIndex(index))

    def _ask(self, column: str, call: Callable[[], Any]) -> Any:
        """A reading; None when it is not there. Permanent errors are remembered, a lost GPU is never asked again."""
        if self.lost is not None or column in self.missing:
            return None
        try:
            return call()
        except self._nvml.NVMLError as error:
            code = int(getattr(error, "value", 999))
            if code in LOST:
                self.lost = LOST[code]
            elif code in PERMANENT:
                self.missing[column] = PERMANENT[code]
            return None
        except (AttributeError, TypeError, ValueError, UnicodeDecodeError) as error:
            self.missing[column] = f"this nvidia-ml-py does not offer it ({error})"
            return None

    def inventory(self) -> dict[str, Any]:
        """What does not change: identity, sizes, limits, maxima."""
        nvml, handle, ask = self._nvml, self._handle, self._ask
        memory = ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
        pci = ask("pci", lambda: nvml.nvmlDeviceGetPciInfo(handle))
        limits = ask("power_limits", lambda: nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle))
        found = {
            "index": self.index,
            "uuid": _text(ask("uuid", lambda: nvml.nvmlDeviceGetUUID(handle))),
            "name": _text(ask("name", lambda: nvml.nvmlDeviceGetName(handle))),
            "pci": _text(getattr(pci, "busId", None)),
            "memory_total_bytes": getattr(memory, "total", None),
            "power_limit_watts": _watts(ask("power_limit", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))),
            "power_limit_default_watts": _watts(
                ask("power_default", lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle))
            ),
            "power_limit_max_watts": _watts(limits[1]) if limits else None,
            "sm_clock_max_mhz": ask("sm_max", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "memory_clock_max_mhz": ask(
                "memory_max", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM)
            ),
            "persistence": ask("persistence", lambda: nvml.nvmlDeviceGetPersistenceMode(handle)),
            "compute_mode": ask("compute_mode", lambda: nvml.nvmlDeviceGetComputeMode(handle)),
        }
        return {name: value for name, value in found.items() if value is not None}

    def read(self) -> dict[str, Any]:
        """One sample, by column; absent means not known."""
        nvml, handle, ask = self._nvml, self._handle, self._ask
        if handle is None:
            return {}
        rates = ask("utilization_percent", lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        fields = self._fields()
        found = {
            "utilization_percent": getattr(rates, "gpu", None),
            "memory_utilization_percent": getattr(rates, "memory", None),
            **self._memory(),
            "power_watts": self._power(fields),
            "power_average_watts": _watts(fields.get(_FIELD_POWER_AVERAGE)),
            "power_limit_watts": _watts(ask("power_limit_watts", lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))),
            "energy_j": _milli(ask("energy_j", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))),
            "sm_clock_mhz": ask("sm_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "memory_clock_mhz": ask(
                "memory_clock_mhz", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)
            ),
            "pstate": ask("pstate", lambda: nvml.nvmlDeviceGetPerformanceState(handle)),
            "temperature_c": ask(
                "temperature_c", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            "memory_temperature_c": fields.get(_FIELD_MEMORY_TEMPERATURE),
            "throttle_bits": self._throttle_bits(),
        }
        found["throttle_ns"] = {name: fields[number] for name, number in _THROTTLE_FIELDS.items() if number in fields}
        return {name: value for name, value in found.items() if value is not None}

    def _memory(self) -> dict[str, Any]:
        nvml, handle = self._nvml, self._handle
        memory = self._ask(
            "memory_used_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        )
        if memory is None:
            return {}
        return {
            "memory_used_bytes": int(memory.used),
            "memory_reserved_bytes": int(memory.reserved),
            "memory_total_bytes": int(memory.total),
        }

    def _power(self, fields: dict[int, Any]) -> float | None:
        """Instant power; where the driver does not have it, NVML's plain reading (an average on many boards)."""
        if _FIELD_POWER_INSTANT in fields:
            return _watts(fields[_FIELD_POWER_INSTANT])
        return _watts(self._ask("power_watts", lambda: self._nvml.nvmlDeviceGetPowerUsage(self._handle)))

    def _throttle_bits(self) -> int | None:
        nvml, handle = self._nvml, self._handle
        bits: int | None = self._ask("throttle_bits", lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        if bits is None:
            bits = self._ask("throttle_bits_old", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
        return bits

    def _fields(self) -> dict[int, Any]:
        """The batch: one driver call; each field has its own return code."""
        nvml = self._nvml
        wanted = [
            number
            for number in (
                _FIELD_POWER_INSTANT,
                _FIELD_POWER_AVERAGE,
                _FIELD_MEMORY_TEMPERATURE,
                *_THROTTLE_FIELDS.values(),
            )
            if f"field {number}" not in self.missing
        ]
        values = self._ask("fields", lambda: nvml.nvmlDeviceGetFieldValues(self._handle, wanted)) if wanted else None
        found: dict[int, Any] = {}
        for number, value in zip(wanted, values or (), strict=False):
            if value.nvmlReturn == 0:
                found[number] = _field_value(value)
            elif value.nvmlReturn in PERMANENT:
                self.missing[f"field {number}"] = PERMANENT[value.nvmlReturn]
        return found


_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal")


def _field_value(value: Any) -> Any:
    """The union's member that `valueType` names."""
    return getattr(value.value, _MEMBERS[value.valueType]) if 0 <= value.valueType < len(_MEMBERS) else None


def sample(devices: list[Device], at_ns: int) -> dict[str, Any]:
    """One sample of all devices as the columns of a `gpu` event; what happened to them as `failed` lines."""
    rows = [device.read() for device in devices]
    names = {name for row in rows for name in row if name != "throttle_ns"}
    columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in sorted(names)}
    reasons = {reason for row in rows for reason in row.get("throttle_ns", {})}
    columns["throttle_ns"] = {
        reason: [row.get("throttle_ns", {}).get(reason) for row in rows] for reason in sorted(reasons)
    }
    columns["status"] = ["lost" if device.lost else "ok" for device in devices]
    columns["notes"] = {name: why for device in devices for name, why in device.missing.items()}
    failed = []
    for device in devices:
        if device.lost and not device.told_lost:
            device.told_lost = True
            failed.append(f"GPU {device.index}: {device.lost}")
    return {"columns": columns, "at_ns": at_ns, "failed": failed}


def parse_selection(select: str | None) -> set[int] | None:
    """`nvml:0-3,5` as indices; None for all. Raises ValueError for anything else."""
    _, colon, text = (select or "").partition(":")
    if not colon:
        return None
    indices: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        indices |= set(range(int(first), int(last if dash else first) + 1))
    return indices


def _system(nvml: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, call in (("driver", "nvmlSystemGetDriverVersion"), ("cuda_driver", "nvmlSystemGetCudaDriverVersion_v2"),
                       ("nvml", "nvmlSystemGetNVMLVersion")):  # fmt: skip
        try:
            value = getattr(nvml, call)()
        except (nvml.NVMLError, AttributeError):
            continue
        found[name] = f"{value // 1000}.{value % 1000 // 10}" if isinstance(value, int) else _text(value)
    return found


def _text(value: Any) -> str | None:
    if value is None:
        return None
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _watts(milliwatts: Any) -> float | None:
    return None if milliwatts is None else round(float(milliwatts) / 1000, 3)


def _milli(value: Any) -> float | None:
    return None if value is None else float(value) / 1000
