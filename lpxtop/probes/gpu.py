"""The GPUs of this host through NVML, as an event source. Never blocks the loop and never waits for the driver.

A daemon thread samples (sampler.py); here its news become events. A reading that nobody has is None, with the reason
in `notes`. Must not set anything on a GPU.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from lpxtop.clock import Clock, SystemClock, session_us
from lpxtop.events.records import AnyEvent, Gpu, Mark, Source
from lpxtop.probes.host import Host
from lpxtop.probes.sampler import News, Sampler
from lpxtop.probes.selection import Selection

MAX_HZ = 4.0
WATCH_S = 0.5
MAX_WAITING = 1000
"""Samples kept for a consumer that does not take them; then the oldest go."""


class GpuSource:
    """NVML as events: `source` joined with the inventory, then `gpu` samples and `mark`s for XIDs; or one `source`
    unavailable, whose text says why and what to do, and the end.

    `select` is `nvml` for all GPUs, `nvml:0-3` or `nvml:GPU-3af1` for some; `visible` a CUDA_VISIBLE_DEVICES text.
    Samples are up to `hz` (at most 4) a second, less often where sampling costs the driver much. Raises UsageError.
    """

    def __init__(
        self,
        origin_ns: int,
        *,
        name: str = "gpu0",
        select: str | None = None,
        visible: str | None = None,
        hz: float = 2.0,
        clock: Clock | None = None,
        root: Path = Path("/"),
    ) -> None:
        self.name = name
        self._origin_ns = origin_ns
        self._clock: Clock = clock or SystemClock()
        self._queue: asyncio.Queue[News] = asyncio.Queue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._seq = 0
        selection = Selection(select, visible)
        self._sampler = Sampler(self._tell, self._clock, Host(root), selection, 1.0 / min(hz, MAX_HZ))

    async def close(self) -> None:
        """Ends the iteration at once; the thread ends when the driver lets it."""
        self._sampler.stop()
        self._queue.put_nowait(("end", None))

    async def __aiter__(self) -> AsyncIterator[AnyEvent]:
        self._loop = asyncio.get_running_loop()
        self._sampler.start()
        try:
            while True:
                try:
                    kind, value = await asyncio.wait_for(self._queue.get(), WATCH_S)
                except TimeoutError:
                    self._sampler.watch()
                    continue
                if kind == "end":
                    return
                yield self._event(kind, value)
                self._sampler.watch()
        finally:
            self._sampler.stop()

    def _tell(self, news: News) -> None:
        """Called in the sampler's threads; the loop may be closed already."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._put, news)

    def _put(self, news: News) -> None:
        if self._queue.qsize() >= MAX_WAITING:
            self._queue.get_nowait()
        self._queue.put_nowait(news)

    def _event(self, kind: str, value: Any) -> AnyEvent:
        match kind:
            case "sample":
                at_ns, columns = value
                return Gpu(**self._stamp(at_ns), **columns)
            case "xid":
                at_ns, text, level = value
                return Mark(**self._stamp(at_ns), text=text, level=level, code="xid")
            case "inventory":
                return Source(**self._stamp(), kind="gpu", state="joined", descriptor=value)
            case _:  # failed, unavailable, and back, which is joined again
                state = "joined" if kind == "back" else kind
                return Source(**self._stamp(), kind="gpu", state=state, text=value)

    def _stamp(self, at_ns: int | None = None) -> dict[str, Any]:
        self._seq += 1
        at_ns = self._clock.monotonic_ns() if at_ns is None else at_ns
        return {"t": session_us(at_ns, self._origin_ns), "src": self.name, "seq": self._seq - 1}
