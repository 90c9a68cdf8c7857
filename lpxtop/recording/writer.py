"""Writes recordings. The only code that opens one for writing. Must never block, stop or change the session.

Whole lines only, flushed within 250 ms, 0600, never over an existing file. When the disk says no, the file is cut
back to its last whole line, recording stops with a reason, and the run goes on.
"""

import asyncio
import contextlib
import datetime
import errno
import os
import re
import threading
from collections import deque
from pathlib import Path
from typing import Any

import aiofiles
import msgspec

from lpxtop.errors import UsageError
from lpxtop.events import codec
from lpxtop.events.records import AnyEvent, Arrivals, Header, Keyframe, Mark

FLUSH_S = 0.25
SYNC_S = 10.0
QUEUE_BYTES = 8 << 20
PIPE_BYTES = 64 << 20
CLOSE_S = 5.0


def default_path(directory: Path, wall_ns: int, label: str) -> Path:
    """A fresh name in `directory` (made 0700): time in UTC, then what was loaded."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(
            f"recordings go to {directory}, which cannot be made: {error.strerror}", "use --record FILE or --no-record"
        ) from None
    stamp = datetime.datetime.fromtimestamp(wall_ns / 1e9, datetime.UTC).strftime("%Y-%m-%dT%H-%M-%S")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", label.rpartition("/")[2]).strip("-.")[:40] or "session"
    path = directory / f"{stamp}-{name}.lpx.jsonl"
    number = 2
    while path.exists():
        path = directory / f"{stamp}-{name}-{number}.lpx.jsonl"
        number += 1
    return path


class RecordingWriter:
    """An event sink that is a file. Make one with `create`."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path, self._file = path, file
        self._queue: deque[bytes] = deque()
        self._queued = 0  # bytes waiting
        self._offset = 0  # of the next line to be queued
        self._good = 0  # bytes of whole lines that are in the file
        self._last_keyframe: int | None = None
        self._dropped = 0
        self._error: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    @classmethod
    async def create(cls, path: Path, header: Header) -> "RecordingWriter":
        """Open a new file, write the header and sync it. Raises UsageError when that is impossible."""

        def opener(name: str, _flags: int) -> int:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
            return os.open(name, flags | getattr(os, "O_CLOEXEC", 0), 0o600)

        try:
            file = await aiofiles.open(path, "ab", buffering=0, opener=opener)
            writer = cls(path, file)
            writer.event(header)
            await writer._drain()
            await writer._sync()
        except FileExistsError:
            raise UsageError(f"the recording {path} exists", "lpxtop never overwrites; choose another name") from None
        except OSError as error:
            raise UsageError(
                f"the recording {path} cannot be written: {error.strerror}", "use --record FILE or --no-record"
            ) from None
        writer._task = asyncio.create_task(writer._run())
        return writer

    # --- the sink ----------------------------------------------------------------------------------------------

    def event(self, event: AnyEvent) -> None:
        """Queue one line. When the disk cannot keep up, `arrivals` are dropped and counted, nothing else."""
        if self._error is not None or self._closing.is_set():
            return
        if isinstance(event, Arrivals) and self._queued > QUEUE_BYTES:
            self._dropped += 1
            return
        if isinstance(event, Keyframe):
            event = msgspec.structs.replace(event, offset=self._offset, prev=self._last_keyframe)
            self._last_keyframe = self._offset
        elif self._dropped and not isinstance(event, Arrivals) and self._queued < QUEUE_BYTES // 2:
            self._note_dropped(event.t)
        self._append(codec.encode(event))

    def _note_dropped(self, t: int) -> None:
        text = f"{self._dropped} frames of arrivals were not recorded: the disk was too slow"
        self._dropped = 0
        self._append(codec.encode(Mark(t=t, text=text, level="warn", code="arrivals_dropped")))

    def _append(self, line: bytes) -> None:
        self._queue.append(line)
        self._queued += len(line)
        self._offset += len(line)

    async def close(self) -> None:
        """Write what is queued, sync, close."""
        self._closing.set()
        if self._task is not None:
            await self._task
        with contextlib.suppress(OSError):
            await self._file.close()

    def status(self) -> tuple[str, Path, int, str | None]:
        """(on or failed, path, bytes, reason)."""
        return ("on" if self._error is None else "failed"), self._path, self._good, self._error

    # --- the disk ----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        last_sync = asyncio.get_running_loop().time()
        while self._error is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), FLUSH_S)
            closing = self._closing.is_set()
            try:
                await self._drain()
                if closing or asyncio.get_running_loop().time() - last_sync >= SYNC_S:
                    await self._sync()
                    last_sync = asyncio.get_running_loop().time()
            except (OSError, ValueError) as error:
                await self._fail(error)
            if closing and not self._queue:
                return

    async def _drain(self) -> None:
        while self._queue:
            block = b"".join(self._queue)
            self._queue.clear()
            self._queued = 0
            rest = memoryview(block)
            while rest:
                written = await self._file.write(rest)
                rest = rest[written:]
            self._good += len(block)
        if not self._path.exists():
            raise FileNotFoundError(errno.ENOENT, "the file or its directory is gone")

    async def _sync(self) -> None:
        await asyncio.to_thread(getattr(os, "fdatasync", os.fsync), self._file.fileno())

    async def _fail(self, error: Exception) -> None:
        """Keep what is whole, say why, let the run go on."""
        self._error = (error.strerror if isinstance(error, OSError) else None) or str(error)
        self._queue.clear()
        self._queued = 0
        with contextlib.suppress(OSError, ValueError):
            size = os.fstat(self._file.fileno()).st_size
            keep = self._good + _whole_lines(self._path, self._good, size)
            await asyncio.to_thread(os.truncate, self._path, keep)
            self._good = keep


def _whole_lines(path: Path, start: int, size: int) -> int:
    """Bytes of whole lines after `start`."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size - start).rfind(b"\n") + 1


class LineSink:
    """Event lines to a descriptor (a pipe, a terminal, a file), by a thread: a reader that stalls stalls nobody."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._wake = threading.Condition()
        self._closed = False
        self.error: str | None = None
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
        self._thread.start()

    def event(self, event: AnyEvent) -> None:
        """Queue one line; beyond 64 MiB of backlog `arrivals` are dropped and counted."""
        if self.error is not None:
            return
        if isinstance(event, Arrivals) and self._queued > PIPE_BYTES:
            self.dropped += 1
            return
        line = codec.encode(event)
        with self._wake:
            self._queue.append(line)
            self._queued += len(line)
            self._wake.notify()

    async def close(self) -> None:
        """Give the reader a few seconds to take the rest."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closed:
                    self._wake.wait()
                if not self._queue:
                    return
                block = b"".join(self._queue)
                self._queue.clear()
                self._queued = 0
            try:
                rest = memoryview(block)
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                self.error = error.strerror or str(error)
                return
