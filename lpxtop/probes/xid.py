"""XIDs, the driver's error numbers of a GPU, as they happen. Events from before the registration are not seen.

A thread of its own waits for them. Must not judge beyond the table of what NVIDIA's catalogue says about a number.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from lpxtop.probes import nvml
from lpxtop.probes.device import Device
from lpxtop.probes.nvml import Library, NvmlFailure

WAIT_MS = 1000
BACKOFF_S = (1.0, 2.0, 5.0, 15.0, 60.0)
"""After a GPU fell off the bus the wait returns an error at once, for ever."""
REPEAT_S = 10.0
APPLICATION = {13, 31, 43, 45, 68, 109}
"""Caused by a program, mostly; not a sign of a broken GPU."""
MEANING = {
    13: "graphics engine exception, mostly the application", 31: "memory page fault, mostly the application",
    43: "channel stopped, the application's fault", 45: "clean-up after an application ended",
    48: "double-bit ECC error: reset the GPU", 61: "microcontroller halt: reset the GPU",
    62: "microcontroller halt: reset the GPU", 63: "memory row remapped", 64: "row remapping failed: reset the GPU",
    68: "video processor exception", 74: "NVLink error", 79: "fell off the bus: reboot",
    92: "many single-bit ECC errors", 94: "contained ECC error: restart the application",
    95: "uncontained ECC error: reset the GPU", 109: "context switch timed out, mostly the application",
    119: "GSP does not answer: reset the GPU", 120: "GSP error: reset the GPU", 121: "chip-to-chip link error",
    136: "link training failed", 140: "ECC error not recovered", 143: "initialisation error",
    154: "the recovery action changed",
}  # fmt: skip


class Watch:
    """GPUs registered for XIDs. `problem` says why there is nothing to wait for."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = list(devices)
        self.problem: str | None = None
        self.event_set: Any = None
        self.by_address: dict[int | None, Device] = {}

    def alive(self) -> dict[int | None, Device]:
        return {nvml.handle_address(d.handle): d for d in self.devices if d.handle is not None and d.lost is None}


def register(library: Library, devices: Sequence[Device]) -> Watch:
    """Ask for the XIDs of the GPUs that are there now; platforms without events say so in `problem`."""
    watch = Watch(devices)
    _renew(library, watch)
    return watch


def _renew(library: Library, watch: Watch) -> None:
    if watch.event_set is not None:
        library.get("nvmlEventSetFree", watch.event_set)
        watch.event_set = None
    watch.by_address = {}
    alive = watch.alive()
    try:
        watch.event_set = library.call("nvmlEventSetCreate")
    except NvmlFailure as failure:
        watch.problem = f"not observed: {failure}"
        return
    why = "no GPU"
    for address, device in alive.items():
        try:
            library.call("nvmlDeviceRegisterEvents", device.handle, nvml.XID_EVENT, watch.event_set)
        except NvmlFailure as failure:
            why = str(failure)
            continue
        watch.by_address[address] = device
    watch.problem = None if watch.by_address else f"not observed: {why}"


def listen(library: Library, watch: Watch, tell: Callable[[str, str], None], stop: threading.Event) -> None:
    """Wait for XIDs until `stop`; `tell(text, level)`. Backs off from errors and leaves lost GPUs out."""
    errors = 0
    told: dict[tuple[int, int], int] = {}
    while not stop.is_set():
        try:
            data = library.call("nvmlEventSetWait_v2", watch.event_set, WAIT_MS)
        except NvmlFailure as failure:
            errors = 0 if failure.code == nvml.TIMED_OUT else errors + 1
        else:
            errors = 0
            _tell_once(watch.by_address.get(nvml.handle_address(data.device)), int(data.eventData), told, tell)
        if errors:
            stop.wait(BACKOFF_S[min(errors, len(BACKOFF_S)) - 1])
        if errors or watch.alive().keys() != watch.by_address.keys():
            _renew(library, watch)
            if watch.problem is not None:
                return


def _tell_once(
    device: Device | None, number: int, told: dict[tuple[int, int], int], tell: Callable[[str, str], None]
) -> None:
    """The first of a kind at once, then powers of ten: a broken GPU repeats itself thousands of times."""
    index = -1 if device is None else device.index
    count = told[index, number] = told.get((index, number), 0) + 1
    if count not in (1, 10, 100, 1000, 10_000, 100_000):
        return
    text, level = describe("a GPU" if device is None else f"GPU {device.index}", number)
    tell(text if count == 1 else f"{text}, {count} times", level)


def describe(where: str, number: int) -> tuple[str, str]:
    """The sentence of an XID, and its level: what an application causes is a warning."""
    meaning = f" ({MEANING[number]})" if number in MEANING else ""
    return f"{where}: XID {number}{meaning}", "warn" if number in APPLICATION else "error"
