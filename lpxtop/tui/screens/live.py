"""The screen of live runs, watching and replays: places the panels, hands them views, and turns keys into requests.

Holds how the run is looked at (`Look`), never the run. What only a load or only a replay can do is in their own
modules. Must not measure, and must not read a clock but the loop's, for "frozen 12 s".
"""

import asyncio
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.screen import Screen

from lpxtop.events.stream import RunControl
from lpxtop.metrics.view import RunView
from lpxtop.tui import keymap
from lpxtop.tui.entry import Entry
from lpxtop.tui.look import Look
from lpxtop.tui.paint import Paint
from lpxtop.tui.panels import (
    card,
    footer,
    gpus,
    latency,
    levels,
    requests,
    scrub,
    server,
    slider,
    status,
    throughput,
    tiles,
    ttft,
)
from lpxtop.tui.panels import (
    events as event_list,
)
from lpxtop.tui.panels.panel import Draw, Panel
from lpxtop.tui.panels.states import mode_of
from lpxtop.tui.rows import Row, line
from lpxtop.tui.screens.layout import Facts, Place, arrange, charts_of

WINDOWS_S = (10.0, 30.0, 60.0, 300.0)


def _second_row(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """The slider, the scrub bar, or what is happening while the run closes."""
    if look.closing:
        return [line((f" {look.closing}", "warn"))]
    return (slider.lines if view.replay is None else scrub.lines)(view, width, height, look)


PANELS: dict[str, Draw] = {
    "status": status.lines,
    "slider": _second_row,
    "tiles": tiles.lines,
    "latency": latency.lines,
    "ttft": ttft.lines,
    "throughput": throughput.lines,
    "gpu": gpus.lines,
    "server": server.lines,
    "requests": requests.lines,
    "events": event_list.lines,
    "levels": levels.lines,
    "gputable": gpus.table,
    "gpuhistory": gpus.history,
    "serverline": server.one_line,
    "eventtail": event_list.tail,
    "footer": footer.lines,
    "card": card.lines,
}


def bindings(mode: str) -> list[BindingType]:
    """The keymap's entries of one kind of screen."""
    return [Binding(key.keys, key.action, key.label, show=False, id=key.id) for key in keymap.of_mode(mode)]


class LiveScreen(Screen[None]):
    """Everything that load, watch and replay have in common."""

    DEFAULT_CSS = "LiveScreen { layers: base over; overflow: hidden hidden; } Entry { layer: over; }"
    BINDINGS: ClassVar[list[BindingType]] = []
    MODE: ClassVar[str] = "watch"
    AUTO_FOCUS = ""

    def __init__(self, control: RunControl, look: Look, paint: Paint) -> None:
        super().__init__()
        self.control, self.look, self.paint = control, look, paint
        self.view: RunView = control.view()
        self._places: dict[str, Place] = {}
        self._facts: tuple[int, int, Facts] | None = None
        self._panels = {name: Panel(name, draw) for name, draw in PANELS.items()}
        self._frozen_at: float | None = None
        self.entry = Entry(lambda: self.paint, self.redraw)
        if self.MODE == "watch":
            look.chosen = "gpu"

    def compose(self) -> ComposeResult:
        yield from self._panels.values()
        yield self.entry

    # --- frames ------------------------------------------------------------------------------------------------

    def frame(self) -> None:
        """Take a view (unless frozen) and show it."""
        if self._frozen_at is None:
            self.view = self.control.view()
        else:
            self.look.frozen_s = int(asyncio.get_running_loop().time() - self._frozen_at)
        self.redraw()

    def redraw(self) -> None:
        """Show the view there is: after a key, a resize, a new theme."""
        if not self.is_mounted:
            return
        self._place()
        for name, place in self._places.items():
            self._panels[name].show(self.view, self.look, self.paint, place.width, place.height)

    def repaint(self, paint: Paint | None = None) -> None:
        """Draw everything anew."""
        self.paint = paint or self.paint
        for panel in self._panels.values():
            panel.repaint()
        self.redraw()
        self.entry.refresh()

    def _place(self) -> None:
        view, look = self.view, self.look
        facts = Facts(
            mode=mode_of(view), gpus=len(view.gpus), servers=len(view.servers), chosen=look.chosen, zoomed=look.zoomed
        )
        size = self.app.size
        if self._facts == (size.width, size.height, facts):
            return
        self._facts = (size.width, size.height, facts)
        before, self._places = self._places, {place.panel: place for place in arrange(*size, facts)}
        for name, panel in self._panels.items():
            place = self._places.get(name)
            panel.display = place is not None
            if place is not None and before.get(name) != place:
                panel.put(Region(place.x, place.y, place.width, place.height))
        row = self._places.get("slider", Place("card", 0, size.height - 1, size.width, 1))
        self.entry.styles.offset = (row.x, row.y)
        self.entry.styles.width = row.width

    def on_resize(self, event: events.Resize) -> None:
        self.redraw()

    def on_mount(self) -> None:
        self.redraw()

    def on_paste(self, event: events.Paste) -> None:
        """Pasted text is for an open entry, or for nobody."""
        event.stop()
        if self.entry.display:
            self.entry.paste(event.text)

    # --- panels ------------------------------------------------------------------------------------------------

    def action_panel(self, name: str) -> None:
        """Choose a panel; where only some fit, it is one of them."""
        if name in charts_of(mode_of(self.view)):
            self.look.chosen = name
            self.redraw()

    def action_cycle(self, direction: int) -> None:
        order = charts_of(mode_of(self.view))
        place = order.index(self.look.chosen) if self.look.chosen in order else 0
        self.action_panel(order[(place + direction) % len(order)])

    def action_zoom(self) -> None:
        self.look.zoomed = not self.look.zoomed
        self.redraw()

    def action_back(self) -> None:
        self.look.zoomed = False
        self.redraw()

    def action_scroll(self, rows: int) -> None:
        """Down is on in the list; the event list is read upwards from its newest line."""
        chosen = self.look.chosen
        step = -rows if chosen == "events" else rows
        most = {"events": len(self.view.events), "gpu": len(self.view.gpus), "requests": len(self.view.open_requests)}
        self.look.scroll[chosen] = max(0, min(most.get(chosen, 0), self.look.scroll.get(chosen, 0) + step))
        self.redraw()

    # --- the view ----------------------------------------------------------------------------------------------

    def action_freeze(self) -> None:
        """Hold the picture; nothing else stops."""
        self._frozen_at = None if self._frozen_at is not None else asyncio.get_running_loop().time()
        self.look.frozen_s = None if self._frozen_at is None else 0
        self.frame()

    def action_window(self) -> None:
        """The next longer window, then the shortest."""
        now = self.view.window.window_s
        longer = next((seconds for seconds in WINDOWS_S if seconds > now), WINDOWS_S[0])
        self.control.set_window(longer)
        self.frame()

    def action_log(self) -> None:
        self.look.log = not self.look.log
        self.redraw()

    def action_note(self) -> None:
        """A note into the recording."""
        self.entry.ask("note", "", "enter writes it into the recording, esc drops it", self._write_note)

    def _write_note(self, text: str) -> str:
        if text.strip():
            self.control.mark(text.strip())
        return ""
