"""The way out of a load process: lines to a pipe, written by a thread of their own, so that a slow reader never stalls
the loop. Beyond a backlog the droppable lines are dropped and counted. Must not know what a line means.
"""

import os
import threading
from collections import deque

LIMIT_BYTES = 64 * 1024 * 1024


class Outlet:
    """Queues lines for a file descriptor. `broken` is set when nobody reads any more."""

    def __init__(self, descriptor: int, limit: int = LIMIT_BYTES) -> None:
        self._descriptor, self._limit = descriptor, limit
        self._lines: deque[bytes] = deque()
        self._waiting = threading.Condition()
        self._closing = False
        self.backlog_bytes = 0
        self.dropped = 0
        self.broken = False
        self._thread = threading.Thread(target=self._write_all, name="events out", daemon=True)
        self._thread.start()

    def write(self, line: bytes, *, droppable: bool = False) -> None:
        """Queue a line. Returns at once."""
        with self._waiting:
            if self.broken or (droppable and self.backlog_bytes + len(line) > self._limit):
                self.dropped += 1
                return
            self._lines.append(line)
            self.backlog_bytes += len(line)
            self._waiting.notify()

    def close(self, timeout_s: float) -> None:
        """Wait until everything is written, but not for ever on a reader that is stuck."""
        with self._waiting:
            self._closing = True
            self._waiting.notify()
        self._thread.join(timeout_s)

    def _write_all(self) -> None:
        while (batch := self._take()) is not None:
            try:
                view = memoryview(batch)
                while view:
                    view = view[os.write(self._descriptor, view) :]
            except OSError:
                self.broken = True
                return
            with self._waiting:
                self.backlog_bytes -= len(batch)

    def _take(self) -> bytes | None:
        """About 64 KiB of what is queued; None when there will be nothing more."""
        with self._waiting:
            while not self._lines:
                if self._closing:
                    return None
                self._waiting.wait()
            batch = [self._lines.popleft()]
            size = len(batch[0])
            while self._lines and size < 65536:
                batch.append(self._lines.popleft())
                size += len(batch[-1])
        return b"".join(batch)
