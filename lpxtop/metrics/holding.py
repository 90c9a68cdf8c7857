"""When something began to hold and when it ended, with hysteresis. Reads no clock; must not know what holds."""

from typing import Literal

END_AFTER_US = 5_000_000
"""It has ended after so long without it, so that what flickers does not fill the event list."""

Change = tuple[Literal["began", "ended"], int, int]
"""What happened, when it began, and when it was last seen."""


class Holding:
    """`seen` in a row, `since` when it began to hold (None: it does not), `last` seen, `start` of the row."""

    __slots__ = ("last", "seen", "since", "start")

    def __init__(self, seen: int = 0, since: int | None = None, last: int = 0, start: int = 0) -> None:
        self.seen, self.since, self.last, self.start = seen, since, last, start

    def look(self, held: bool, t: int, needed: int = 2) -> Change | None:
        """One look at `t`. It begins when seen `needed` times in a row: a single flash is none."""
        return self._held(t, needed) if held else self._released(t)

    def _held(self, t: int, needed: int) -> Change | None:
        self.start = t if self.seen == 0 else self.start
        self.seen += 1
        self.last = t
        if self.since is not None or self.seen < needed:
            return None
        self.since = self.start
        return "began", self.start, t

    def _released(self, t: int) -> Change | None:
        self.seen = 0
        if self.since is None or t - self.last < END_AFTER_US:
            return None
        began, self.since = self.since, None
        return "ended", began, self.last

    def snapshot(self) -> list[int | None]:
        return [self.seen, self.since, self.last, self.start]
