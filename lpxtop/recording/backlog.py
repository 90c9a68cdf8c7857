"""Lines that wait for a slow disk or a slow reader, and what is left out when they are too many. Must not do I/O.

`arrivals` are left out first, and counted; keyframes too, since a seek can do without. Nothing else is.
"""

from collections import deque

from lpxtop.events import codec
from lpxtop.events.records import AnyEvent, Arrivals, End, Keyframe, Mark


class Backlog:
    """Encoded lines up to `limit` bytes. `dropped` counts the frames of arrivals left out, `end` is the number of
    bytes ever put: the offset of the next line."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: deque[bytes] = deque()
        self._unsaid = 0  # left out since the last line that says so
        self.bytes = 0
        self.end = 0
        self.dropped = 0

    def accepts(self, event: AnyEvent) -> bool:
        """Whether there is room for it; arrivals there is no room for are counted."""
        if self.bytes <= self._limit or not isinstance(event, Arrivals | Keyframe):
            return True
        if isinstance(event, Arrivals):
            self.dropped += 1
            self._unsaid += 1
        return False

    def put(self, event: AnyEvent) -> None:
        """Add one line, and before it what was left out: once there is room again, at the latest at the end."""
        if self._unsaid and (isinstance(event, End) or self.bytes < self._limit // 2):
            self.put_unsaid(event.t)
        self._append(line_of(event))

    def put_unsaid(self, t: int) -> None:
        """Say what was left out, if anything was."""
        if self._unsaid:
            text = f"{self._unsaid} frames of arrivals were not recorded: the disk or the reader was too slow"
            self._unsaid = 0
            self._append(codec.encode(Mark(t=t, text=text, level="warn", code="arrivals_dropped")))

    def _append(self, line: bytes) -> None:
        self._lines.append(line)
        self.bytes += len(line)
        self.end += len(line)

    def take(self) -> deque[bytes]:
        """All that waits; it waits no longer."""
        lines, self._lines, self.bytes = self._lines, deque(), 0
        return lines

    def __bool__(self) -> bool:
        return bool(self._lines)


def line_of(event: AnyEvent) -> bytes:
    """The event's line. What has none (a lone surrogate in a text) becomes a mark: no run ends of it."""
    try:
        return codec.encode(event)
    except (ValueError, TypeError, RecursionError) as error:
        text = f"an event of kind {kind_of(event)} could not be written: {type(error).__name__}"
        return codec.encode(Mark(t=event.t, text=text, level="warn", code="event_unwritable"))


def kind_of(event: AnyEvent) -> str:
    """The event's kind as its line names it."""
    return str(getattr(event, "k", None) or event.__struct_config__.tag)
