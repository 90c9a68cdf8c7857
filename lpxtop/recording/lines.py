"""Whole lines of a file, with their offsets, however it looks and while it grows. Must not know what a line means.

Memory is bounded: a line beyond 16 MiB is passed over and comes out as one that is no event.
"""

import os
from collections.abc import Iterator
from typing import BinaryIO

BLOCK = 1 << 20
LINE_BYTES = 16 << 20
PADDING = b"\0 \t\r"
"""What may stand around an event: runs of NUL after a power loss, CR from another system."""
OVERSIZE = b"oversize"


class LineReader:
    """Reads on from `offset`, the beginning of the next line. The rest of a torn line is waited for."""

    def __init__(self, file: BinaryIO, offset: int = 0) -> None:
        self._file = file
        self._swallowed = 0  # bytes of the present line that were passed over
        self._ahead: list[tuple[int, bytes, int]] = []  # (offset, line, offset behind it), last first
        self.go_to(offset)

    def go_to(self, offset: int) -> None:
        """Read on from another line's beginning."""
        self._file.seek(offset)
        self.offset, self._rest, self._swallowed, self._ahead = offset, b"", 0, []

    def next(self) -> tuple[int, bytes] | None:
        """(offset, line without its LF), or None at the present end of the file."""
        while not self._ahead:
            block = self._file.read(BLOCK)
            if not block:
                return None
            self._split(block)
        begin, line, self.offset = self._ahead.pop()
        return begin, line

    def _split(self, block: bytes) -> None:
        pieces = (self._rest + block if self._rest else block).split(b"\n")
        self._rest = pieces.pop()
        begin = self.offset
        for piece in pieces:
            behind = begin + self._swallowed + len(piece) + 1
            self._ahead.append((begin, OVERSIZE if self._swallowed else piece, behind))
            begin, self._swallowed = behind, 0
        self._ahead.reverse()
        if len(self._rest) > LINE_BYTES:
            self._swallowed += len(self._rest)
            self._rest = b""


def lines(file: BinaryIO, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of every whole line from `offset` to the present end."""
    reader = LineReader(file, offset)
    while (found := reader.next()) is not None:
        yield found


def last_newline(file: BinaryIO) -> int:
    """Offset just behind the last LF; 0 when there is none."""
    position = file.seek(0, os.SEEK_END)
    while position > 0:
        step = min(BLOCK, position)
        position -= step
        file.seek(position)
        found = file.read(step).rfind(b"\n")
        if found >= 0:
            return position + found + 1
    return 0


def tail(file: BinaryIO, reach: int) -> tuple[list[bytes], bool]:
    """The whole lines of the last `reach` bytes, and whether that is all of the file."""
    size = file.seek(0, os.SEEK_END)
    start = max(0, size - reach)
    file.seek(start)
    pieces = file.read(size - start).split(b"\n")
    return pieces[1 if start else 0 : -1], start == 0
