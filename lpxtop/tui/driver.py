"""Textual's terminal driver with three faults taken out: a stuck terminal never blocks the event loop, a terminal that
hung up ends the app instead of spinning, and stray bytes on the keyboard are no crash.

Also takes the terminal's size from the terminal itself, so that a piped stdout does not make it 80x24.
"""

import contextlib
import os
import selectors
from codecs import getincrementaldecoder
from queue import Full

from textual._parser import ParseError
from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver

_NEARLY_FULL = 24
_SMALL = 64
CLOSE_S = 2.0


class TerminalDriver(LinuxDriver):
    """`lost` is set when a frame had to be thrown away: everything must be drawn again once there is room."""

    lost = False

    def backlog(self) -> int:
        """Writes the terminal has not taken yet."""
        return 0 if self._writer_thread is None else self._writer_thread._queue.qsize()

    def write(self, data: str) -> None:
        """Queue a write, or throw it away when the terminal does not take any more."""
        writer = self._writer_thread
        if writer is None or not writer.is_alive():
            return
        if len(data) > _SMALL and self.backlog() >= _NEARLY_FULL:
            self.lost = True
            return
        try:
            writer._queue.put_nowait(data)
        except Full:
            self.lost = True

    def close(self) -> None:
        """Give a slow terminal a moment to take what is left, then leave it."""
        writer = self._writer_thread
        if writer is None or not writer.is_alive():
            return
        with contextlib.suppress(Full):
            writer._queue.put(None, timeout=CLOSE_S)
        writer.join(CLOSE_S)

    def _get_terminal_size(self) -> tuple[int, int]:
        for descriptor in (self._file.fileno() if self._file else 2, self.fileno):
            with contextlib.suppress(OSError):
                size = os.get_terminal_size(descriptor)
                if size.columns and size.lines:
                    return size.columns, size.lines
        return super()._get_terminal_size()

    def run_input_thread(self) -> None:
        """Read keys until told to stop; the end of input means that the terminal is gone."""
        parser = XTermParser(self._debug)
        decode = getincrementaldecoder("utf-8")(errors="replace").decode
        with selectors.SelectSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                if selector.select(0.1):
                    data = self._read()
                    if not data:
                        self._loop.call_soon_threadsafe(self._hang_up)
                        break
                    for event in parser.feed(decode(data)):
                        self.process_message(event)
                for event in parser.tick():
                    self.process_message(event)
        with contextlib.suppress(EOFError, ParseError):
            for event in parser.feed(""):
                self.process_message(event)

    def _read(self) -> bytes:
        try:
            return os.read(self.fileno, 4096)
        except OSError:
            return b""

    def _hang_up(self) -> None:
        ended = getattr(self._app, "on_hang_up", None)
        if ended is not None:
            ended()
