"""GPUs of another host, read from its dcgm-exporter: the same events as NVML gives here. Must not run anything there.

The exporter refreshes its values at an interval of its own (30 s by default): between refreshes nothing changes, and
the note on `period` says how long that is.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from lpxtop.clock import Clock, SystemClock, session_us
from lpxtop.events.records import AnyEvent, Gpu, Mark, Source
from lpxtop.probes import scrape
from lpxtop.probes.exposition import Parser, Series, finite
from lpxtop.probes.scrape import NoMetrics
from lpxtop.probes.server import Scraper
from lpxtop.probes.xid import describe

PREFIX = "DCGM_FI_"
RETRY_S = 5.0
SLOW_REFRESH_S = 2.0
_MIB = 1 << 20
_BLANK = (2147483632.0, 140737488355328.0)
_BLANK_64 = 9.2e18
"""DCGM's "no value" numbers; those of 64 bits are the largest of all."""

COLUMNS: dict[str, tuple[tuple[str, float], ...]] = {
    "utilization_percent": (("DEV_GPU_UTIL", 1), ("PROF_GR_ENGINE_ACTIVE", 100)),
    "memory_utilization_percent": (("DEV_MEM_COPY_UTIL", 1),),
    "memory_used_bytes": (("DEV_FB_USED", _MIB),),
    "memory_reserved_bytes": (("DEV_FB_RESERVED", _MIB),),
    "memory_total_bytes": (("DEV_FB_TOTAL", _MIB),),
    "power_watts": (("DEV_POWER_USAGE_INSTANT", 1), ("DEV_POWER_USAGE", 1)),
    "power_limit_watts": (("DEV_ENFORCED_POWER_LIMIT", 1), ("DEV_POWER_MGMT_LIMIT", 1)),
    "energy_j": (("DEV_TOTAL_ENERGY_CONSUMPTION", 0.001),),
    "sm_clock_mhz": (("DEV_SM_CLOCK", 1),),
    "memory_clock_mhz": (("DEV_MEM_CLOCK", 1),),
    "pstate": (("DEV_PSTATE", 1),),
    "temperature_c": (("DEV_GPU_TEMP", 1),),
    "memory_temperature_c": (("DEV_MEMORY_TEMP", 1),),
    "throttle_bits": (("DEV_CLOCKS_EVENT_REASONS", 1), ("DEV_CLOCK_THROTTLE_REASONS", 1)),
    "pcie_generation": (("DEV_PCIE_LINK_GEN", 1),),
    "pcie_width": (("DEV_PCIE_LINK_WIDTH", 1),),
}
"""Fields for each column, best first, with the factor to our unit."""
_FLOATS = {"utilization_percent", "memory_utilization_percent", "power_watts", "power_limit_watts", "energy_j",
           "temperature_c", "memory_temperature_c"}  # fmt: skip
THROTTLE = {
    "power_cap": ("DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP_NS", "DEV_POWER_VIOLATION"),
    "sync_boost": ("DEV_CLOCKS_EVENT_REASON_SYNC_BOOST_NS", "DEV_SYNC_BOOST_VIOLATION"),
    "thermal": ("DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS",),
    "hw_thermal": ("DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS",),
    "power_brake": ("DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS",),
    "thermal_violation": ("DEV_THERMAL_VIOLATION",),
    "board_limit": ("DEV_BOARD_LIMIT_VIOLATION",),
    "reliability": ("DEV_RELIABILITY_VIOLATION",),
}
"""Nanoseconds; the exporter's older comments say µs, and were wrong (NVIDIA/dcgm-exporter#589)."""
HEALTH = {
    "ecc_corrected": "DEV_ECC_SBE_VOL_TOTAL", "ecc_uncorrected": "DEV_ECC_DBE_VOL_TOTAL",
    "rows_remapped_corrected": "DEV_CORRECTABLE_REMAPPED_ROWS",
    "rows_remapped_uncorrected": "DEV_UNCORRECTABLE_REMAPPED_ROWS",
    "remap_pending": "DEV_ROW_REMAP_PENDING", "remap_failure": "DEV_ROW_REMAP_FAILURE",
    "pcie_replays": "DEV_PCIE_REPLAY_COUNTER",
}  # fmt: skip
_XID = "DEV_XID_ERRORS"

Key = tuple[str, int, str]
"""Host, GPU and MIG instance ("" for the whole GPU)."""
Fields = dict[str, float]
"""Values by field, without the prefix."""
Gpus = dict[Key, tuple[Series | None, Fields]]
"""With a series that carries the GPU's labels."""


