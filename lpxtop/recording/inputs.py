"""Makes a plain file of whatever a recording comes as: a file, a packed file, a pipe. Must not decode events.

A pipe is copied into a private temporary file as it comes, so that it can be sought in like any other; a packed file
is unpacked as far as it can be. Temporary files go when the process does.
"""

import atexit
import contextlib
import gzip
import io
import os
import stat
import sys
import tempfile
import threading
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from lpxtop.errors import RecordingError

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
COPY_BYTES = 1 << 16


class Spool:
    """A pipe on its way into the file `path`. `done` once its other end was closed; `error` when the copy failed."""

    def __init__(self, descriptor: int) -> None:
        self.path = _temporary()
        self.error: str | None = None
        self._thread = threading.Thread(target=self._copy, args=(descriptor,), name="spool", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def _copy(self, descriptor: int) -> None:
        try:
            with os.fdopen(descriptor, "rb", buffering=0) as source, self.path.open("wb", buffering=0) as file:
                while block := source.read(COPY_BYTES):
                    rest = memoryview(block)
                    while rest:
                        rest = rest[file.write(rest) or 0 :]
        except OSError as error:
            self.error = error.strerror or str(error)


class Input:
    """`path` is a plain file that can be sought in. `spool` while it comes through a pipe; `torn` when it was packed
    and could not be unpacked to its end."""

    def __init__(self, path: Path, spool: Spool | None = None, *, torn: bool = False) -> None:
        self.path, self.spool, self.torn = path, spool, torn


def open_input(path: str) -> Input:
    """A file's name, or `-` for stdin. Raises RecordingError, saying why, for what cannot be read."""
    if path == "-":
        return _standard_input()
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISFIFO(mode):
            spool = Spool(os.open(path, os.O_RDONLY))
            return Input(spool.path, spool)
        if stat.S_ISDIR(mode):
            raise RecordingError(f"{path} is a directory, it cannot be read as a recording", f"ls {path}")
        if not stat.S_ISREG(mode):
            raise RecordingError(f"{path} cannot be read as a recording: it is neither a file nor a pipe")
        source = _unpacker(Path(path))
        return Input(Path(path)) if source is None else _unpacked(source, path)
    except FileNotFoundError:
        raise RecordingError(f"there is no file {path}", "lpxtop replay lists the recordings there are") from None
    except OSError as error:
        raise RecordingError(f"{path} cannot be read: {error.strerror or error}") from None


def open_stream(path: Path) -> BinaryIO:
    """The bytes of a plain or packed file from the beginning, for whoever needs only those. Raises as `open_input`."""
    source = _unpacker(path)
    return path.open("rb") if source is None else cast(BinaryIO, source)


def _standard_input() -> Input:
    if sys.stdin is None or sys.stdin.isatty():
        raise RecordingError("stdin is no recording", "ssh NODE 'lpxtop run … --headless --out -' | lpxtop replay -")
    spool = Spool(os.dup(sys.stdin.fileno()))
    return Input(spool.path, spool)


def _unpacker(path: Path) -> io.BufferedIOBase | None:
    """A stream that unpacks the file, by what it begins with; None for a plain one."""
    with path.open("rb") as file:
        magic = file.read(4)
    if magic[:2] == GZIP:
        return gzip.GzipFile(path)
    return _zstd(path) if magic == ZSTD else None


def _zstd(path: Path) -> io.BufferedIOBase:
    try:
        import zstandard
    except ImportError:
        raise RecordingError(f"{path} is packed with zstd", "pip install 'lpxtop[zstd]'") from None
    frames = zstandard.ZstdDecompressor().stream_reader(path.open("rb"), read_across_frames=True)
    return cast(io.BufferedIOBase, frames)


def damage() -> tuple[type[Exception], ...]:
    """What unpacking raises for a torn or damaged file."""
    zstandard = sys.modules.get("zstandard")
    return (EOFError, zlib.error, gzip.BadGzipFile, *((zstandard.ZstdError,) if zstandard else ()))


def _unpacked(source: io.BufferedIOBase, name: str) -> Input:
    """Everything that can be unpacked."""
    target, torn = _temporary(), False
    with target.open("wb") as file, source:
        while True:
            try:
                block = source.read1(COPY_BYTES)  # what is there, before a torn end raises
            except damage():
                torn = True
                break
            if not block:
                break
            try:
                file.write(block)
            except OSError as error:
                what = f"{name} cannot be unpacked into {target.parent}: {error.strerror}"
                raise RecordingError(what, "set TMPDIR to a directory with more room") from None
    return Input(target, torn=torn)


def _temporary() -> Path:
    """A private file that is removed at exit."""
    descriptor, name = tempfile.mkstemp(prefix="lpxtop-", suffix=".jsonl")
    os.close(descriptor)
    atexit.register(_remove, name)
    return Path(name)


def _remove(name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name)
