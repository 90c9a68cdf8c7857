"""The terminal's safety: refuse where a screen cannot be, take keys and error output apart, give everything back.

Used before and after Textual and imports none of it. Reads the terminal's own variables (TERM, NO_COLOR) and no other.
Must not draw.
"""

import codecs
import contextlib
import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TextIO

from lpxtop import format
from lpxtop.errors import UsageError

HEADLESS = "use --headless to run without a screen"
LOG_LINES = 20
_LEAVE = b"\x1b[?2004l\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[<u\x1b[?1049l\x1b[?25h\x1b[?1004l\x1b[?7h"


def check_terminal() -> None:
    """Raises UsageError (one line) when there is no terminal that a screen can be drawn on."""
    if sys.__stderr__ is None or not sys.__stderr__.isatty():
        raise UsageError(f"the screen needs a terminal, and stderr is none; {HEADLESS}")
    if not _stdin_is_tty() and not _can_open_tty():
        raise UsageError(f"the screen needs a keyboard: stdin is no terminal and there is no /dev/tty; {HEADLESS}")
    term = os.environ.get("TERM", "")
    if term in ("", "dumb", "unknown"):
        raise UsageError(f"TERM is {term or 'not set'}: this terminal cannot show a screen; set TERM, or {HEADLESS}")
    encoding = sys.__stderr__.encoding or "ascii"
    if codecs.lookup(encoding).name != "utf-8":
        raise UsageError(f"the terminal's encoding is {encoding}, not UTF-8; set LC_ALL=C.UTF-8, or {HEADLESS}")


def _stdin_is_tty() -> bool:
    return sys.__stdin__ is not None and not sys.__stdin__.closed and sys.__stdin__.isatty()


def _can_open_tty() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def color_of(choice: str) -> str:
    """`auto` becomes `mono` when NO_COLOR is set (to anything but nothing); other choices stand."""
    return "mono" if choice == "auto" and os.environ.get("NO_COLOR") else choice


def glyphs_of(choice: str) -> str:
    """`auto` becomes blocks on a console whose font has no braille, braille elsewhere."""
    if choice != "auto":
        return choice
    return "block" if os.environ.get("TERM", "") in ("linux", "cons25", "vt220", "vt100") else "braille"


class Log:
    """Where fd 2 goes while the screen is up: a file, or memory of the last lines."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file: IO[bytes] = tempfile.TemporaryFile() if path is None else path.open("ab")  # noqa: SIM115 - lives on

    def fileno(self) -> int:
        return self._file.fileno()

    def lines(self) -> list[str]:
        """The last lines written, cleaned for a terminal; of a named file none (it is there to be read)."""
        if self.path is not None:
            return []
        self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, self._file.tell() - 16_384))
        return [format.clean(line) for line in self._file.read().decode("utf-8", "replace").splitlines()][-LOG_LINES:]

    def close(self) -> None:
        self._file.close()


@contextlib.contextmanager
def own_terminal(log: Path | None = None) -> Iterator[None]:
    """For the time of the screen: what is written to fd 2 goes to the log, Textual draws on a descriptor of its own,
    keys come from /dev/tty when stdin is a pipe. Afterwards the terminal is as it was, whatever happened, and what was
    logged is printed.
    """
    kept = Log(log)
    stdin: Any = sys.__stdin__
    stderr: Any = sys.__stderr__
    screen = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace")
    keys: Any = _keyboard()
    before = _attributes(keys.fileno())
    sys.stderr.flush()
    _set_streams(screen, keys)
    os.dup2(kept.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(screen.fileno(), 2)
        _set_streams(stderr, stdin)
        _give_back(keys.fileno(), before)
        _print_log(kept)
        with contextlib.suppress(OSError):
            screen.close()
        if keys is not stdin:
            keys.close()


def _set_streams(stderr: Any, stdin: Any) -> None:
    """What Textual draws on and reads keys from."""
    setattr(sys, "__stderr__", stderr)  # noqa: B010 - final for a type checker, and all that Textual goes by
    setattr(sys, "__stdin__", stdin)  # noqa: B010


def _print_log(kept: Log) -> None:
    lines = kept.lines()
    kept.close()
    with contextlib.suppress(OSError):
        for line in lines:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()


def _keyboard() -> TextIO:
    if _stdin_is_tty():
        assert sys.__stdin__ is not None
        return sys.__stdin__
    return open("/dev/tty", encoding="utf-8", errors="replace")


def _attributes(descriptor: int) -> list[Any] | None:
    """termios settings, None where there are none."""
    try:
        import termios

        return termios.tcgetattr(descriptor)
    except (ImportError, OSError):
        return None
    except Exception as error:  # termios.error is no OSError
        if type(error).__name__ == "error":
            return None
        raise


def _give_back(descriptor: int, before: list[Any] | None) -> None:
    """Put the terminal back if the screen did not: cooked, normal screen, cursor, no mouse, no paste marks."""
    if before is None:
        return
    now = _attributes(descriptor)
    if now is None or now[:4] == before[:4]:
        return
    import termios

    with contextlib.suppress(termios.error):
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0.5)[1]:
            os.write(2, _LEAVE)


@contextlib.contextmanager
def on_signals(loop: Any, handler: Callable[[int], None]) -> Iterator[None]:
    """Call `handler(number)` in the loop for SIGTERM, SIGHUP, SIGINT and SIGQUIT, except for those that are ignored."""
    names = ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    wanted = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    added: list[int] = []
    try:
        for number in wanted:
            with contextlib.suppress(NotImplementedError):  # Windows' loops
                loop.add_signal_handler(number, handler, number)
                added.append(number)
        yield
    finally:
        for number in added:
            loop.remove_signal_handler(number)