class DcgmSource:
    """`http://node:9400/metrics` as GPU events: `source` joined with the inventory, then a `gpu` event per scrape; or
    `source` unavailable and the end. An exporter that does not answer is asked again until it does."""

    def __init__(
        self, url: str, origin_ns: int, *, name: str = "gpu0", hz: float = 1.0, clock: Clock | None = None
    ) -> None:
        self.name = name
        self._url = url if scrape.origin(url)[0] in ("http", "https") else f"http://{url}"
        self._period_ns = round(1e9 / hz)
        self._origin_ns = origin_ns
        self._clock: Clock = clock or SystemClock()
        self._parser = Parser(lambda name: name.startswith(PREFIX))
        self._keys: list[Key] = []
        self._xids: dict[Key, float] = {}
        self._refresh = Refresh()
        self._failing = False
        self._closed = asyncio.Event()
        self._seq = 0

    async def close(self) -> None:
        self._closed.set()

    async def __aiter__(self) -> AsyncIterator[AnyEvent]:
        scraper = Scraper()
        try:
            due = self._clock.monotonic_ns()
            while not self._closed.is_set():
                events, go_on = await self._scrape(scraper)
                for event in events:
                    yield event
                if not go_on:
                    return
                now = self._clock.monotonic_ns()
                due = max(due + self._period_ns, now) if not self._failing else now + round(RETRY_S * 1e9)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), max(0.0, (due - now) / 1e9))
        finally:
            await scraper.close()

    async def _scrape(self, scraper: Scraper) -> tuple[list[AnyEvent], bool]:
        begin = self._clock.monotonic_ns()
        where = scrape.shown(self._url)
        try:
            text = await scraper.get(self._url)
        except NoMetrics as problem:
            if problem.there and not self._keys:
                return [self._source("unavailable", f"no GPU readings from {where}: {problem}")], False
            return self._failed(f"no GPU readings from {where}: {problem}", begin), True
        gpus = by_gpu(self._parser.parse(text))
        if not gpus and not self._keys:
            why = "no DCGM metrics there; dcgm-exporter's are at http://NODE:9400/metrics"
            return [self._source("unavailable", f"no GPU readings from {where}: {why}")], False
        events: list[AnyEvent] = []
        if self._failing or not self._keys or not gpus.keys() <= set(self._keys):
            self._keys = sorted({*self._keys, *gpus})
            events.append(self._joined(gpus))
        self._failing = False
        cost_us = (self._clock.monotonic_ns() - begin) // 1000
        events += self._new_xids(gpus)
        notes = self._refresh.notes(gpus, begin)
        rows = [fields for key in self._keys for fields in [gpus.get(key, (None, {}))[1]]]
        status = ["ok" if key in gpus else "stale" for key in self._keys]
        return [*events, Gpu(**self._stamp(begin), status=status, notes=notes, cost_us=cost_us, **columns(rows))], True

    def _failed(self, text: str, at_ns: int) -> list[AnyEvent]:
        events: list[AnyEvent] = [] if self._failing else [self._source("failed", text)]
        self._failing = True
        if self._keys:
            events.append(Gpu(**self._stamp(at_ns), status=["stale"] * len(self._keys), notes={"status": text}))
        return events

    def _joined(self, gpus: Gpus) -> Source:
        hosts = sorted({key[0] for key in self._keys})
        rows = [inventory(key, *gpus.get(key, (None, {}))) for key in self._keys]
        drivers = {row.pop("driver") for row in rows if "driver" in row}
        descriptor: dict[str, Any] = {"gpus": rows, "url": scrape.shown(self._url), "via": "dcgm-exporter"}
        if len(drivers) == 1:
            descriptor["driver"] = drivers.pop()
        return self._source("joined", None, hosts[0] if len(hosts) == 1 and hosts[0] else None, descriptor)

    def _new_xids(self, gpus: Gpus) -> list[AnyEvent]:
        """The exporter keeps the last XID: it is news when it changes, and what stood there at the start is not."""
        events: list[AnyEvent] = []
        for key, (_, fields) in gpus.items():
            number = fields.get(_XID)
            before = self._xids.get(key, number)
            if number is None:
                continue
            self._xids[key] = number
            if number and number != before:
                text, level = describe(f"GPU {key[1]}", int(number))
                events.append(Mark(**self._stamp(), text=text, level=level, code="xid"))
        return events

    def _source(
        self, state: str, text: str | None, host: str | None = None, descriptor: dict[str, Any] | None = None
    ) -> Source:
        return Source(**self._stamp(), kind="gpu", state=state, text=text, host=host, descriptor=descriptor or {})

    def _stamp(self, at_ns: int | None = None) -> dict[str, Any]:
        self._seq += 1
        at_ns = self._clock.monotonic_ns() if at_ns is None else at_ns
        return {"t": session_us(at_ns, self._origin_ns), "src": self.name, "seq": self._seq - 1}


