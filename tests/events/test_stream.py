"""Merging sources: nothing is lost, each source keeps its order, a failure is not swallowed."""

import asyncio
from contextlib import aclosing

import pytest

from lpxtop.events.records import Mark
from lpxtop.events.stream import merge


class Listed:
    """A source of prepared events that lets others run between them."""

    def __init__(self, name, events, error=None):
        self.name, self.events, self.error = name, events, error

    async def __aiter__(self):
        for event in self.events:
            await asyncio.sleep(0)
            yield event
        if self.error:
            raise self.error

    async def close(self):
        pass


async def test_merge_keeps_every_event_and_each_source_in_order():
    """All events of all sources come out once, and a source's own events in its order."""
    sources = [Listed(str(n), [Mark(t=t, src=str(n), text="") for t in range(50)]) for n in range(3)]

    async with aclosing(merge(sources, limit=4)) as events:
        got = [event async for event in events]

    assert len(got) == 150
    for n in range(3):
        assert [event.t for event in got if event.src == str(n)] == list(range(50))


async def test_merge_ends_with_the_exception_of_a_source():
    """A source that raises ends the merge with its exception, after what it had delivered."""
    got = []
    with pytest.raises(RuntimeError, match="gone"):
        async with aclosing(merge([Listed("a", [Mark(t=1, text="")], RuntimeError("gone"))])) as events:
            async for event in events:
                got.append(event.t)

    assert got == [1]
