"""The scrub bar's marks, gathered in slices from the bytes of the lines. Must not decode events.

C a change of load, m a note, ! trouble, : a gap without events.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from lpxtop.recording.lines import BLOCK, LineReader

GAP_US = 5_000_000
ERRORS_APART_US = 1_000_000
"""Failures closer than this are one mark."""
_TIME = re.compile(rb'"t":(-?\d{1,18})\b')
_QUIET = (b'"outcome":"ok"', b'"outcome":"cut"', b'"outcome":"cancelled"')
_CLOCKS = (b'load"', b'gpu"', b'server"')
"""Kinds that come all the time: where even these are missing, there is a gap."""


class MarkScan:
    """`marks` are (t, glyph) in file order, of what has been scanned so far."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._last_t: int | None = None
        self._last_error: int | None = None
        self.marks: list[tuple[int, str]] = []

    def run(self) -> Iterator[None]:
        """One step is at most about 1 MiB of the file. Run again, it goes on with what the file has gained."""
        with self._path.open("rb") as file:
            reader = LineReader(file, self._offset)
            rested = self._offset
            while (found := reader.next()) is not None:
                mark = mark_of(found[1])
                if mark is not None:
                    self._take(*mark)
                self._offset = reader.offset
                if self._offset - rested >= BLOCK:
                    rested = self._offset
                    yield

    def _take(self, t: int, glyph: str) -> None:
        if self._last_t is not None and t - self._last_t > GAP_US:
            self.marks.append((self._last_t, ":"))
        self._last_t = t if self._last_t is None else max(self._last_t, t)
        if glyph == "!":
            if self._last_error is not None and t - self._last_error < ERRORS_APART_US:
                return
            self._last_error = t
        if glyph:
            self.marks.append((t, glyph))


def mark_of(line: bytes) -> tuple[int, str] | None:
    """(t, glyph) of a line that matters for the scrub bar. An empty glyph only tells that there was something."""
    kind = line[6:24]
    if kind.startswith(b"finished"):
        if any(outcome in line for outcome in _QUIET):
            return None
        glyph = "!"
    elif kind.startswith(b"control"):
        glyph = "C" if b'"what":"concurrency"' in line or b'"what":"rate"' in line else ""
    elif kind.startswith(b'mark"'):
        glyph = "!" if b'"level":"error"' in line or b'"level":"warn"' in line else "m"
    elif kind.startswith(b'source"'):
        glyph = "!" if b'"state":"failed"' in line else ""
    elif kind.startswith(b'server_changed"'):
        glyph = "!"
    elif kind.startswith(_CLOCKS):
        glyph = ""
    else:
        return None
    time = _TIME.search(line, 0, 200)
    return (int(time.group(1)), glyph) if time else None
