"""The slider's target: changes at once on screen, and is asked of the session after a moment of quiet.

Holding `+` gives one change. Must not draw, and must not know Textual: it is told how to wait.
"""

from collections.abc import Callable
from typing import Protocol

from lpxtop.events.stream import RunControl
from lpxtop.metrics.view import LoadView
from lpxtop.tui.look import Look
from lpxtop.tui.panels import slider

QUIET_S = 0.15


class Timer(Protocol):
    """Something that can be called off."""

    def stop(self) -> None: ...


class Dial:
    """Moves a pending target and applies it when no key has come for `QUIET_S`."""

    def __init__(self, control: RunControl, look: Look, wait: Callable[[float, Callable[[], None]], Timer]) -> None:
        self._control, self._look, self._wait = control, look, wait
        self._timer: Timer | None = None
        self._open = False

    def step(self, load: LoadView, steps: int) -> None:
        self.move(load, slider.stepped(load, slider.wanted(load, self._look), steps))

    def scale(self, load: LoadView, factor: float) -> None:
        self.move(load, slider.scaled(load, slider.wanted(load, self._look), factor))

    def move(self, load: LoadView, value: float) -> None:
        """Set the target; it is applied after the quiet time."""
        self._look.pending = value
        self._open = slider.is_open(load)
        if self._timer is not None:
            self._timer.stop()
        self._timer = self._wait(QUIET_S, self.apply)

    def apply(self) -> None:
        """Ask the session for the target now, if there is one waiting."""
        value, self._look.pending = self._look.pending, None
        if self._timer is not None:
            self._timer.stop()
            self._timer = None
        if value is None:
            return
        if self._open:
            self._control.set_rate(value)
        else:
            self._control.set_concurrency(round(value))
