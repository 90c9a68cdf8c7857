"""Plays a recording: which events are due now, and what a jump needs. Pacing is arithmetic on a clock handed in.

File order is the order; nothing is re-sorted. Must not fold events or know what a screen shows.
"""

from collections.abc import Iterator

import msgspec

from lpxtop.events.records import FRAME_US, AnyEvent, Keyframe, LoadSample
from lpxtop.recording.keyframes import KeyframeIndex
from lpxtop.recording.lines import LineReader
from lpxtop.recording.marks import MarkScan
from lpxtop.recording.reader import Recording

CHART_WINDOW_US = 310_000_000
"""Keyframes this far back are needed to restore the charts."""
IDLE_US, IDLE_KEPT_US = 5_000_000, 1_000_000
MAX_LINES, MAX_BYTES = 2000, 1 << 20
"""What one `advance` hands out at most, so that a frame never waits."""
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 0.0)


class Seek(msgspec.Struct):
    """What restores the state at a time: keyframes, oldest first, then the events after the last of them."""

    keyframes: list[Keyframe]
    events: list[AnyEvent]


class Player:
    """The playhead. `position_us` is where it is, `speed` 0 means as fast as it can, `note` what it last skipped."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._file = recording.path.open("rb")
        self._lines = LineReader(self._file)
        self._next: AnyEvent | None = None
        self._last_ns: int | None = None
        self._keyframes = KeyframeIndex(recording.path)
        self._scan = MarkScan(recording.path)
        self._end_us = recording.last_t()
        self._end_size = 0
        self.start_us = recording.header.t
        self.position_us = self.start_us
        self.speed = 1.0
        self.playing = False
        self.follow = False
        self.skip_idle = True
        self.note: str | None = None

    def close(self) -> None:
        """Let the file go."""
        self._file.close()

    @property
    def end_us(self) -> int:
        """The last time in the file; moves while it grows."""
        size = self._recording.size
        if size != self._end_size:
            self._end_size = size
            self._end_us = max(self._end_us, self._recording.last_t())
        return self._end_us

    # --- playing -----------------------------------------------------------------------------------------------

    def play(self) -> None:
        self.playing = True
        self._last_ns = None

    def pause(self) -> None:
        self.playing = False
        self.follow = False

    def advance(self, now_ns: int) -> list[AnyEvent]:
        """The events that are due by now."""
        elapsed = 0 if self._last_ns is None else now_ns - self._last_ns
        self._last_ns = now_ns
        if not self.playing and not self.follow:
            return []
        if self.follow or self.speed == 0:
            return self._take_until(None)
        events = self._take_until(self.position_us + round(elapsed * self.speed / 1000))
        self._skip_idle()
        return events

    def _take_until(self, limit: int | None) -> list[AnyEvent]:
        """Events in file order up to the first one later than `limit`; the playhead moves there."""
        events: list[AnyEvent] = []
        growing = self._recording.growing  # asked before reading: what came before the end is played
        begin = self._lines.offset
        while len(events) < MAX_LINES and self._lines.offset - begin < MAX_BYTES:
            event = self._peek()
            if event is None:
                self._at_end(limit, growing)
                return events
            if limit is not None and event.t > limit:
                self.position_us = max(self.position_us, limit)
                return events
            self._next = None
            if not isinstance(event, Keyframe):
                events.append(event)
            self.position_us = max(self.position_us, event.t)
        return events

    def _at_end(self, limit: int | None, growing: bool) -> None:
        end = self.end_us
        if limit is not None:
            self.position_us = max(self.position_us, min(limit, end))
        if growing or (self.follow and not self._recording.finished) or self.position_us < end:
            return
        self.playing = self.follow = False
        self.note = "end of the recording"

    def _skip_idle(self) -> None:
        ahead = self._peek()
        if self.skip_idle and ahead is not None and ahead.t - self.position_us > IDLE_US:
            skipped = ahead.t - self.position_us - IDLE_KEPT_US
            self.position_us += skipped
            self.note = f"skipped {skipped / 1e6:.0f} s without events"

    def step(self, samples: int) -> list[AnyEvent]:
        """The events up to and including the next `samples` load samples (250 ms each). Where no load process
        says anything for a second, or there is none (`watch`), a step ends there."""
        self.pause()
        events: list[AnyEvent] = []
        for _ in range(samples):
            events += self._take_sample()
        return events

    def _take_sample(self) -> list[AnyEvent]:
        events: list[AnyEvent] = []
        begin = self.position_us
        while (event := self._peek()) is not None:
            if events and event.t - begin > 4 * FRAME_US:
                break
            self._next = None
            self.position_us = max(self.position_us, event.t)
            if not isinstance(event, Keyframe):
                events.append(event)
            if isinstance(event, LoadSample):
                break
        return events

    # --- reading -----------------------------------------------------------------------------------------------

    def _peek(self) -> AnyEvent | None:
        """The next event without taking it; None at the (present) end of the file."""
        while self._next is None:
            found = self._lines.next()
            if found is None:
                return None
            self._next = self._recording.decode(found[1])
        return self._next

    def _go_to(self, offset: int) -> None:
        self._lines.go_to(offset)
        self._next = None

    # --- jumping -----------------------------------------------------------------------------------------------

    def seek(self, t_us: int) -> Seek:
        """Move the playhead to a time. Returns what a state needs to be exactly there."""
        t_us = max(self.start_us, min(t_us, self.end_us))
        chain = [place for place in self._keyframes.places() if place[0] <= t_us]
        chain = [place for place in chain if place[0] > chain[-1][0] - CHART_WINDOW_US] if chain else []
        keyframes = [event for event in map(self._keyframe_at, chain) if event is not None]
        if not keyframes:
            self._go_to(0)
        self.position_us = self.start_us
        self._last_ns = None
        self.note = None
        events: list[AnyEvent] = []
        while (event := self._peek()) is not None and event.t <= t_us:
            self._next = None
            if not isinstance(event, Keyframe):
                events.append(event)
        self.position_us = t_us
        return Seek(keyframes, events)

    def _keyframe_at(self, place: tuple[int, int]) -> Keyframe | None:
        """The keyframe of that place; reading goes on behind it."""
        self._go_to(place[1])
        found = self._lines.next()
        event = None if found is None else self._recording.decode(found[1])
        return event if isinstance(event, Keyframe) else None

    # --- marks -------------------------------------------------------------------------------------------------

    @property
    def marks(self) -> list[tuple[int, str]]:
        """(t, glyph) of the scrub bar, as far as `scan_marks` has come."""
        return self._scan.marks

    def scan_marks(self) -> Iterator[None]:
        """Gather `marks`, about 1 MiB of the file at a time. Called again, it goes on with what the file gained."""
        return self._scan.run()
