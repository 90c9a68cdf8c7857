"""The help page: every key of this screen, from the keymap, and what the figures mean, from the definitions."""

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

from lpxtop.metrics.definitions import OF_CLIENT, OF_WINDOW, PER_REQUEST
from lpxtop.tui import keymap
from lpxtop.tui.paint import Paint
from lpxtop.tui.rows import Row, block, line, pad, wrapped

_GROUPS = {"load": "load", "replay": "replay", "view": "panels and view", "general": "general"}
_NAME = 16


def lines(mode: str, width: int) -> list[Row]:
    """The page as rows of at most `width` cells."""
    rows: list[Row] = [line((" keys", "title"), ("   j k pgup pgdn move, q or esc goes back", "label"))]
    for group, name in _GROUPS.items():
        keys = [key for key in keymap.of_mode(mode) if key.group == group]
        if not keys:
            continue
        rows += [(), line((f" {name}", "value"))]
        for key in keys:
            rows.append(line((" " + pad(keymap.all_shown(key), _NAME + 2), "key"), (key.help, "text")))
    rows += [(), line((" figures", "title"), ("   lpxtop explain says more", "label"))]
    for metric in (*PER_REQUEST, *OF_WINDOW, *OF_CLIENT):
        text = wrapped(metric.sentence, max(20, width - _NAME - 6))
        rows.append(line((" " + pad(metric.label, _NAME + 2), "value"), *text[0]))
        rows += [line(" " * (_NAME + 3), *row) for row in text[1:]]
    return rows


class _Page(Widget):
    """Rows that scroll."""

    DEFAULT_CSS = "_Page { width: 100%; height: 100%; }"

    def __init__(self, mode: str, paint: Paint) -> None:
        super().__init__()
        self._mode, self._paint = mode, paint
        self._top = 0
        self._rows: list[Row] = []

    def on_resize(self, event: events.Resize) -> None:
        self._rows = block(lines(self._mode, self.size.width), self.size.width, len(lines(self._mode, self.size.width)))
        self.move(0)

    def move(self, rows: int) -> None:
        self._top = max(0, min(len(self._rows) - self.size.height, self._top + rows))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        place = self._top + y
        width = self.size.width
        return self._paint.strip(self._rows[place], width) if place < len(self._rows) else Strip.blank(width)


class HelpScreen(Screen[None]):
    """Any of the keys one would try goes back."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,escape,question_mark,enter,space", "leave", show=False),
        Binding("j,down", "move(1)", show=False),
        Binding("k,up", "move(-1)", show=False),
        Binding("pagedown,L,d", "move(15)", show=False),
        Binding("pageup,H,u", "move(-15)", show=False),
        Binding("home,g", "move(-10000)", show=False),
        Binding("end,G", "move(10000)", show=False),
    ]

    def __init__(self, mode: str, paint: Paint) -> None:
        super().__init__()
        self._page = _Page(mode, paint)

    def compose(self) -> ComposeResult:
        yield self._page

    def action_leave(self) -> None:
        self.dismiss()

    def action_move(self, rows: int) -> None:
        self._page.move(rows)
