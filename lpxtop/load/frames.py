"""Turns what happened since the last frame into events, in an order that loses none: requests, arrivals, ended
requests, then the load process about itself. Owns the slots. Must not decide what is sent, or when.
"""

import heapq
import os
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from lpxtop.clock import session_us
from lpxtop.events.buckets import bucket
from lpxtop.events.records import Event, Finished, LoadSample
from lpxtop.load.client import ArrivalsFrame, Client, Stream
from lpxtop.load.schedule import Turn


class Flight:
    """One request, from being taken up to the frame after its end. `told_ns` is the `sent` its request line had."""

    __slots__ = ("stream", "told", "told_ns", "turn")

    def __init__(self, turn: Turn, stream: Stream) -> None:
        self.turn, self.stream = turn, stream
        self.told = False
        self.told_ns: int | None = None


class Slots:
    """Short numbers for requests, the smallest free one first."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._used = 0

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._used += 1
        return self._used - 1

    def give_back(self, slot: int) -> None:
        heapq.heappush(self._free, slot)


class Frames:
    """Collects flights and makes the frames. `emit` gets events numbered in the order they are handed over.

    `backlog` tells the bytes that wait to leave this process, and how many events were dropped because too many did.
    """

    def __init__(
        self,
        *,
        client: Client,
        src: str,
        origin_ns: int,
        emit: Callable[[Event], None],
        backlog: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._client, self._src, self._origin_ns = client, src, origin_ns
        self._emit, self._backlog = emit, backlog
        self._seq = 0
        self._flying: dict[int, Flight] = {}
        self._ended: list[tuple[Flight, Finished]] = []
        self._taken = self._sent = 0
        self._done: Counter[str] = Counter()
        self._lateness: Counter[int] = Counter()
        self._lag: Counter[int] = Counter()
        self._cpu_ns, self._wall_ns = time.process_time_ns(), time.monotonic_ns()
        self.slots = Slots()

    # --- what happens ------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    def streams(self) -> list[Stream]:
        """Those in flight."""
        return [flight.stream for flight in self._flying.values()]

    def began(self, flight: Flight) -> None:
        self._flying[flight.stream.spec.id] = flight
        self._taken += 1

    def ended(self, flight: Flight, finished: Finished) -> None:
        del self._flying[finished.id]
        self._ended.append((flight, finished))

    def broken(self, flight: Flight, error_type: str) -> Finished:
        """The end of a flight whose client failed in a way it should not have."""
        spec, sent_ns = flight.stream.spec, flight.stream.sent_ns
        return Finished(
            t=self.now_us(),
            id=spec.id,
            slot=spec.slot,
            due=self.session_us(spec.due_ns),
            sent=None if sent_ns is None else self.session_us(sent_ns),
            warmup=spec.warmup,
            outcome="protocol_error",
            request_id=spec.request_id,
            flags=["client_fault"],
            error_type=error_type,
        )

    def loop_lag(self, microseconds: float) -> None:
        self._lag[bucket(microseconds)] += 1

    # --- events ------------------------------------------------------------------------------------------------

    def session_us(self, monotonic_ns: int) -> int:
        return session_us(monotonic_ns, self._origin_ns)

    def now_us(self) -> int:
        return self.session_us(time.monotonic_ns())

    def event(self, event: Event) -> None:
        """Hand an event over as this source's next one."""
        self._emit(msgspec.structs.replace(event, src=self._src, seq=self._seq))
        self._seq += 1

    def frame(self, *, waiting: int, target: int | None, rate: float | None) -> None:
        """One frame. `waiting` is how many requests are due and not taken up. Slots of what ended become free."""
        ended, self._ended = self._ended, []
        t = self.now_us()
        self._tell_requests([*self._flying.values(), *(flight for flight, _ in ended)])
        self._tell_arrivals(t, [*self.streams(), *(flight.stream for flight, _ in ended)])
        for _, finished in ended:
            self.event(finished)
            self._done[finished.outcome] += 1
            self.slots.give_back(finished.slot)
        self.event(self._sample(t, waiting, target, rate))

    def _tell_requests(self, flights: list[Flight]) -> None:
        """A request's line at first, and again when it was sent since (or sent again on a fresh connection)."""
        for flight in flights:
            sent_ns = flight.stream.sent_ns
            if flight.told and sent_ns == flight.told_ns:
                continue
            if flight.told_ns is None and sent_ns is not None:
                self._sent += 1
                self._lateness[bucket((sent_ns - flight.turn.due_ns) / 1000)] += 1
            flight.told, flight.told_ns = True, sent_ns
            self.event(flight.stream.request_event())

    def _tell_arrivals(self, t: int, streams: list[Stream]) -> None:
        columns = ArrivalsFrame()
        for stream in streams:
            stream.take_arrivals(columns)
        if columns.slot:
            self.event(columns.event(t, self._src, self._seq))

    def _sample(self, t: int, waiting: int, target: int | None, rate: float | None) -> LoadSample:
        health = self._client.take_health()
        lag, self._lag = self._lag, Counter()
        lateness, self._lateness = self._lateness, Counter()
        cpu_ns, wall_ns = time.process_time_ns(), time.monotonic_ns()
        cpu_before, wall_before = self._cpu_ns, self._wall_ns
        self._cpu_ns, self._wall_ns = cpu_ns, wall_ns
        backlog_bytes, dropped = self._backlog()
        return LoadSample(
            t=t,
            target=target,
            rate=rate,
            in_flight=len(self._flying),
            due_not_sent=waiting + sum(flight.told_ns is None for flight in self._flying.values()),
            due=self._taken + waiting,
            sent=self._sent,
            done=dict(self._done),
            loop_lag_us=dict(lag),
            read_delay_us=health.read_delay_us,
            send_lateness_us=dict(lateness),
            events=health.events,
            reads=health.reads,
            coalesced=health.coalesced,
            user_stamps=health.user_stamps,
            timestamp_source=health.timestamp_source,
            cpu_us=(cpu_ns - cpu_before) // 1000,
            wall_us=(wall_ns - wall_before) // 1000,
            rss_bytes=resident_bytes(),
            backlog_bytes=backlog_bytes,
            dropped_events=dropped,
        )


def resident_bytes() -> int | None:
    """This process's resident memory; None where /proc does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
