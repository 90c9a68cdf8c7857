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
import select
import threading
from pathlib import Path
from typing import Any

import aiofiles
import msgspec

from lpxtop.errors import UsageError
from lpxtop.events.records import AnyEvent, End, Header, Keyframe, Mark
from lpxtop.recording.backlog import Backlog

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
        self._backlog = Backlog(QUEUE_BYTES)
        self._good = 0  # bytes of whole lines that are in the file
        self._last_keyframe: int | None = None
        self._last_t = 0
        self._paused = False
        self._missed = 0  # events of a pause that no line tells of yet
        self._error: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    @classmethod
    async def create(cls, path: Path, header: Header) -> "RecordingWriter":
        """Open a new file, write the header and sync it. Raises UsageError when that is impossible."""
        try:
            file = await aiofiles.open(path, "ab", buffering=0, opener=_open_new)
        except FileExistsError:
            raise UsageError(f"the recording {path} exists", "lpxtop never overwrites; choose another name") from None
        except OSError as error:
            raise _unusable(path, error) from None
        writer = cls(path, file)
        try:
            writer.event(header)
            await writer._drain()
            await writer._sync()
        except OSError as error:
            await file.close()
            await asyncio.to_thread(path.unlink, missing_ok=True)  # ours, and it holds nothing
            raise _unusable(path, error) from None
        await asyncio.to_thread(_sync_directory, path.parent)
        writer._task = asyncio.create_task(writer._run())
        return writer

    # --- the sink ----------------------------------------------------------------------------------------------

    def event(self, event: AnyEvent) -> None:
        """Queue one line. When the disk cannot keep up, `arrivals` are dropped and counted, nothing that ends a
        request. Never raises, never waits."""
        if self._error is not None or self._closing.is_set():
            return
        if self._paused and not isinstance(event, End):
            self._missed += 1
            return
        if self._missed:
            self._mark_gap(event.t)
        self._last_t = event.t
        if not self._backlog.accepts(event):
            return
        if isinstance(event, Keyframe):
            self._backlog.put_unsaid(event.t)
            offset = self._backlog.end
            event = msgspec.structs.replace(event, offset=offset, prev=self._last_keyframe)
            self._last_keyframe = offset
        self._backlog.put(event)

    def pause(self) -> None:
        """Record nothing until `resume`; only `end` is still written."""
        self._paused = True

    def resume(self) -> None:
        """Record again. The next line says how much was not recorded, and since when; a keyframe should follow soon."""
        self._paused = False

    def _mark_gap(self, t: int) -> None:
        text = f"recording was off for {(t - self._last_t) / 1e6:.1f} s; {self._missed} events are missing"
        self._missed = 0
        self._backlog.put(Mark(t=t, text=text, level="warn", code="recording_gap"))

    async def close(self) -> None:
        """Write what is queued, sync, close."""
        if self._error is None:
            self._backlog.put_unsaid(self._last_t)
        self._closing.set()
        if self._task is not None:
            await self._task
        with contextlib.suppress(OSError):
            await self._file.close()

    def status(self) -> tuple[str, Path, int, str | None]:
        """(on, paused or failed; path; bytes; reason)."""
        state = "failed" if self._error is not None else "paused" if self._paused else "on"
        return state, self._path, self._good, self._error

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
            if closing and not self._backlog:
                return

    async def _drain(self) -> None:
        """Write all whole lines that wait. Raises OSError; `_good` then counts those that are in the file."""
        while self._backlog:
            block = b"".join(self._backlog.take())
            done = 0
            try:
                while done < len(block):
                    done += await self._file.write(memoryview(block)[done:])
            finally:
                self._good += done if done == len(block) else block.rfind(b"\n", 0, done) + 1
        await asyncio.to_thread(_check_place, self._path, self._file.fileno())

    async def _sync(self) -> None:
        await asyncio.to_thread(getattr(os, "fdatasync", os.fsync), self._file.fileno())

    async def _fail(self, error: Exception) -> None:
        """Keep what is whole, say why, let the run go on. The file is cut by its descriptor: at its path there may
        be another one by now."""
        self._error = (error.strerror if isinstance(error, OSError) else None) or str(error)
        self._backlog.take()
        with contextlib.suppress(OSError, ValueError):
            await asyncio.to_thread(os.ftruncate, self._file.fileno(), self._good)


def _open_new(name: str, _flags: int) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    return os.open(name, flags | getattr(os, "O_CLOEXEC", 0), 0o600)


def _unusable(path: Path, error: OSError) -> UsageError:
    reason = error.strerror or str(error)
    return UsageError(f"the recording {path} cannot be written: {reason}", "use --record FILE or --no-record")


def _check_place(path: Path, descriptor: int) -> None:
    """Raises FileNotFoundError when the open file is no longer the one at its path: nobody would find it."""
    try:
        same = os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        same = False
    if not same:
        raise FileNotFoundError(errno.ENOENT, "the file or its directory is gone")


def _sync_directory(directory: Path) -> None:
    """Make the new name last through a power loss, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class LineSink:
    """Event lines to a descriptor (a pipe, a terminal, a file), by a thread: a reader that stalls stalls nobody."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._backlog = Backlog(PIPE_BYTES)
        self._wake = threading.Condition()
        self._closed = False
        self.error: str | None = None
        self._thread = threading.Thread(target=self._run, name="lines", daemon=True)
        self._thread.start()

    def event(self, event: AnyEvent) -> None:
        """Queue one line; beyond 64 MiB of backlog `arrivals` are dropped and counted."""
        if self.error is not None:
            return
        with self._wake:
            if self._backlog.accepts(event):
                self._backlog.put(event)
                self._wake.notify()

    @property
    def dropped(self) -> int:
        """Frames of arrivals left out so far."""
        return self._backlog.dropped

    async def close(self) -> None:
        """Give the reader a few seconds to take the rest."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._backlog and not self._closed:
                    self._wake.wait()
                if not self._backlog:
                    return
                lines = self._backlog.take()
            try:
                _write_all(self._descriptor, b"".join(lines))
            except OSError as error:
                self.error = error.strerror or str(error)
                return


def _write_all(descriptor: int, block: bytes) -> None:
    """Write it however long the other side takes, also where somebody made the descriptor non-blocking."""
    rest = memoryview(block)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            ready = select.poll()
            ready.register(descriptor, select.POLLOUT)
            ready.poll()
