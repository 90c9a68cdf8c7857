"""Reads recordings: streaming, tolerant of damage, memory independent of size. Must not write or change the original.

A torn last line, bad lines and runs of NUL are counted and left out; what is whole is read. Another major schema is
refused; a newer minor is read as far as it is understood.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from lpxtop.errors import RecordingError
from lpxtop.events import codec
from lpxtop.events.records import SCHEMA, AnyEvent, End, Header, Mark, Unknown
from lpxtop.recording.inputs import GZIP, ZSTD, Input, damage, open_input, open_stream
from lpxtop.recording.lines import LINE_BYTES, PADDING, LineReader, last_newline, lines, tail

TAIL_BYTES = 1 << 18
POLL_S = 0.05
_LOSSES = frozenset({"arrivals_dropped", "recording_gap", "event_unwritable"})


class Recording:
    """An open recording. `header` is its first event; `problems` says what was wrong with what has been read so far."""

    def __init__(self, source: Input, header: Header, name: str) -> None:
        self._source, self.header, self.name = source, header, name
        self._start_over()

    def _start_over(self) -> None:
        self._bad_lines = self._tail_bytes = self._after_end = self._losses = 0
        self._ended = False

    @classmethod
    def open(cls, path: str) -> "Recording":
        """Open a file, or `-` for stdin. Raises RecordingError, saying why, for what cannot be read."""
        source = open_input(path)
        name = "stdin" if path == "-" else path
        return cls(source, _first_header(source, name), name)

    @property
    def path(self) -> Path:
        """The plain file that is read: of a pipe or a packed recording a temporary one."""
        return self._source.path

    @property
    def growing(self) -> bool:
        """Whether more will come through the pipe."""
        return self._source.spool is not None and not self._source.spool.done

    @property
    def finished(self) -> bool:
        """Whether nothing can come any more: the pipe was closed, or `end` has been read."""
        return self._ended if self._source.spool is None else self._source.spool.done

    def __iter__(self) -> Iterator[AnyEvent]:
        """Every event, the header first, in file order."""
        self._start_over()
        return self.events_from(0)

    def events_from(self, offset: int) -> Iterator[AnyEvent]:
        """Events of the whole lines at and after a byte offset that begins a line. Of a pipe: waits for its end."""
        with self.path.open("rb") as file:
            reader = LineReader(file, offset)
            more = True
            while more:
                more = self.growing  # asked before reading: what came before the end is read
                yield from self._present(reader)
                if more:
                    time.sleep(POLL_S)
            self._tail_bytes = file.seek(0, 2) - last_newline(file)

    async def follow(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> AsyncIterator[AnyEvent]:
        """Every event, and those still being written, until `end` (of a pipe: its end). Waits with `sleep`."""
        self._start_over()
        with self.path.open("rb") as file:
            reader = LineReader(file)
            while True:
                more = self.growing or self._source.spool is None
                for event in self._present(reader):
                    yield event
                if not more or self._ended:
                    return
                await sleep(POLL_S)

    def _present(self, reader: LineReader) -> Iterator[AnyEvent]:
        while (found := reader.next()) is not None:
            event = self.decode(found[1])
            if event is not None:
                yield event

    def decode(self, line: bytes) -> AnyEvent | None:
        """One line's event; None for blank lines, comments and what is no event (counted)."""
        line = line.strip(PADDING)
        if not line or line[:1] == b"#":
            return None
        try:
            event = codec.decode(line)
        except codec.CodecError:
            self._bad_lines += 1
            return None
        self._after_end += self._ended
        if isinstance(event, End):
            self._ended = True
        elif isinstance(event, Mark) and event.code in _LOSSES:
            self._losses += 1
        return event

    @property
    def problems(self) -> list[str]:
        """What a reader should know of what has been read: damage, an unfinished recording, a newer version."""
        found = []
        spool = self._source.spool
        if self.header.schema > SCHEMA:
            newer = _dotted(self.header.schema)
            found.append(f"written by a newer lpxtop (schema {newer}); unknown parts are left out")
        if self._source.torn:
            found.append("the packed file is torn or damaged; read as far as it could be unpacked")
        if spool is not None and spool.error is not None:
            found.append(f"the stream could not be kept any longer: {spool.error}")
        if self._bad_lines:
            found.append(f"{self._bad_lines} damaged line{'s' if self._bad_lines > 1 else ''} left out")
        if self._tail_bytes:
            found.append(f"the last line is torn ({self._tail_bytes} bytes left out)")
        if self._losses:
            places = f"{self._losses} place{'s' if self._losses > 1 else ''}"
            found.append(
                f"events are missing in {places}, as its marks say: the disk was too slow, or recording was off"
            )
        if self._after_end:
            found.append("there are events after its end: several recordings in one file are read as one session")
        if not self._ended:
            found.append("the recording has no end: it was cut off, or is still being written")
        return found

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def last_t(self) -> int:
        """The latest time in the last whole lines, µs; read from the tail alone."""
        with self.path.open("rb") as file:
            for reach in (TAIL_BYTES, 16 * TAIL_BYTES, 2 * LINE_BYTES):
                whole, is_all = tail(file, reach)
                latest = max(_times(whole), default=None)
                if latest is not None or is_all:
                    return self.header.t if latest is None else latest
            return max(_times(line for _, line in lines(file)), default=self.header.t)


