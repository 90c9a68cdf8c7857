"""An answer for a caller that wants no stamps: the sink that keeps what came, and the body httpx reads from it.

Nothing slows the sender down: what the caller has not read yet is kept in memory.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import httpx

from lpxtop.load.exchange import Timing


class Collector:
    """The sink of a request that has none."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: deque[bytes] = deque()
        self.ended = False
        self.error: Exception | None = None
        self._news = asyncio.Event()

    def sent(self, sent_ns: int, timing: Timing) -> None: ...

    def head(self, status: int, headers: list[tuple[bytes, bytes]], kernel_ns: int, user_ns: int) -> None:
        self.headers = headers

    def body(self, data: bytes, kernel_ns: int, user_ns: int) -> None:
        self.parts.append(data)
        self._news.set()

    def end(self, error: Exception | None, user_ns: int) -> None:
        self.ended, self.error = True, error
        self._news.set()

    async def news(self, limit_s: float | None) -> None:
        """Wait for more of the body, or its end; raises httpx.ReadTimeout."""
        try:
            async with asyncio.timeout(limit_s):
                await self._news.wait()
        except TimeoutError:
            raise httpx.ReadTimeout(f"no byte came for {limit_s:g} s") from None
        self._news.clear()


class Body(httpx.AsyncByteStream):
    """The body as it comes. `release` is called once, when the caller is through with it, read to the end or not."""

    def __init__(self, collector: Collector, release: Callable[[], None], read_s: float | None) -> None:
        self._collector, self._release, self._read_s = collector, release, read_s
        self._released = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        collector = self._collector
        while True:
            while collector.parts:
                yield collector.parts.popleft()
            if collector.ended:
                if collector.error is not None:
                    raise collector.error
                return
            await collector.news(self._read_s)

    async def aclose(self) -> None:
        if not self._released:
            self._released = True
            self._release()
