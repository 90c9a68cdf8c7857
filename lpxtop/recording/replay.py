"""Plays a recording: which events are due now, and what a jump needs. Pacing is arithmetic on a clock handed in.

File order is the order; nothing is re-sorted. Must not fold events or know what a screen shows.
"""

import re
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from lpxtop.events.records import AnyEvent, Keyframe, LoadSample
from lpxtop.recording.reader import BLOCK, Recording

CHART_WINDOW_US = 310_000_000
"""Keyframes this far back are needed to restore the charts."""
IDLE_US, IDLE_KEPT_US = 5_000_000, 1_000_000
MAX_LINES = 4000
"""Lines handed out by one `advance`, so that a frame never waits."""
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 0.0)
_TIME = re.compile(rb'"t":(-?\d+)')
_KEYFRAME = b'{"k":"keyframe"'
_TRAILER = re.compile(rb'"offset":(\d+)(?:,"prev":(\d+))?\}\s*$')


class Seek(msgspec.Struct):
    """What restores the state at a time: keyframes, oldest first, then the events after the last of them."""

    keyframes: list[Keyframe]
    events: list[AnyEvent]


class Player:
    """The playhead. `position_us` is where it is, `speed` 0 means as fast as it can, `note` what it last skipped."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._file: BinaryIO = recording.path.open("rb")
        self._offset = 0  # of the next line to be read
        self._rest = b""
        self._lines: list[tuple[int, bytes]] = []  # whole lines read ahead, last first
        self._next: AnyEvent | None = None
        self._last_ns: int | None = None
        self._keyframes: list[tuple[int, int]] = []  # (t, offset), in file order
        self._keyframes_to = -1
        self._end_us = recording.last_t()
        self._end_size = 0
        self.start_us = recording.header.t
        self.position_us = self.start_us
        self.speed = 1.0
        self.playing = False
        self.follow = False
        self.skip_idle = True
        self.note: str | None = None
        self.marks: list[tuple[int, str]] = []

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
        if self.follow:
            return self._take_until(self.end_us)
        if not self.playing:
            return []
        if self.speed == 0:
            return self._take_until(None)
        events = self._take_until(self.position_us + round(elapsed * self.speed / 1000))
        self._skip_idle()
        return events

    def _take_until(self, limit: int | None) -> list[AnyEvent]:
        """Events in file order up to the first one later than `limit`; the playhead moves there."""
        events: list[AnyEvent] = []
        while len(events) < MAX_LINES:
            event = self._peek()
            if event is None:
                self._at_end(limit)
                return events
            if limit is not None and event.t > limit:
                break
            self._next = None
            if not isinstance(event, Keyframe):
                events.append(event)
            self.position_us = max(self.position_us, event.t)
        if limit is not None and len(events) < MAX_LINES:
            self.position_us = max(self.position_us, limit)
        return events

    def _at_end(self, limit: int | None) -> None:
        end = self.end_us
        if limit is not None:
            self.position_us = max(self.position_us, min(limit, end))
        if not self.follow and not self._recording.growing and self.position_us >= end:
            self.playing = False
            self.note = "end of the recording"

    def _skip_idle(self) -> None:
        ahead = self._peek()
        if self.skip_idle and ahead is not None and ahead.t - self.position_us > IDLE_US:
            skipped = ahead.t - self.position_us - IDLE_KEPT_US
            self.position_us += skipped
            self.note = f"skipped {skipped / 1e6:.0f} s without events"

    def step(self, samples: int) -> list[AnyEvent]:
        """The events up to and including the next `samples` load samples (250 ms each)."""
        self.pause()
        events: list[AnyEvent] = []
        while samples > 0:
            event = self._peek()
            if event is None:
                break
            self._next = None
            self.position_us = max(self.position_us, event.t)
            if not isinstance(event, Keyframe):
                events.append(event)
            samples -= isinstance(event, LoadSample)
        return events

    # --- reading -----------------------------------------------------------------------------------------------

    def _peek(self) -> AnyEvent | None:
        """The next event without taking it; None at the (present) end of the file."""
        while self._next is None:
            line = self._line()
            if line is None:
                return None
            self._next = self._recording.decode(line)
        return self._next

    def _line(self) -> bytes | None:
        if not self._lines:
            block = self._file.read(BLOCK)
            if not block:
                return None
            pieces = (self._rest + block).split(b"\n")
            self._rest = pieces.pop()
            position = self._offset
            for piece in pieces:
                self._lines.append((position, piece))
                position += len(piece) + 1
            self._lines.reverse()
            if not self._lines:
                return None
        position, line = self._lines.pop()
        self._offset = position + len(line) + 1
        return line

    def _go_to(self, offset: int) -> None:
        self._file.seek(offset)
        self._offset, self._rest, self._lines, self._next = offset, b"", [], None

    # --- jumping -----------------------------------------------------------------------------------------------

    def seek(self, t_us: int) -> Seek:
        """Move the playhead to a time. Returns what a state needs to be exactly there."""
        t_us = max(self.start_us, min(t_us, self.end_us))
        chain = [place for place in self._keyframe_places() if place[0] <= t_us]
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
        line = self._line()
        event = None if line is None else self._recording.decode(line)
        return event if isinstance(event, Keyframe) else None

    def _keyframe_places(self) -> list[tuple[int, int]]:
        """(t, offset) of all keyframes: by the chain of `prev` from the end where it can be trusted, else by a scan."""
        size = self._recording.size
        if size == self._keyframes_to:
            return self._keyframes
        with self._recording.path.open("rb") as file:
            self._keyframes = _chained(file, size, self._keyframes) or _scanned(file)
        self._keyframes_to = size
        return self._keyframes

    # --- marks -------------------------------------------------------------------------------------------------

    def scan_marks(self) -> Iterator[None]:
        """Gather the scrub bar's marks, a block of the file at a time: C a change of load, m a note, ! trouble,
        : a gap. Fills `marks`."""
        last_error = last_t = -(10**9)
        with self._recording.path.open("rb") as file:
            rest = b""
            while block := file.read(BLOCK):
                *whole, rest = (rest + block).split(b"\n")
                for line in whole:
                    found = _mark_of(line)
                    if found is None:
                        continue
                    t, glyph = found
                    if t - last_t > IDLE_US and last_t >= 0:
                        self.marks.append((last_t, ":"))
                    last_t = max(last_t, t)
                    if glyph == "!" and t - last_error < 1_000_000:
                        continue
                    if glyph:
                        self.marks.append((t, glyph))
                    last_error = t if glyph == "!" else last_error
                yield


def _mark_of(line: bytes) -> tuple[int, str] | None:
    """(t, glyph) of a line that matters for the scrub bar, without decoding it. An empty glyph only tells the time."""
    kind = line[6:14]
    glyph = ""
    if kind.startswith(b"control"):
        glyph = "C" if b'"what":"concurrency"' in line or b'"what":"rate"' in line else ""
    elif kind.startswith(b'mark"'):
        glyph = "!" if b'"level":"error"' in line or b'"level":"warn"' in line else "m"
    elif kind.startswith(b"finished"):
        quiet = (b'"outcome":"ok"', b'"outcome":"cut"', b'"outcome":"cancelled"')
        if any(outcome in line for outcome in quiet):
            return None
        glyph = "!"
    elif not kind.startswith((b'load"', b'gpu"', b'server"')):
        return None
    time = _TIME.search(line, 0, 200)
    return (int(time.group(1)), glyph) if time else None


def _chained(file: BinaryIO, size: int, known: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Keyframes by following `prev` from the last one; [] when the chain does not hold in this file."""
    offset = _last_keyframe_offset(file, size)
    found: list[tuple[int, int]] = []
    have = {place[1]: index for index, place in enumerate(known)}
    while offset is not None:
        if offset in have:
            return known[: have[offset] + 1] + found[::-1]
        file.seek(offset)
        line = file.readline(64 << 20)
        trailer, time = _TRAILER.search(line[-80:]), _TIME.search(line, 0, 60)
        if not line.startswith(_KEYFRAME) or not trailer or not time or int(trailer.group(1)) != offset:
            return []
        found.append((int(time.group(1)), offset))
        previous = trailer.group(2)
        offset = int(previous) if previous is not None else None
    return found[::-1]


def _last_keyframe_offset(file: BinaryIO, size: int) -> int | None:
    """Offset of the last whole keyframe line, searched backwards."""
    position, later = size, b""
    while position > 0:
        step = min(BLOCK, position)
        position -= step
        file.seek(position)
        block = file.read(step) + later
        at = block.rfind(b"\n" + _KEYFRAME)
        while at >= 0:
            file.seek(position + at + 1)
            if file.readline(64 << 20).endswith(b"\n"):
                return position + at + 1
            at = block.rfind(b"\n" + _KEYFRAME, 0, at)
        later = block[: len(_KEYFRAME) + 1]
    return None


def _scanned(file: BinaryIO) -> list[tuple[int, int]]:
    """Keyframes by reading the whole file once."""
    found: list[tuple[int, int]] = []
    offset = 0
    file.seek(0)
    for line in file:
        if line.startswith(_KEYFRAME) and line.endswith(b"\n"):
            time = _TIME.search(line, 0, 60)
            if time:
                found.append((int(time.group(1)), offset))
        offset += len(line)
    return found
