"""The thread that samples GPUs: one initialisation, deadline pacing, and what happens when a driver call hangs.

Knows no asyncio. The owner calls `watch` now and then; nothing ever waits for the thread.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from lpxtop.clock import Clock
from lpxtop.probes import nvml, xid
from lpxtop.probes.device import Device, MigInstance, Row, mig_instances
from lpxtop.probes.host import Host
from lpxtop.probes.nvml import Unavailable
from lpxtop.probes.readings import Lost
from lpxtop.probes.selection import Selection

HANG_S = 3.0
"""A GPU whose call takes this long is left alone; the others go on."""
INIT_HANG_S = 5.0
SLOW_S = 5.0
"""How often processes, PCIe link and error counts are read."""
REOPEN_S = 30.0
COST_SHARE = 0.1
MAX_PERIOD_S = 10.0

AnyDevice = Device | MigInstance
News = tuple[str, Any]
"""What the thread tells: ("inventory", dict), ("sample", (monotonic ns, columns)), ("failed" | "back" | "unavailable",
text), ("xid", (monotonic ns, text, level)), ("end", None)."""


class Sampler:
    """Samples until `stop`. `tell` is called from its threads."""

    def __init__(
        self, tell: Callable[[News], None], clock: Clock, host: Host, selection: Selection, period_s: float
    ) -> None:
        self._tell, self._clock, self._host, self._selection = tell, clock, host, selection
        self._wanted_period_s = self._period_s = period_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._devices: list[AnyDevice] = []
        self._turn = 0
        self._busy: tuple[int, AnyDevice | None] | None = None
        self._hung: dict[int, int] = {}
        self._told_start = False
        self._told: set[str] = set()
        self._lost_at: dict[int, int] = {}
        self._slow_due = 0
        self._all_unknown = False

    def start(self) -> None:
        self._busy = (self._clock.monotonic_ns(), None)
        self._spawn(self._first, "nvml")

    def stop(self) -> None:
        """The threads are told and not waited for: a call may hang for a minute."""
        self._stop.set()

    def watch(self) -> None:
        """Look whether a call hangs: its GPU is stale from now on, and another thread takes the others."""
        with self._lock:
            if self._busy is None:
                return
            since, device = self._busy
            waited_s = (self._clock.monotonic_ns() - since) / 1e9
            if device is None:
                self._tell_of_slow_start(waited_s)
                return
            if waited_s <= HANG_S:
                return
            self._hung[self._devices.index(device)] = since
            self._turn += 1
            self._busy = None
        self._tell(("failed", f"GPU {device.index}: the driver does not answer; its figures are stale"))
        self._spawn(self._loop, "nvml")

    def _tell_of_slow_start(self, waited_s: float) -> None:
        if waited_s <= INIT_HANG_S or self._told_start:
            return
        self._told_start = True
        self._tell(("failed", f"NVML has not started after {waited_s:.0f} s: the driver hangs, or persistence mode is "
                              "off and the GPUs wake slowly"))  # fmt: skip

    @staticmethod
    def _spawn(run: Callable[[], None], name: str) -> None:
        threading.Thread(target=run, name=name, daemon=True).start()

    # --- starting ----------------------------------------------------------------------------------------------

    def _first(self) -> None:
        try:
            self._open()
        except Unavailable as error:
            self._tell(("unavailable", str(error)))
        except Exception as error:  # whatever a driver does, the run goes on without its readings
            self._tell(("unavailable", f"{nvml.NO_READINGS}: {type(error).__name__}: {error}"))
        else:
            self._busy = None
            self._loop()
            return
        self._busy = None
        self._tell(("end", None))

    def _open(self) -> None:
        library = nvml.load(self._host, self._selection.explicit)
        system = library.system()
        count = int(library.call("nvmlDeviceGetCount"))
        wanted = (
            range(count) if self._selection.indices is None else sorted(self._selection.indices & set(range(count)))
        )
        devices = [Device(library, index, self._host, system.get("driver")) for index in wanted]
        parts: list[AnyDevice] = []
        for device in devices:
            parts += [device, *mig_instances(library, device)]
        self._devices = self._selection.choose(parts)
        if all(device.handle is None for device in self._devices):
            raise Unavailable(f"{nvml.NO_READINGS}: {_none_opens(self._devices, self._selection, count)}")
        watching = xid.register(library, [device for device in self._devices if isinstance(device, Device)])
        fields = nvml.moving_throttle_fields(system.get("driver"))
        self._tell(("inventory", {
            "gpus": [device.inventory for device in self._devices], **system, "throttle_fields": fields,
            "xid": watching.problem or "watched",
        }))  # fmt: skip
        if watching.problem is None:
            self._spawn(lambda: xid.listen(library, watching, self._told_xid, self._stop), "nvml-xid")

    def _told_xid(self, text: str, level: str) -> None:
        self._tell(("xid", (self._clock.monotonic_ns(), text, level)))

    # --- sampling ----------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        turn, due = self._turn, self._clock.monotonic_ns()
        while not self._stop.is_set() and turn == self._turn:
            begin = self._clock.monotonic_ns()
            slow = begin >= self._slow_due
            if slow:
                self._slow_due = begin + round(SLOW_S * 1e9)
            rows = [self._row(place, device, slow, turn) for place, device in enumerate(self._devices)]
            if turn != self._turn:
                return
            now = self._clock.monotonic_ns()
            self._tell(("sample", (begin, self._columns(rows, now, now - begin))))
            due = self._next(due, now)
            self._stop.wait(max(0.0, (due - now) / 1e9))

    def _next(self, due: int, now: int) -> int:
        """The next deadline on the grid; missed ones are not made up for."""
        due += round(self._period_s * 1e9)
        return due if due > now else now + round(self._period_s * 1e9)

    def _row(self, place: int, device: AnyDevice, slow: bool, turn: int) -> Row:
        """One GPU's readings; {} when it is gone, hangs, or another thread has taken over."""
        begin = self._clock.monotonic_ns()
        with self._lock:
            if place in self._hung or turn != self._turn:
                return {}
            self._busy = (begin, device)
        row: Row = {}
        try:
            if device.lost is None or self._is_back(place, device, begin):
                row = device.read(slow)
        except Lost as lost:
            device.lost = str(lost)
            self._lost_at[place] = begin
            self._tell(("failed", f"GPU {device.index} is lost: {lost}; dmesg names the XID"))
        except Exception as error:  # a driver's answer nobody foresaw costs that reading, not the thread
            self._tell_once(f"GPU {device.index} cannot be read: {type(error).__name__}: {error}")
        with self._lock:
            if turn == self._turn:
                self._busy = None
            else:  # it hung, and another thread samples now; this GPU may be read again
                self._hung.pop(place, None)
        return row

    def _is_back(self, place: int, device: AnyDevice, now: int) -> bool:
        """A lost GPU is looked for again now and then, by its UUID."""
        if now - self._lost_at.setdefault(place, now) < REOPEN_S * 1e9:
            return False
        self._lost_at[place] = now
        device.open()
        if device.lost is None:
            self._tell(("back", f"GPU {device.index} is back"))
        return device.lost is None

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(("failed", text))

    # --- columns -----------------------------------------------------------------------------------------------

    def _columns(self, rows: list[Row], now: int, cost_ns: int) -> Row:
        names = {name for row in rows for name in row if name != "throttle_ns"}
        columns: Row = {name: [row.get(name) for row in rows] for name in sorted(names)}
        empty: tuple[tuple[str, Any], ...] = (("processes", []), ("health", {}))
        for name, nothing in empty:
            if name in columns:
                columns[name] = [nothing if cell is None else cell for cell in columns[name]]
        reasons = {reason for row in rows for reason in row.get("throttle_ns", {})}
        columns["throttle_ns"] = {
            reason: [row.get("throttle_ns", {}).get(reason) for row in rows] for reason in sorted(reasons)
        }
        columns["status"] = [self._status(place, device) for place, device in enumerate(self._devices)]
        columns["cost_us"] = cost_ns // 1000
        columns["notes"] = self._notes(now) | self._paced(cost_ns)
        self._tell_of_unknown(columns["status"])
        return columns

    def _status(self, place: int, device: AnyDevice) -> str:
        if place in self._hung:
            return "stale"
        if device.lost is not None:
            return "lost"
        return "error" if device.handle is None or device.readings.silent else "ok"

    def _notes(self, now: int) -> dict[str, str]:
        """Why a column is missing; the GPUs are named where it is missing for some only."""
        found: dict[str, dict[str, list[int]]] = {}
        for place, device in enumerate(self._devices):
            why = (
                {"status": self._trouble(place, device, now)}
                if self._trouble(place, device, now)
                else device.readings.why
            )
            for column, text in why.items():
                found.setdefault(column, {}).setdefault(str(text), []).append(device.index)
        return {column: self._named(reasons) for column, reasons in found.items()}

    def _named(self, reasons: dict[str, list[int]]) -> str:
        if len(reasons) == 1 and len(next(iter(reasons.values()))) == len(self._devices):
            return next(iter(reasons))
        return "; ".join(f"GPU {', '.join(map(str, sorted(set(gpus))))}: {why}" for why, gpus in reasons.items())

    def _trouble(self, place: int, device: AnyDevice, now: int) -> str | None:
        since = self._hung.get(place)
        if since is not None:
            return f"the driver has not answered for {(now - since) / 1e9:.0f} s"
        return device.lost or device.inventory.get("error")

    def _paced(self, cost_ns: int) -> dict[str, str]:
        """Sample less often when sampling itself costs the GPUs more than a tenth of the time."""
        needed_s = min(cost_ns / 1e9 / COST_SHARE, MAX_PERIOD_S)
        self._period_s = max(self._wanted_period_s, 0.5 * self._period_s + 0.5 * needed_s)
        if self._period_s <= 1.05 * self._wanted_period_s:
            return {}
        return {"period": f"a sample takes {cost_ns / 1e6:.0f} ms: one every {self._period_s:.1f} s"}

    def _tell_of_unknown(self, status: list[str]) -> None:
        """All GPUs silent with 'unknown error' at once is what a container sees after a daemon-reload on its host."""
        codes = {code for device in self._devices for code in device.readings.failures}
        silent = all(word == "error" for word in status)
        if silent and not self._all_unknown and 999 in codes:
            self._all_unknown = True
            self._tell(("failed", f"every GPU answers 'unknown error'; {nvml.UNKNOWN_ADVICE}"))
        elif self._all_unknown and "ok" in status:
            self._all_unknown = False
            self._tell(("back", "the GPUs answer again"))


def _none_opens(devices: Sequence[AnyDevice], selection: Selection, count: int) -> str:
    if not count:
        return "NVML works but shows no GPU (a container started without --gpus?)"
    if not devices:
        return f"{selection} names none of the {count} GPUs of this host (0-{count - 1})"
    errors = sorted({str(device.inventory.get("error", device.lost)) for device in devices})
    return f"none of {len(devices)} GPUs can be opened: {', '.join(errors)}"
