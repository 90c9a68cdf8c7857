"""GPU samples: what each GPU shows now, when throttling began and ended, and the totals of the measured time.

Must not read a driver or a clock. A column nobody could read, or a missing cell, stays None.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from lpxtop.events.records import Gpu, Source
from lpxtop.metrics.holding import Holding
from lpxtop.metrics.slots import Slot
from lpxtop.metrics.sums import BUSY_PERCENT, THROTTLE_WORDS, Sums
from lpxtop.metrics.view import GpuView

_SHOWN = (
    "status", "utilization_percent", "memory_used_bytes", "memory_total_bytes", "power_watts", "power_limit_watts",
    "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "thermal_margin_c", "pstate", "throttle_bits", "throttle_ns",
)  # fmt: skip
_MEANS = ("utilization_percent", "memory_used_bytes", "power_watts", "sm_clock_mhz", "temperature_c")
_GAP_US = 5_000_000
"""Samples further apart than this do not join to an interval."""

T = TypeVar("T")

Alert = tuple[int, str, str]
"""t, level, text of something that began or ended."""


class Totals:
    """One GPU over the measured time, for the summary."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.highest: dict[str, float] = {}
        self.energy_counter_j = 0.0
        self.energy_integrated_j = 0.0
        self.counted_us = self.integrated_us = 0
        self.throttled_s: dict[str, float] = {}

    def sample(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value
        self.counts[name] = self.counts.get(name, 0) + 1
        self.highest[name] = max(self.highest.get(name, value), value)

    def mean_max(self, name: str) -> dict[str, float] | None:
        n = self.counts.get(name, 0)
        return {"mean": self.sums[name] / n, "max": self.highest[name]} if n else None


class GpuSource:
    """The GPUs of one source."""

    def __init__(self, src: str) -> None:
        self.src = src
        self.host: str | None = None
        self.inventory: list[dict[str, Any]] = []
        self.last: Gpu | None = None
        self.simulated = False
        self.gone = False
        self.serves_target = False
        self.totals: list[Totals] = []
        self._measured = False
        self._throttle: dict[tuple[int, int], Holding] = {}
        self._held_before: deque[tuple[int, str, int, int]] = deque(maxlen=1000)

    def source(self, event: Source) -> None:
        """It joined, with its inventory, or left."""
        self.host = event.host if event.host is not None else self.host
        self.gone = event.state in ("left", "unavailable")
        self.serves_target = bool(event.descriptor.get("serves_target", self.serves_target))
        given = event.descriptor.get("gpus", self.inventory)
        if isinstance(given, list):
            self.inventory = [gpu if isinstance(gpu, dict) else {} for gpu in given]
        self.simulated = bool(event.descriptor.get("simulated", self.simulated))

    def sample(self, event: Gpu, slot: Slot | None, measured: bool, sums: Sequence[Sums] = ()) -> list[Alert]:
        """Fold one sample; the throttling that began or ended with it. `sums` are those of measured time it is in."""
        count = _size(event)
        if slot is not None:
            _to_slot(slot, event, count)
        for place in sums:
            self._to_sums(place, event, count)
        if measured and self._measured and self.last is not None and 0 < event.t - self.last.t <= _GAP_US:
            self._interval(self.last, event, count)
        if measured:
            self._means(event, count)
        if self.last is None or event.t >= self.last.t:
            self.last = msgspec.structs.replace(event, processes=[], notes={})
            self._measured = measured
        return [alert for gpu in range(count) for alert in self._alerts(event, gpu)]

    # --- throttling -----------------------------------------------------------------------------------------------

    def _alerts(self, event: Gpu, gpu: int) -> list[Alert]:
        bits = cell(event.throttle_bits, gpu)
        found: list[Alert] = []
        for bit, word in THROTTLE_WORDS.items():
            held = bits is not None and bool(bits & bit)
            state = self._throttle.get((gpu, bit))
            if state is None:
                if not held:
                    continue
                state = self._throttle[gpu, bit] = Holding()
            change = state.look(held, event.t)
            if change is None:
                continue
            what, began, last = change
            if what == "began":
                found.append((began, "warn", f"{self.label(gpu)}: {word} began"))
            else:
                seconds = (last - began) / 1e6
                found.append((last, "info", f"{self.label(gpu)}: {word} ended after {seconds:.0f} s"))
                self._held_before.append((gpu, word, began, last))
        return found

    def held(self) -> list[tuple[int, str, int, int | None]]:
        """GPU's place, reason, begin and end (None: still) of each stretch of throttling, in order of begin."""
        now = [
            (gpu, THROTTLE_WORDS[bit], state.since, None)
            for (gpu, bit), state in self._throttle.items()
            if state.since is not None
        ]
        return sorted([*self._held_before, *now], key=lambda stretch: stretch[2])

    def label(self, gpu: int) -> str:
        """GPU 3, with its host where the source names one."""
        index = self.inventory[gpu].get("index", gpu) if gpu < len(self.inventory) else gpu
        return f"GPU {index}" + (f" on {self.host}" if self.host else "")

    # --- totals of the measured time ------------------------------------------------------------------------------

    def _means(self, event: Gpu, count: int) -> None:
        while len(self.totals) < count:
            self.totals.append(Totals())
        for name in _MEANS:
            for totals, value in zip(self.totals, getattr(event, name), strict=False):
                if value is not None:
                    totals.sample(name, value)

    def _interval(self, before: Gpu, event: Gpu, count: int) -> None:
        while len(self.totals) < count:
            self.totals.append(Totals())
        took_us = event.t - before.t
        for gpu in range(count):
            totals = self.totals[gpu]
            _add_energy(totals, before, event, gpu, took_us)
            for reason, seconds in _throttled(before, event, gpu, took_us / 1e6):
                totals.throttled_s[reason] = totals.throttled_s.get(reason, 0.0) + seconds

    def _to_sums(self, sums: Sums, event: Gpu, count: int) -> None:
        before = self.last
        took_us = 0 if before is None else event.t - before.t
        for gpu in range(count):
            row = sums.of_gpu(self.src, gpu)
            row.sample(event, gpu, self.inventory[gpu].get("power_limit_watts") if gpu < len(self.inventory) else None)
            if before is None or not 0 < took_us <= _GAP_US:
                continue
            busy = [(cell(sample.utilization_percent, gpu) or 0.0) >= BUSY_PERCENT for sample in (before, event)]
            counted = before.throttle_ns and event.throttle_ns
            held = _throttled(before, event, gpu, took_us / 1e6) if counted else None
            row.interval(took_us / 1e6, all(busy), held)

    # --- what is shown --------------------------------------------------------------------------------------------

    def views(self, now: int, slots: Sequence[Slot | None], simulated: bool) -> list[GpuView]:
        """Each GPU now; `slots` give its history, one per second."""
        event = self.last
        count = max(len(self.inventory), 0 if event is None else _size(event))
        return [self._view(gpu, now, slots, simulated) for gpu in range(count)]

    def _view(self, gpu: int, now: int, slots: Sequence[Slot | None], simulated: bool) -> GpuView:
        known = self.inventory[gpu] if gpu < len(self.inventory) else {}
        event = Gpu(t=now) if self.last is None else self.last
        bits = cell(event.throttle_bits, gpu)
        total = cell(event.memory_total_bytes, gpu)
        status = cell(event.status, gpu)
        return GpuView(
            source=self.src,
            index=known.get("index", gpu),
            name=str(known.get("name", "")),
            uuid=str(known.get("uuid", "")),
            host=self.host,
            simulated=simulated or self.simulated or bool(known.get("simulated", False)),
            status="stale" if self.gone or self.last is None else status if status is not None else "ok",
            age_s=(now - event.t) / 1e6,
            utilization_percent=cell(event.utilization_percent, gpu),
            memory_used_bytes=cell(event.memory_used_bytes, gpu),
            memory_total_bytes=known.get("memory_total_bytes") if total is None else total,
            power_watts=cell(event.power_watts, gpu),
            power_limit_watts=_first(cell(event.power_limit_watts, gpu), known.get("power_limit_watts")),
            sm_clock_mhz=cell(event.sm_clock_mhz, gpu),
            sm_clock_max_mhz=known.get("sm_clock_max_mhz"),
            memory_clock_mhz=cell(event.memory_clock_mhz, gpu),
            memory_clock_max_mhz=known.get("memory_clock_max_mhz"),
            temperature_c=cell(event.temperature_c, gpu),
            thermal_margin_c=cell(event.thermal_margin_c, gpu),
            pstate=cell(event.pstate, gpu),
            throttle=tuple(word for bit, word in THROTTLE_WORDS.items() if bits is not None and bits & bit),
            utilization_history=tuple(_history(slot, self.src, gpu) for slot in slots),
        )

    # --- keyframes ------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        last = None if self.last is None else {"t": self.last.t} | {name: getattr(self.last, name) for name in _SHOWN}
        return {
            "host": self.host,
            "inventory": self.inventory,
            "simulated": self.simulated,
            "serves_target": self.serves_target,
            "gone": self.gone,
            "last": last,
            "throttle": [[*key, *held.snapshot()] for key, held in self._throttle.items()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.host, self.inventory = state["host"], state["inventory"]
        self.simulated, self.gone = state["simulated"], state["gone"]
        self.serves_target = state.get("serves_target", False)
        self.last = None if state["last"] is None else msgspec.convert(state["last"], Gpu, strict=False)
        self._throttle = {(gpu, bit): Holding(*held) for gpu, bit, *held in state["throttle"]}


def cell(column: Sequence[T | None], gpu: int) -> T | None:
    """One GPU's value of a column that may be absent or short."""
    return column[gpu] if gpu < len(column) else None


def _first(*values: T | None) -> T | None:
    return next((value for value in values if value is not None), None)


def _size(event: Gpu) -> int:
    return max(len(event.status), *(len(getattr(event, name)) for name in _MEANS))


def _add_energy(totals: Totals, before: Gpu, event: Gpu, gpu: int, took_us: int) -> None:
    start, end = cell(before.energy_j, gpu), cell(event.energy_j, gpu)
    if start is not None and end is not None and end >= start:
        totals.energy_counter_j += end - start
        totals.counted_us += took_us
    first, second = cell(before.power_watts, gpu), cell(event.power_watts, gpu)
    if first is not None and second is not None:
        totals.energy_integrated_j += (first + second) / 2 * took_us / 1e6
        totals.integrated_us += took_us


def _throttled(before: Gpu, event: Gpu, gpu: int, took_s: float) -> list[tuple[str, float]]:
    """Seconds per reason in the interval: counter differences where there are counters, else the bits."""
    if event.throttle_ns:
        pairs = (
            (reason, cell(before.throttle_ns.get(reason, []), gpu), cell(column, gpu))
            for reason, column in event.throttle_ns.items()
        )
        return [
            (reason, (end - start) / 1e9)
            for reason, start, end in pairs
            if start is not None and end is not None and end > start
        ]
    bits = cell(event.throttle_bits, gpu)
    held = (word for bit, word in THROTTLE_WORDS.items() if bits is not None and bits & bit)
    return [(word.replace(" ", "_"), took_s) for word in held]


# Sums of one GPU in a slot: utilisation, its samples; memory used, total, samples; power, samples.
_ZERO = (0.0, 0, 0.0, 0.0, 0, 0.0, 0)


def _to_slot(slot: Slot, event: Gpu, count: int) -> None:
    rows = slot.gpus.setdefault(event.src, [])
    while len(rows) < count:
        rows.append(list(_ZERO))
    for gpu in range(count):
        row = rows[gpu]
        utilization, power = cell(event.utilization_percent, gpu), cell(event.power_watts, gpu)
        used, total = cell(event.memory_used_bytes, gpu), cell(event.memory_total_bytes, gpu)
        if utilization is not None:
            row[0] += utilization
            row[1] += 1
        if used is not None and total is not None:
            row[2] += used
            row[3] += total
            row[4] += 1
        if power is not None:
            row[5] += power
            row[6] += 1


def _history(slot: Slot | None, src: str, gpu: int) -> float | None:
    row = None if slot is None else cell(slot.gpus.get(src, []), gpu)
    return row[0] / row[1] if row is not None and row[1] else None


def slot_means(slot: Slot) -> tuple[float | None, float | None, float | None]:
    """Of all GPUs of all sources in a second: mean utilisation %, used ÷ total memory, summed power W."""
    rows = [row for source in slot.gpus.values() for row in source]
    busy = [row[0] / row[1] for row in rows if row[1]]
    total = sum(row[3] / row[4] for row in rows if row[4])
    powers = [row[5] / row[6] for row in rows if row[6]]
    return (
        sum(busy) / len(busy) if busy else None,
        sum(row[2] / row[4] for row in rows if row[4]) / total if total > 0 else None,
        sum(powers) if powers else None,
    )