class Refresh:
    """How often the exporter really has new values: the longest time between two changes."""

    def __init__(self) -> None:
        self._last: dict[Key, Fields] = {}
        self._changed_ns: int | None = None
        self._longest_s = 0.0

    def notes(self, gpus: Gpus, at_ns: int) -> dict[str, str]:
        now = {key: fields for key, (_, fields) in gpus.items()}
        if now != self._last:
            if self._changed_ns is not None:
                self._longest_s = max(self._longest_s, (at_ns - self._changed_ns) / 1e9)
            self._last, self._changed_ns = now, at_ns
        if self._longest_s < SLOW_REFRESH_S:
            return {}
        return {"period": f"the exporter has new values only every {self._longest_s:.0f} s (DCGM_EXPORTER_INTERVAL)"}


def by_gpu(values: dict[Series, float]) -> Gpus:
    """The exposition by GPU. Blank values are left out; what is there once per pod has the GPU's value each time."""
    found: Gpus = {}
    for series, raw in values.items():
        labels = series.labels
        if not labels.get("gpu", "").isdecimal():
            continue
        key = (labels.get("Hostname", ""), int(labels["gpu"]), labels.get("GPU_I_ID", ""))
        _, fields = found.setdefault(key, (series, {}))
        value = finite(raw)
        if value is not None and value not in _BLANK and abs(value) < _BLANK_64:
            fields[series.name.removeprefix(PREFIX)] = value
    return found


def columns(rows: list[Fields]) -> dict[str, Any]:
    """The columns of a `gpu` event."""
    found: dict[str, Any] = {}
    for column, sources in COLUMNS.items():
        cells = [_cell(row, sources, column in _FLOATS) for row in rows]
        if any(cell is not None for cell in cells):
            found[column] = cells
    if "memory_total_bytes" not in found and "memory_used_bytes" in found:
        found["memory_total_bytes"] = [_total(row) for row in rows]
    throttle = {reason: [_cell(row, tuple((name, 1) for name in names), False) for row in rows]
                for reason, names in THROTTLE.items()}  # fmt: skip
    found["throttle_ns"] = {r: cells for r, cells in throttle.items() if any(cell is not None for cell in cells)}
    health = [{name: int(row[field]) for name, field in HEALTH.items() if field in row} for row in rows]
    return found | ({"health": health} if any(health) else {})


def _cell(row: Fields, sources: tuple[tuple[str, float], ...], fraction: bool) -> float | int | None:
    for name, factor in sources:
        if name in row:
            value = row[name] * factor
            return round(value, 3) if fraction else int(value)
    return None


def _total(row: Fields) -> int | None:
    """Used, free and reserved are all there is."""
    if "DEV_FB_USED" not in row or "DEV_FB_FREE" not in row:
        return None
    return int((row["DEV_FB_USED"] + row["DEV_FB_FREE"] + row.get("DEV_FB_RESERVED", 0.0)) * _MIB)


def inventory(key: Key, series: Series | None, fields: Fields) -> dict[str, Any]:
    """A GPU's row of the inventory, from its labels."""
    labels = {} if series is None else series.labels
    limits = columns([fields])
    row: dict[str, Any] = {
        "index": key[1],
        "uuid": labels.get("UUID"),
        "name": labels.get("modelName"),
        "host": key[0] or None,
        "pci": labels.get("pci_bus_id", "").lower()[-12:] or None,
        "mig_instance": {"gpu_instance": key[2], "profile": labels.get("GPU_I_PROFILE", "")} if key[2] else None,
        "memory_total_bytes": limits.get("memory_total_bytes", [None])[0],
        "power_limit_watts": limits.get("power_limit_watts", [None])[0],
        "sm_clock_max_mhz": _cell(fields, (("DEV_MAX_SM_CLOCK", 1),), False),
        "memory_clock_max_mhz": _cell(fields, (("DEV_MAX_MEM_CLOCK", 1),), False),
        "driver": labels.get("DCGM_FI_DRIVER_VERSION"),
    }
    return {name: value for name, value in row.items() if value is not None}
