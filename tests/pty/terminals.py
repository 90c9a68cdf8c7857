"""A real pseudo-terminal with a program on it: send keys and signals, read the screen back, look at what is left."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pyte

SCRIPT = Path(__file__).parent / "screen_script.py"


class Terminal:
    """`screen` is what a person would see, `raw` every byte that was sent."""

    def __init__(self, *arguments: str, size=(80, 24), env=None, stdin=None, stdout=None, ignore=(), program=None):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        self.screen = pyte.Screen(*size)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLORTERM", "COLUMNS", "LINES")}
        environment = {**clean, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **(env or {})}

        def as_from_a_shell() -> None:
            """Whatever the tests themselves were started with (nohup, a background job) is not passed on."""
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN if number in ignore else signal.SIG_DFL)

        self.process = subprocess.Popen(
            [sys.executable, str(program or SCRIPT), *arguments],
            stdin=slave if stdin is None else stdin,
            stdout=slave if stdout is None else stdout,
            stderr=slave,
            env=environment,
            start_new_session=True,
            preexec_fn=as_from_a_shell,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for descriptor in (self.master, self._slave):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def read(self, seconds: float = 0.05) -> bytes:
        """What the program sends within a time."""
        got = b""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if not select.select([self.master], [], [], left)[0]:
                break
            try:
                data = os.read(self.master, 65536)
            except OSError:
                break
            if not data:
                break
            got += data
        self.raw += got
        # pyte does not know the "private" form of XTVERSION-like queries; what it cannot parse it must not see
        self._stream.feed(got.replace(b"\x1b[>25u", b"").replace(b"\x1b[<u", b""))
        return got

    def until(self, text: str, seconds: float = 8.0) -> str:
        """Read until the screen shows a text."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.read(0.05)
            if text in self.text():
                return self.text()
        raise AssertionError(f"{text!r} did not appear in {seconds} s:\n{self.text()}")

    def text(self) -> str:
        return "\n".join(self.screen.display)

    def keys(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 8.0) -> int:
        """The exit code, with everything read that was sent until then."""
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < end, f"still running after {seconds} s:\n{self.text()}"
            self.read(0.02)
        self.read(0.05)
        return self.process.returncode

    def restored(self) -> bool:
        """Whether the terminal is as it was: echo, lines, the normal screen, a visible cursor, no mouse."""
        now = termios.tcgetattr(self._slave)
        cooked = now[3] & termios.ECHO and now[3] & termios.ICANON and now[:4] == self.before[:4]
        left = self.raw.rfind(b"\x1b[?1049l") > self.raw.rfind(b"\x1b[?1049h")
        cursor = self.raw.rfind(b"\x1b[?25h") > self.raw.rfind(b"\x1b[?25l")
        mouse = self.raw.rfind(b"\x1b[?1003h") <= self.raw.rfind(b"\x1b[?1003l")
        return bool(cooked and left and cursor and mouse)
