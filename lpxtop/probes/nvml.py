"""NVML through nvidia-ml-py: loading, error codes in words, and every number that means something to the driver.

The only module that imports pynvml, and only when asked. Must not decide what to read or when, and sets nothing.
"""

import re
import subprocess
import sys
from typing import Any

from lpxtop.probes.host import Host

LOST = {15: "it fell off the bus", 16: "it must be reset"}
"""Codes after which a handle must not be used again."""
PERMANENT = {
    2: "not a reading of this driver",
    3: "not supported on this GPU",
    4: "no permission",
    13: "the driver is too old for this reading",
    25: "the driver is too old for this reading",
    26: "no longer offered by the driver",
    -1: "this nvidia-ml-py does not offer it",
}
"""Codes that will not change for this GPU and driver: the reading is never asked for again."""
WORDS = PERMANENT | LOST | {
    1: "NVML is not initialised",
    6: "not found",
    7: "the answer did not fit",
    9: "the kernel driver is not loaded",
    10: "timed out",
    12: "the NVML library was not found",
    17: "blocked by the system (cgroup or device policy)",
    18: "driver and library versions do not match",
    19: "in use",
    20: "out of memory",
    21: "no data",
    23: "insufficient resources",
    27: "not ready",
    999: "unknown error",
}  # fmt: skip
UNKNOWN_ADVICE = "in a container, restart it: access to the devices is lost after a daemon-reload on the host"
NO_READINGS = "no GPU readings"
_INIT = {
    4: "no permission to open the GPUs: check the rights of /dev/nvidia* and the container's device rules",
    9: "the kernel driver is not loaded: load it (modprobe nvidia) or reboot",
    12: "no NVIDIA driver here (libnvidia-ml.so.1), or no --gpus",  # of a container; one line of 80 columns
    17: "the system blocks the GPUs (cgroup or device policy): allow /dev/nvidia* for this container",
    999: f"NVML says 'unknown error'; {UNKNOWN_ADVICE}",
}

POWER_INSTANT, POWER_AVERAGE, POWER_LIMIT, POWER_LIMIT_REQUESTED = 186, 185, 190, 192
MEMORY_TEMPERATURE, ENERGY = 82, 83
PCIE_TX, PCIE_RX = 197, 198
NVLINK_COUNT, NVLINK_TX_KIB, NVLINK_RX_KIB = 91, 138, 139
ALL_LINKS = 0xFFFFFFFF
PCIE_REPLAY, RECOVERY_ACTION = 94, 230
MARGINS = {"shutdown": 193, "slowdown": 194, "memory_max": 195, "gpu_max": 196}
"""Ada and newer: signed offsets to the limit, not °C."""
THRESHOLDS = {"shutdown": 0, "slowdown": 1, "memory_max": 2, "gpu_max": 3}
"""Before Ada: absolute °C."""
RECOVERY = {1: "reset", 2: "reboot", 3: "drain peer-to-peer traffic", 4: "drain and reset", 5: "restart IMEX"}
AMPERE = 7
SM_CLOCK, MEMORY_CLOCK = 1, 2
MEMORY_V2 = 0x02000028
ADDRESSING_ATS = 2
XID_EVENT = 0x8
TIMED_OUT = 10
THROTTLE_FIELDS = {"power_cap": 74, "thermal_violation": 75, "sync_boost": 76, "board_limit": 77, "reliability": 79}
"""Cumulative nanoseconds per reason; these mean the same in every driver."""
MOVING_FIELDS = ("thermal", "hw_thermal", "power_brake")
"""Reasons whose field ids were renumbered between drivers."""
THROTTLE_BITS = {"power_cap": 0x4, "thermal": 0x20, "hw_thermal": 0x40, "power_brake": 0x80}
THERMAL_BITS = 0x20 | 0x40
NO_INSTANCE = 0xFFFFFFFF


class NvmlFailure(Exception):
    """An NVML call returned an error: `code` (-1: the binding has no such call)."""

    def __init__(self, code: int) -> None:
        super().__init__(reason(code))
        self.code = code


class Unavailable(Exception):
    """There are no GPU readings on this host; the text is the sentence for a person."""


def reason(code: int) -> str:
    """The code in words."""
    return WORDS.get(code, f"NVML error {code}")


