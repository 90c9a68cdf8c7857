"""The load processes as sources: their last samples, missing events, and what they say about themselves.

Must not judge (quality does) and must not count requests (the fold of request events does).
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from lpxtop.events.records import Event, LoadSample, Source
from lpxtop.metrics.distribution import merge, merged
from lpxtop.metrics.quality import Client
from lpxtop.metrics.slots import Slot

_DISTRIBUTIONS = (("loop_lag", "loop_lag_us"), ("read_delay", "read_delay_us"), ("send_lateness", "send_lateness_us"))
_NUMBERS = ("events", "reads", "coalesced", "user_stamps")
_KEPT = ("t", "target", "rate", "in_flight", "due_not_sent", "timestamp_source", "dropped_events")


class LoadSources:
    """Every source's event numbers, and the load processes' last words."""

    def __init__(self) -> None:
        self.last: dict[str, LoadSample] = {}
        self.gone: set[str] = set()
        self.joined: set[str] = set()
        self.horizon = 0
        self.stamps: set[str] = set()
        self._next: dict[str, int] = {}
        self._holes: dict[str, int] = {}
        self._dropped: dict[str, int] = {}

    def number(self, src: str, seq: int) -> bool:
        """Whether events of `src` are missing before this one. A number that went back is a source that restarted."""
        expected = self._next.get(src)
        self._next[src] = seq + 1
        if expected is None or seq <= expected:
            return False
        self._holes[src] = self._holes.get(src, 0) + seq - expected
        return True

    def source(self, event: Source) -> None:
        if event.state == "joined":
            self.joined.add(event.src)
            self.gone.discard(event.src)
        else:
            self.gone.add(event.src)

    def heard(self, event: Event) -> None:
        """Up to the time of this frame, what arrived is known."""
        self.horizon = max(self.horizon, event.t)

    def sample(self, event: LoadSample) -> None:
        self.heard(event)
        before = self.last.get(event.src)
        if before is None or event.t >= before.t:
            self.last[event.src] = LoadSample(**{name: getattr(event, name) for name in _KEPT})
        self._dropped[event.src] = max(self._dropped.get(event.src, 0), event.dropped_events)
        if event.timestamp_source is not None:
            self.stamps.add(event.timestamp_source)

    def to_slot(self, slot: Slot, event: LoadSample) -> None:
        """What the second says about the client."""
        for name, of_event in _DISTRIBUTIONS:
            merge(getattr(slot, name), getattr(event, of_event))
        for name in _NUMBERS:
            setattr(slot, name, getattr(slot, name) + getattr(event, name))
        row = slot.in_flight.setdefault(event.src, [0, 0])
        row[0] += event.in_flight
        row[1] += 1
        _add_cpu(slot.cpu, event)

    @property
    def live(self) -> list[LoadSample]:
        """The last sample of each load process that is still there."""
        return [sample for src, sample in self.last.items() if src not in self.gone]

    @property
    def workers(self) -> int:
        return len((self.joined | self.last.keys()) - self.gone)

    @property
    def dropped_events(self) -> int:
        """Holes in the numbering, or what the source itself says it dropped, whichever is more."""
        names = self._holes.keys() | self._dropped.keys()
        return sum(max(self._holes.get(name, 0), self._dropped.get(name, 0)) for name in names)

    @property
    def timestamp_source(self) -> str | None:
        """kernel only if every frame said so."""
        return next(iter(self.stamps)) if len(self.stamps) == 1 else "mixed" if self.stamps else None

    def of_window(self, slots: Iterable[Slot]) -> Client:
        """The client over a window."""
        window = list(slots)
        cpu: dict[str, list[int]] = {}
        for slot in window:
            for src, (busy, wall) in slot.cpu.items():
                row = cpu.setdefault(src, [0, 0])
                row[0] += busy
                row[1] += wall
        return Client(
            loop_lag=merged(slot.loop_lag for slot in window),
            read_delay=merged(slot.read_delay for slot in window),
            send_lateness=merged(slot.send_lateness for slot in window),
            events=sum(slot.events for slot in window),
            reads=sum(slot.reads for slot in window),
            coalesced=sum(slot.coalesced for slot in window),
            user_stamps=sum(slot.user_stamps for slot in window),
            cpu_ratio=_busiest(cpu),
            timestamp_source=self.timestamp_source,
            dropped_events=self.dropped_events,
        )

    def snapshot(self) -> dict[str, Any]:
        return {
            "last": {src: {name: getattr(s, name) for name in _KEPT} for src, s in self.last.items()},
            "gone": sorted(self.gone),
            "joined": sorted(self.joined),
            "horizon": self.horizon,
            "stamps": sorted(self.stamps),
            "next": self._next,
            "holes": self._holes,
            "dropped": self._dropped,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.last = {src: msgspec.convert(sample, LoadSample) for src, sample in state["last"].items()}
        self.gone, self.joined, self.stamps = set(state["gone"]), set(state["joined"]), set(state["stamps"])
        self.horizon = state["horizon"]
        self._next, self._holes, self._dropped = state["next"], state["holes"], state["dropped"]


class ClientTotals:
    """The client over the whole measurement, for the summary."""

    def __init__(self) -> None:
        self._client = Client()
        self._cpu: dict[str, list[int]] = {}

    def sample(self, event: LoadSample) -> None:
        for name, of_event in _DISTRIBUTIONS:
            merge(getattr(self._client, name), getattr(event, of_event))
        for name in _NUMBERS:
            setattr(self._client, name, getattr(self._client, name) + getattr(event, name))
        _add_cpu(self._cpu, event)

    def client(self, sources: LoadSources) -> Client:
        return msgspec.structs.replace(
            self._client,
            cpu_ratio=_busiest(self._cpu),
            timestamp_source=sources.timestamp_source,
            dropped_events=sources.dropped_events,
        )


def _add_cpu(into: dict[str, list[int]], event: LoadSample) -> None:
    if event.cpu_us is not None and event.wall_us is not None:
        row = into.setdefault(event.src, [0, 0])
        row[0] += event.cpu_us
        row[1] += event.wall_us


def _busiest(cpu: dict[str, list[int]]) -> float | None:
    """The ratio of the busiest process: each has one core."""
    return max((busy / wall for busy, wall in cpu.values() if wall > 0), default=None)
