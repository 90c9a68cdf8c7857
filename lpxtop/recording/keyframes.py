"""Where a recording's keyframes are: by the chain the writer left, or by a scan. Must not decode them.

The chain (`offset`, `prev`) holds only in the file it was written to; as soon as one link is wrong (the file was cut,
joined, edited or piped) the whole file is scanned, once. A growing file costs only what is new.
"""

import re
from pathlib import Path
from typing import BinaryIO

from lpxtop.recording.lines import BLOCK, LINE_BYTES, LineReader, last_newline

_KEYFRAME = b'{"k":"keyframe"'
_TIME = re.compile(rb'"t":(-?\d{1,18})\b')
_TRAILER = re.compile(rb'"offset":(\d{1,18})(?:,"prev":(\d{1,18}))?\}\s*$')


class KeyframeIndex:
    """(t, offset) of every keyframe of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: list[tuple[int, int]] = []
        self._known = 0  # everything before this offset has been looked at
        self._trusted = True

    def places(self) -> list[tuple[int, int]]:
        """In file order. Looks at what the file has gained since the last call."""
        with self._path.open("rb") as file:
            end = last_newline(file)
            if end > self._known and self._trusted:
                self._extend_by_chain(file, end)
            if end > self._known and not self._trusted:
                self._extend_by_scan(file)
            self._known = max(end, self._known)
        return self._places

    def _extend_by_chain(self, file: BinaryIO, end: int) -> None:
        offset = _last_keyframe(file, end, self._known)
        last = self._places[-1][1] if self._places else None
        found = []
        while offset is not None and offset != last:
            place, previous = _link(file, offset)
            if place is None:
                self._trusted, self._places, self._known = False, [], 0
                return
            found.append(place)
            offset = previous
        self._places += found[::-1]

    def _extend_by_scan(self, file: BinaryIO) -> None:
        reader = LineReader(file, self._known)
        while (found := reader.next()) is not None:
            offset, line = found
            if line.startswith(_KEYFRAME):
                time = _TIME.search(line, 0, 60)
                if time:
                    self._places.append((int(time.group(1)), offset))


def _link(file: BinaryIO, offset: int) -> tuple[tuple[int, int] | None, int | None]:
    """((t, offset), the keyframe before) of the keyframe at `offset`; (None, None) when there is none that says so."""
    file.seek(offset)
    line = file.readline(LINE_BYTES)
    time, trailer = _TIME.search(line, 0, 60), _TRAILER.search(line[-80:])
    if not line.startswith(_KEYFRAME) or not time or not trailer or int(trailer.group(1)) != offset:
        return None, None
    previous = None if trailer.group(2) is None else int(trailer.group(2))
    if previous is not None and previous >= offset:
        return None, None
    return (int(time.group(1)), offset), previous


def _last_keyframe(file: BinaryIO, end: int, floor: int) -> int | None:
    """Offset of the last keyframe between two line beginnings, searched backwards."""
    position, later = end, b""
    needle = b"\n" + _KEYFRAME
    while position > floor:
        step = min(BLOCK, position - floor)
        position -= step
        file.seek(position)
        block = file.read(step) + later
        at = block.rfind(needle)
        if at >= 0:
            return position + at + 1
        later = block[: len(needle) - 1]
    file.seek(floor)
    return floor if file.read(len(_KEYFRAME)) == _KEYFRAME else None
