"""Sources and sinks of events, and how sources are merged. Must not know what an event means.

A source is an async iterator of events; a sink takes events and is closed. A sink that fails never stops the
session: its owner reports it and drops it.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from typing import Any, Protocol

from lpxtop.events.records import AnyEvent


class EventSource(Protocol):
    """Where events come from. Iterating ends when the source is done; `close` makes that happen soon."""

    name: str

    def __aiter__(self) -> AsyncIterator[AnyEvent]: ...

    async def close(self) -> None: ...


class EventSink(Protocol):
    """Where events go. `event` must not block; `close` flushes."""

    def event(self, event: AnyEvent) -> None: ...

    async def close(self) -> None: ...


_DONE = None


async def merge(sources: Iterable[EventSource], limit: int = 10_000) -> AsyncGenerator[AnyEvent, None]:
    """Every event of every source, in the order they come in (the session's one order).

    A source that raises ends the merge with its exception. A full queue makes sources wait: load processes buffer
    on their own side.
    """
    queue: asyncio.Queue[AnyEvent | BaseException | None] = asyncio.Queue(limit)

    async def pump(source: EventSource) -> None:
        try:
            async for event in source:
                await queue.put(event)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(_DONE)

    tasks = [asyncio.ensure_future(pump(source)) for source in sources]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if item is _DONE:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class RunControl(Protocol):
    """What a screen may ask of a live session (session.py) or of a replay (cli.py joins it to recording/replay.py).

    Every call returns at once. A replay answers False from `can("load")`, a live session from `can("replay")`; the
    calls of the other kind then do nothing.
    """

    def can(self, what: str) -> bool: ...

    def view(self) -> Any: ...

    # load: a live session
    def start(self) -> None: ...
    def pause(self) -> None: ...
    def set_concurrency(self, n: int, by: str = "key") -> None: ...
    def set_rate(self, rate: float, by: str = "key") -> None: ...
    def cancel_requests(self) -> None: ...
    def mark(self, text: str) -> None: ...

    # replay
    def play(self) -> None: ...
    def set_speed(self, speed: float) -> None: ...
    def seek(self, t_us: int) -> None: ...
    def step(self, samples: int) -> None: ...
    def follow(self, on: bool) -> None: ...

    # both
    def set_window(self, seconds: float) -> None: ...
    async def stop(self, reason: str = "done") -> None: ...
    async def wait(self) -> None: ...
