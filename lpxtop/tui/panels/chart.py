"""What the time charts share: marks at load changes, kept scales, empty states, and captions that say what is drawn."""

from collections.abc import Callable, Sequence

from lpxtop import format
from lpxtop.metrics.view import RunView
from lpxtop.tui import plot
from lpxtop.tui.look import Look
from lpxtop.tui.panels.states import mode_of
from lpxtop.tui.rows import Row, Span, line, wrapped

SLOT_US = 1_000_000


def draw(
    view: RunView,
    traces: Sequence[plot.Trace],
    width: int,
    height: int,
    look: Look,
    *,
    key: str,
    floor: float = 1.0,
    ceiling: float | None = None,
    log: bool = False,
    label: Callable[[float], str] = plot.tick,
    time_axis: bool = True,
) -> list[Row] | None:
    """A strip of the traces with the view's marks; None when there is nothing to draw. Keeps its scale in `look`."""
    if height < 1 or all(value is None for trace in traces for value in trace.values):
        return None
    rows, top = plot.chart(
        traces, width, height,
        first_slot=view.series.start_us // SLOT_US, window_s=view.window.window_s, glyphs=look.glyphs,
        floor=floor, ceiling=ceiling, log=log, before=look.scales.get(key),
        marks=[(t // SLOT_US, code) for t, code in view.marks], label=label, time_axis=time_axis,
    )  # fmt: skip
    if ceiling is None:
        look.scales[key] = top
    return rows


def empty(view: RunView, width: int, height: int, what: str) -> list[Row]:
    """Why a panel shows nothing, and what to do."""
    hint = ""
    if mode_of(view) == "live" and view.phase == "ready":
        hint = ": space starts the load"
    elif mode_of(view) == "watch":
        hint = ": watching sends no load"
    return centred(f"{what}{hint}", width, height)


def centred(text: str, width: int, height: int, style: str = "label") -> list[Row]:
    """A sentence in the middle of a panel."""
    rows = wrapped(text, max(1, width - 2), style)[: max(0, height)]
    above: list[Row] = [()] * ((height - len(rows)) // 2)
    return [*above, *(line(" " * ((width - len(row[0][0])) // 2), *row) for row in rows)]


def span_caption(view: RunView, width: int, look: Look, joined: str, labels: int = 0) -> Row:
    """How much time a chart shows, and how the seconds of a column are joined when there are several."""
    cells = width - plot.GUTTER - 1 - (labels + 1 if labels else 0)
    columns, slots = plot.span_of(max(1, cells), view.window.window_s, look.glyphs)
    parts: list[str | Span] = [(f"last {format.duration(columns * slots)}", "label")]
    if slots > 1 and width > 56:
        parts.append((f", {joined} {slots} s", "label"))
    return line(*parts)
