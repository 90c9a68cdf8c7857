"""The one widget behind every panel: calls a pure function for its lines, and redraws only the cells that changed."""

from collections.abc import Callable

from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from lpxtop.metrics.view import RunView
from lpxtop.tui.look import Look
from lpxtop.tui.paint import Paint, changed
from lpxtop.tui.rows import Row, block

Draw = Callable[[RunView, int, int, Look], list[Row]]


class Panel(Widget):
    """Holds the last lines drawn and nothing else."""

    DEFAULT_CSS = "Panel { position: absolute; width: 1; height: 1; }"

    def __init__(self, name: str, draw: Draw) -> None:
        super().__init__(id=name)
        self._draw = draw
        self._rows: list[Row] = []
        self._strips: list[Strip] = []
        self._width = 0

    def put(self, region: Region) -> None:
        """Take a place on the screen."""
        self.styles.offset = (region.x, region.y)
        self.styles.width, self.styles.height = region.width, region.height
        self._rows, self._width = [], region.width

    def show(self, view: RunView, look: Look, paint: Paint, width: int, height: int) -> None:
        """Draw `view` at a size; cells that did not change are left alone."""
        rows = block(self._draw(view, width, height, look), width, height)
        if len(rows) != len(self._rows) or width != self._width:
            self._rows, self._width = rows, width
            self._strips = [paint.strip(row, width) for row in rows]
            self.refresh()
            return
        for y, (before, after) in enumerate(zip(self._rows, rows, strict=True)):
            found = changed(before, after, width)
            if found is not None:
                self._strips[y] = paint.strip(after, width)
                self.refresh(Region(found[0], y, found[1], 1))
        self._rows = rows

    def repaint(self) -> None:
        """Forget what was drawn: the next frame draws everything."""
        self._rows = []

    def render_line(self, y: int) -> Strip:
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width)

    def text(self) -> list[str]:
        """The lines as last drawn, without colours."""
        return [strip.text for strip in self._strips]
