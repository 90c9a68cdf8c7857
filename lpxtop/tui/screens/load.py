"""The live screen of a run that sends load: start, pause, the slider, cancelling. And the one that only watches."""

from typing import ClassVar

from textual import events
from textual.binding import BindingType

from lpxtop import format
from lpxtop.events.stream import RunControl
from lpxtop.tui import keymap
from lpxtop.tui.dial import Dial
from lpxtop.tui.look import Look
from lpxtop.tui.paint import Paint
from lpxtop.tui.panels import slider
from lpxtop.tui.panels.states import RUNNING, ended
from lpxtop.tui.screens.live import LiveScreen, bindings


class WatchScreen(LiveScreen):
    """No load, so no slider."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(keymap.WATCH)
    MODE = keymap.WATCH


class LoadScreen(LiveScreen):
    """Keys and mouse move the target; the session is asked after a moment of quiet."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(keymap.LIVE)
    MODE = keymap.LIVE

    def __init__(self, control: RunControl, look: Look, paint: Paint) -> None:
        super().__init__(control, look, paint)
        self.dial = Dial(control, look, self.set_timer)

    def action_run_or_hold(self) -> None:
        """Start, pause or resume."""
        if ended(self.view):
            return
        self.dial.apply()
        if self.view.phase in RUNNING:
            self.control.pause()
        else:
            self.control.start()
        self.frame()

    def action_step(self, steps: int) -> None:
        self.dial.step(self.view.load, steps)
        self.redraw()

    def action_scale(self, factor: float) -> None:
        self.dial.scale(self.view.load, factor)
        self.redraw()

    def action_edit(self) -> None:
        """Type the load."""
        low, high = slider.range_of(self.view.load)
        unit = "req/s" if slider.is_open(self.view.load) else f"{low:g}-{high:g}"
        self.entry.ask(
            "rate" if slider.is_open(self.view.load) else "conc", "", f"{unit}  enter applies, esc keeps", self._enter
        )

    def _enter(self, text: str) -> str:
        if not text.strip():
            return ""
        load = self.view.load
        try:
            value, note = slider.parse(text, load, slider.wanted(load, self.look))
        except ValueError as error:
            return str(error)
        self.dial.move(load, value)
        self.dial.apply()
        if note:
            self.notify(note, timeout=4)
        self.frame()
        return ""

    def action_cancel(self) -> None:
        flying = self.view.load.in_flight
        if flying:
            text = f"cancel the {format.count(flying)} requests in flight? y yes, any other key no"
            self.entry.question(text, self.control.cancel_requests)

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """With --mouse: a click on the track moves the head."""
        self._point(event.screen_x, event.screen_y)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if event.button:
            self._point(event.screen_x, event.screen_y)

    def _point(self, x: int, y: int) -> None:
        place = self._places.get("slider")
        if place is None or y != place.y or self.entry.display or self.look.closing:
            return
        first, cells = slider.track_of(self.view, place.width, self.look)
        if first <= x < first + cells:
            self.dial.move(self.view.load, slider.at_cell(self.view.load, x - first, cells))
            self.redraw()
