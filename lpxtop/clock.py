"""Clocks. The only module that reads the time for the product's own use; tests inject a `ManualClock`.

Session time is integer microseconds since the session's origin, a reading of the monotonic clock. Wall time
appears once, in the header. Must not sleep.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Where "now" comes from, in nanoseconds."""

    def monotonic_ns(self) -> int: ...

    def wall_ns(self) -> int: ...


class SystemClock:
    """The machine's clocks."""

    monotonic_ns = staticmethod(time.monotonic_ns)
    wall_ns = staticmethod(time.time_ns)


class ManualClock:
    """A clock that moves only when told, for tests."""

    def __init__(self, monotonic_ns: int = 1_000_000_000, wall_ns: int = 1_800_000_000_000_000_000) -> None:
        self._monotonic_ns, self._wall_ns = monotonic_ns, wall_ns

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def wall_ns(self) -> int:
        return self._wall_ns

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self._monotonic_ns += round(seconds * 1e9)
        self._wall_ns += round(seconds * 1e9)


def session_us(monotonic_ns: int, origin_ns: int) -> int:
    """Session time in µs of a monotonic reading."""
    return (monotonic_ns - origin_ns) // 1000
