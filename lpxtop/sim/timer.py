"""Waits that end when they should. asyncio's selector sleeps in whole milliseconds, half a step of a fast engine.

On Linux a timerfd wakes the loop (within some 0.1 ms on an idle machine); elsewhere it is asyncio's own sleep.
"""

import asyncio
import ctypes
import os
import time
from collections.abc import Callable

_CLOCK_MONOTONIC = 1  # the clock of time.monotonic()
_NONBLOCK, _CLOEXEC, _ABSOLUTE = getattr(os, "O_NONBLOCK", 0), getattr(os, "O_CLOEXEC", 0), 1


class _Time(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Time), ("value", _Time))


class StepTimer:
    """One waiter at a time. To be made and closed inside the running loop that it wakes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd, self._arm = _timer()
        self._rings: asyncio.Future[None] | None = None
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._expired)

    async def until(self, deadline_s: float) -> None:
        """Return at `deadline_s` of time.monotonic(), or, if that has passed, after giving way once."""
        left = deadline_s - time.monotonic()
        if left <= 0 or self._fd < 0:
            await asyncio.sleep(left)
            return
        self._rings = self._loop.create_future()
        whole = int(deadline_s)
        due = _Setting(_Time(0, 0), _Time(whole, int((deadline_s - whole) * 1e9)))
        self._arm(self._fd, _ABSOLUTE, ctypes.byref(due), None)
        await self._rings

    def _expired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:  # armed anew since it rang
            return
        if self._rings is not None and not self._rings.done():
            self._rings.set_result(None)

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


def _timer() -> tuple[int, Callable[..., int]]:
    """A timer's descriptor and the call that arms it; the descriptor is -1 where there is none (macOS, a sandbox)."""
    try:
        libc = ctypes.CDLL(None)
        return libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK | _CLOEXEC), libc.timerfd_settime
    except (OSError, AttributeError, TypeError):
        return -1, _never


def _never(*_: object) -> int:
    return -1