class Library:
    """The initialised library. `call` is the one way in."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._error: type[Exception] = module.NVMLError

    def call(self, name: str, *args: Any) -> Any:
        """The answer of pynvml's function `name`. Raises NvmlFailure."""
        function = getattr(self._module, name, None)
        if function is None:
            raise NvmlFailure(-1)
        try:
            return function(*args)
        except self._error as error:
            raise NvmlFailure(int(getattr(error, "value", 999))) from None
        except (AttributeError, TypeError, ValueError):  # a binding that does not fit, or a name that is not UTF-8
            raise NvmlFailure(-1) from None

    def get(self, name: str, *args: Any) -> Any:
        """Like `call`; None when it fails."""
        try:
            return self.call(name, *args)
        except NvmlFailure:
            return None

    def system(self) -> dict[str, str]:
        """Versions of driver, CUDA driver and NVML, as far as known."""
        cuda = self.get("nvmlSystemGetCudaDriverVersion_v2")
        found = {
            "driver": text(self.get("nvmlSystemGetDriverVersion")),
            "cuda_driver": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            "nvml": text(self.get("nvmlSystemGetNVMLVersion")),
        }
        return {name: value for name, value in found.items() if value is not None}


def load(host: Host, wake: bool) -> Library:
    """Load and initialise NVML. May block for seconds. Without `wake`, GPUs that sleep are left asleep.

    It is never shut down: each thread's initialisation only adds to the driver's count of users, and a shutdown while
    another call hangs would block too. Raises Unavailable.
    """
    if not wake and host.gpus_asleep():
        raise Unavailable(
            f"{NO_READINGS}: the GPU is asleep (runtime power management) and reading would wake it; "
            "--gpu nvml:0 reads it anyway"
        )
    try:
        import pynvml
    except ImportError:
        raise Unavailable(f"{NO_READINGS}: the package nvidia-ml-py is not installed") from None
    if host.is_wsl():
        _try_in_another_process()
    library = Library(pynvml)
    try:
        library.call("nvmlInit")
    except NvmlFailure as failure:
        raise Unavailable(f"{NO_READINGS}: {_why_not(failure.code, host)}") from None
    return library


def _why_not(code: int, host: Host) -> str:
    if code == 18:
        versions = host.driver_versions()
        both = f" {versions[0]} and library {versions[1]}" if versions else " and library"
        return f"kernel module{both} do not match (driver upgraded?): reboot, or reload the nvidia modules"
    jetson = "; on a Jetson use tegrastats" if host.is_jetson() else ""
    return _INIT.get(code, f"NVML does not start: {reason(code)}") + jetson


def _try_in_another_process() -> None:
    """NVML is known to crash under WSL; then only a child dies."""
    code = "import pynvml; pynvml.nvmlInit(); pynvml.nvmlDeviceGetCount()"
    try:
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        raise Unavailable(f"{NO_READINGS}: NVML does not answer under WSL; update the Windows driver") from None
    if ended.returncode < 0:
        raise Unavailable(f"{NO_READINGS}: NVML crashes under WSL; update the Windows driver")


def moving_throttle_fields(driver: str | None) -> dict[str, int]:
    """Field ids of the thermal and brake counters for a driver version; {} where they are not known for certain.

    575 up to 580.65 have 251-253, 580.82 and later 269-271; in other drivers the same numbers are other quantities
    (nvidia-ml-py wheels 12.570.86 ... 13.615.71 compared).
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", driver or "")[:2])
    if (575,) <= numbers <= (580, 65):
        return dict(zip(MOVING_FIELDS, (251, 252, 253), strict=True))
    if numbers >= (580, 82):
        return dict(zip(MOVING_FIELDS, (269, 270, 271), strict=True))
    return {}


_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal")


def field_value(value: Any) -> Any:
    """The union's member that `valueType` names; None for a type this version does not know."""
    kind = value.valueType
    return getattr(value.value, _MEMBERS[kind], None) if 0 <= kind < len(_MEMBERS) else None


def watts(milliwatts: Any) -> float | None:
    """mW as W (and mJ as J)."""
    return None if milliwatts is None else round(float(milliwatts) / 1000, 3)


def text(value: Any) -> str | None:
    """A string of NVML: old wheels give bytes."""
    if value is None:
        return None
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def handle_address(handle: Any) -> int | None:
    """The address behind a handle, by which an event names its GPU."""
    import ctypes

    return ctypes.cast(handle, ctypes.c_void_p).value