def read_header(path: Path) -> Header:
    """The header alone, of a plain or packed file; nothing else is read. Raises RecordingError."""
    try:
        with open_stream(path) as file:
            header = _header_in(file, str(path))
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror or error}") from None
    except damage():
        raise RecordingError(f"{path} is packed and damaged") from None
    if header is None:
        raise RecordingError(f"{path} holds no whole line")
    return header


def _times(whole: Iterator[bytes] | list[bytes]) -> Iterator[int]:
    for line in whole:
        try:
            yield codec.decode(line.strip(PADDING)).t
        except codec.CodecError:
            continue


def _first_header(source: Input, name: str) -> Header:
    """Of a pipe: waits for the first line, as long as the other side takes (it may be asking for a password)."""
    while True:
        more = source.spool is not None and not source.spool.done
        with source.path.open("rb") as file:
            header = _header_in(file, name)
            if header is not None:
                return header
            size = file.seek(0, 2)
        if not more:
            what = "is empty" if size == 0 else "holds no whole line"
            raise RecordingError(f"{name} {what}", "it is not a recording, or nothing had been written yet")
        time.sleep(POLL_S)


def _header_in(file: BinaryIO, name: str) -> Header | None:
    """The header; None when there is no whole line yet. Raises RecordingError when the first line is another."""
    for _, raw in lines(file):
        line = raw.strip(PADDING)
        if line and line[:1] != b"#":
            return _header_of(line, name)
    return None


def _header_of(line: bytes, name: str) -> Header:
    if line.startswith((GZIP, ZSTD)):
        raise RecordingError(f"{name} is packed", "unpack it on the way: zcat FILE | lpxtop replay -")
    try:
        event = codec.decode(line)
    except codec.CodecError:
        raise RecordingError(f"{name} is not a recording", "recordings are the files that lpxtop run writes") from None
    schema = event.raw.get("schema") if isinstance(event, Unknown) and event.k == "header" else None
    if isinstance(event, Header):
        schema = event.schema
    if isinstance(schema, tuple | list) and schema and schema[0] != SCHEMA[0]:
        raise RecordingError(
            f"{name} has schema {_dotted(schema)}; this lpxtop reads {SCHEMA[0]}.x",
            "use the lpxtop that wrote it, or a newer one",
        )
    if not isinstance(event, Header):
        raise RecordingError(f"{name} is not a recording: its first line is no header")
    return event


def _dotted(schema: tuple[int, ...] | list[int]) -> str:
    return ".".join(map(str, schema))
