"""The error tree and the exit codes. Must not print, log or import anything of lpxtop.

    LpxtopError                one or two lines for a person: what, where, what to do
    ├── UsageError        2    bad flags, a URL without a scheme, a mistake in a file the user wrote
    ├── RecordingError    2    an input recording cannot be read
    └── TargetError       3    the endpoint is not usable: unreachable, key refused, model unknown

A failed request is never an exception; it is a `finished` event with an outcome.
"""

EXIT_OK = 0
EXIT_GATE_FAILED = 1
EXIT_USAGE = 2
EXIT_TARGET = 3
EXIT_INTERRUPTED = 130


class LpxtopError(Exception):
    """Something a person must act on. `str(error)` is what happened and where; `hint` is what to do."""

    exit_code = EXIT_USAGE

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.hint = hint

    def lines(self) -> list[str]:
        """The one or two lines shown on stderr."""
        return [f"lpxtop: {self}", *([f"  {self.hint}"] if self.hint else [])]


class UsageError(LpxtopError):
    """The command, a flag, the environment or a file the user wrote is wrong."""


class RecordingError(LpxtopError):
    """A recording cannot be read: missing, empty, not a recording, another major schema."""


class TargetError(LpxtopError):
    """The endpoint cannot be used; no load was sent."""

    exit_code = EXIT_TARGET
