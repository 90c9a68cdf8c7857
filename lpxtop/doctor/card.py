"""What NVML says, asked once: the inventory and two samples a second apart, through the GPU probe. Must not judge.

The probe's threads are daemons: a driver that hangs costs the time limit and nothing else.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from lpxtop.events.records import AnyEvent, Gpu, Source
from lpxtop.probes.gpu import GpuSource

ASK_S = 8.0
"""More than a check's 3 s: without persistence mode a healthy GPU takes seconds to wake. Runs beside other checks."""
APART_S = 1.0


@dataclass
class Card:
    """One GPU. `row` is what does not change (probes/inventory.py), `before` and `now` two samples `seconds` apart."""

    row: dict[str, Any]
    before: dict[str, Any] = field(default_factory=dict)
    now: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None

    @property
    def label(self) -> str:
        return f"GPU {self.row.get('index', '?')}"

    @property
    def health(self) -> dict[str, Any]:
        """Error counts; {} when they are not known."""
        return self._latest("health") or {}

    @property
    def processes(self) -> list[dict[str, Any]] | None:
        """Who holds memory; None when the driver does not say."""
        found: list[dict[str, Any]] | None = self._latest("processes")
        return found

    def _latest(self, column: str) -> Any:
        """A column that only every few samples carry."""
        return self.now[column] if column in self.now else self.before.get(column)


@dataclass
class NvmlAnswer:
    """`state`: unasked, joined, unavailable (`text` says why) or silent: no answer in time."""

    state: str = "unasked"
    text: str = ""
    driver: str | None = None
    cuda_driver: str | None = None
    cards: list[Card] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


async def ask_nvml(root: Path = Path("/"), limit_s: float = ASK_S) -> NvmlAnswer:
    """NVML's answer within `limit_s`; never raises for a driver's fault, never wakes a GPU that sleeps."""
    source = GpuSource(time.monotonic_ns(), root=root, hz=2)
    answer = NvmlAnswer("silent", f"the driver did not answer within {limit_s:g} s")
    events = cast(AsyncGenerator[AnyEvent, None], source.__aiter__())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s), contextlib.aclosing(events):
            await _fold(events, answer)
    await source.close()
    return answer


async def _fold(events: AsyncGenerator[AnyEvent, None], answer: NvmlAnswer) -> None:
    """Take events until there are two samples far enough apart, or the source has ended."""
    rows: list[dict[str, Any]] = []
    first: Gpu | None = None
    async for event in events:
        if isinstance(event, Source) and event.state == "unavailable":
            answer.state, answer.text = "unavailable", event.text or ""
        elif isinstance(event, Source) and event.state == "failed" and answer.state != "joined":
            answer.text = event.text or answer.text
        elif isinstance(event, Source) and event.descriptor:
            answer.state, answer.text = "joined", ""
            answer.driver = event.descriptor.get("driver")
            answer.cuda_driver = event.descriptor.get("cuda_driver")
            rows = event.descriptor["gpus"]
        elif isinstance(event, Gpu):
            first = first or event
            _read_samples(answer, rows, first, event)
            if event.t - first.t >= APART_S * 1e6:
                return


def _read_samples(answer: NvmlAnswer, rows: list[dict[str, Any]], first: Gpu, last: Gpu) -> None:
    whole = [(place, row) for place, row in enumerate(rows) if "mig_instance" not in row]
    answer.unreadable = [f"GPU {row.get('index')}: {row['error']}" for _, row in whole if row.get("error")]
    answer.cards = [
        Card(row, _row(first, place), _row(last, place), (last.t - first.t) / 1e6)
        for place, row in whole
        if not row.get("error")
    ]


def _row(sample: Gpu, place: int) -> dict[str, Any]:
    """One GPU's cells of a sample; health and processes come every few seconds only."""
    columns = msgspec.structs.asdict(sample)
    row = {name: column[place] for name, column in columns.items() if isinstance(column, list) and place < len(column)}
    row["throttle_ns"] = {reason: column[place] for reason, column in sample.throttle_ns.items() if place < len(column)}
    return row
