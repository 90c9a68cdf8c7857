"""Reads recordings: streaming, tolerant of damage, memory independent of size. Must not write or change the original.

A torn last line, bad lines and runs of NUL are counted and left out; what is whole is read. Another major schema is
refused; a newer minor is read as far as it is understood.
"""

import contextlib
import gzip
import io
import os
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from lpxtop.errors import RecordingError
from lpxtop.events import codec
from lpxtop.events.records import SCHEMA, AnyEvent, Header, Unknown

BLOCK = 1 << 20
LINE_BYTES = 16 << 20
TAIL_BYTES = 1 << 18
_PADDING = b"\0 \t\r"


class Recording:
    """An open recording. `header` is its first event; `problems` says what was wrong with what has been read so far."""

    def __init__(self, path: Path, header: Header, *, name: str, growing: bool = False) -> None:
        self.path, self.header, self.name = path, header, name
        self.growing = growing  # still being written by us: a pipe that is spooled
        self._bad_lines = 0
        self._tail_bytes = 0
        self._after_end = 0
        self._ended = False
        major, minor = header.schema
        self._newer = (major, minor) > SCHEMA

    @classmethod
    def open(cls, path: str) -> "Recording":
        """Open a file, or `-` for stdin. Raises RecordingError, saying why, for what cannot be read."""
        if path == "-":
            where, growing = spool(os.dup(sys.stdin.fileno())), True
        else:
            where, growing = _plain_file(Path(path)), False
        name = "stdin" if path == "-" else path
        return cls(where, _read_header(where, name, wait=growing), name=name, growing=growing)

    def __iter__(self) -> Iterator[AnyEvent]:
        """Every event, the header first, in file order."""
        self._bad_lines = self._tail_bytes = self._after_end = 0
        self._ended = False
        return self.events_from(0)

    def events_from(self, offset: int) -> Iterator[AnyEvent]:
        """Events of the whole lines at and after a byte offset that begins a line."""
        with self.path.open("rb") as file:
            for _, line in lines(file, offset):
                event = self.decode(line)
                if event is not None:
                    yield event
            self._tail_bytes = file.seek(0, os.SEEK_END) - _last_newline(file)

    def decode(self, line: bytes) -> AnyEvent | None:
        """One line's event; None for blank lines, comments and what is no event (counted)."""
        line = line.strip(_PADDING)
        if not line or line[:1] == b"#":
            return None
        try:
            event = codec.decode(line)
        except codec.CodecError:
            self._bad_lines += 1
            return None
        self._after_end += self._ended
        if line.startswith(b'{"k":"end"'):
            self._ended = True
        return event

    @property
    def problems(self) -> list[str]:
        """What a reader should know of what has been read: damage, an unfinished recording, a newer version."""
        found = []
        if self._newer:
            found.append(
                f"written by a newer lpxtop (schema {_dotted(self.header.schema)}); unknown parts are left out"
            )
        if self._bad_lines:
            found.append(f"{self._bad_lines} damaged line{'s' if self._bad_lines > 1 else ''} left out")
        if self._tail_bytes:
            found.append(f"the last line is torn ({self._tail_bytes} bytes left out)")
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
            size = file.seek(0, os.SEEK_END)
            reach = TAIL_BYTES
            while True:
                start = max(0, size - reach)
                file.seek(start)
                tail = file.read(size - start)
                whole = tail[: tail.rfind(b"\n") + 1].splitlines()[0 if start == 0 else 1 :]
                times = [event.t for event in map(self._quietly, whole) if event is not None]
                if times or start == 0:
                    return max(times, default=self.header.t)
                reach *= 4

    @staticmethod
    def _quietly(line: bytes) -> AnyEvent | None:
        try:
            return codec.decode(line.strip(_PADDING))
        except codec.CodecError:
            return None


def lines(file: BinaryIO, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of every whole line from `offset` on. A line beyond 16 MiB comes out as one that is no event."""
    file.seek(offset)
    rest = b""
    start = offset
    swallowed = 0
    while block := file.read(BLOCK):
        pieces = (rest + block).split(b"\n") if rest else block.split(b"\n")
        rest = pieces.pop()
        for piece in pieces:
            yield start, (b"oversize" if swallowed else piece)
            start += len(piece) + swallowed + 1
            swallowed = 0
        if len(rest) > LINE_BYTES:
            swallowed += len(rest)
            rest = b""


def _last_newline(file: BinaryIO) -> int:
    """Offset just behind the last LF."""
    size = file.seek(0, os.SEEK_END)
    position = size
    while position > 0:
        step = min(BLOCK, position)
        position -= step
        file.seek(position)
        found = file.read(step).rfind(b"\n")
        if found >= 0:
            return position + found + 1
    return 0


def _read_header(path: Path, name: str, *, wait: bool) -> Header:
    import time

    deadline = time.monotonic() + 10.0
    while True:
        with path.open("rb") as file:
            for _, raw in lines(file):
                line = raw.strip(_PADDING)
                if line and line[:1] != b"#":
                    return _header_of(line, name)
            size = file.seek(0, os.SEEK_END)
        if not wait or time.monotonic() > deadline:
            what = "is empty" if size == 0 else "holds no whole line"
            raise RecordingError(f"{name} {what}", "it is not a recording, or nothing had been written yet")
        time.sleep(0.05)


def _header_of(line: bytes, name: str) -> Header:
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


# --- files that are not plain, and pipes ---------------------------------------------------------------------------


def _plain_file(path: Path) -> Path:
    """The file itself, or an unpacked temporary copy of a .gz or .zst."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
            if magic[:2] == b"\x1f\x8b":
                return _unpacked(gzip.GzipFile(path))
            if magic == b"\x28\xb5\x2f\xfd":
                return _unpacked(_zstd(path))
    except FileNotFoundError:
        raise RecordingError(f"there is no file {path}", "lpxtop replay lists the recordings there are") from None
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror or error}") from None
    return path


def _zstd(path: Path) -> io.BufferedIOBase:
    try:
        import zstandard
    except ImportError:
        raise RecordingError(f"{path} is packed with zstd", "pip install 'lpxtop[zstd]'") from None
    frames = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True)
    return cast(io.BufferedIOBase, frames)


def _unpacked(source: io.BufferedIOBase) -> Path:
    """Everything that can be unpacked; a torn end is left out."""
    target = _temporary()
    with target.open("wb") as file, source, contextlib.suppress(EOFError, zlib.error, gzip.BadGzipFile):
        while block := source.read1(1 << 16):  # what is there, before a torn end raises
            file.write(block)
    return target


def _temporary() -> Path:
    """A private file that is removed at exit."""
    import atexit

    descriptor, name = tempfile.mkstemp(prefix="lpxtop-", suffix=".jsonl")
    os.close(descriptor)
    path = Path(name)
    atexit.register(path.unlink, missing_ok=True)
    return path


def spool(descriptor: int) -> Path:
    """Copy a pipe into a private file as it comes, by a thread: so that it can be sought in like any recording."""
    target = _temporary()

    def copy() -> None:
        with (
            os.fdopen(descriptor, "rb", buffering=0) as source,
            target.open("wb", buffering=0) as file,
            contextlib.suppress(OSError),
        ):
            while block := source.read(1 << 16):
                file.write(block)

    threading.Thread(target=copy, name="spool", daemon=True).start()
    return target
