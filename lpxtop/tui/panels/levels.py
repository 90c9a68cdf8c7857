"""Every load level visited: its figures side by side, and with room the curve of throughput and latency. Pure lines."""

from collections.abc import Callable

from lpxtop import figures, format
from lpxtop.metrics.view import LevelView, RunView
from lpxtop.tui.look import Look
from lpxtop.tui.panels.chart import empty
from lpxtop.tui.panels.states import load_word
from lpxtop.tui.rows import Row, framed, line, pad

_CELL = 9
_KNEE_FROM = 14
Column = tuple[str, Callable[[LevelView], str]]
_COLUMNS: tuple[tuple[int, Column], ...] = (
    (1, ("load", lambda level: load_word(level.concurrency, level.rate))),
    (1, ("tok/s", lambda level: format.significant(level.output_tokens_per_s))),
    (4, ("req/s", lambda level: format.significant(level.requests_per_s))),
    (3, ("TTFT p50", lambda level: format.milliseconds(level.ttft.p50))),
    (2, ("TTFT p95", lambda level: format.milliseconds(level.ttft.p95))),
    (1, ("ITL p50", lambda level: format.milliseconds(level.itl.p50))),
    (2, ("ITL p95", lambda level: format.milliseconds(level.itl.p95))),
    (2, ("n", lambda level: format.count(level.requests))),
    (3, ("failed", lambda level: format.count(level.failed))),
)
"""(rank, (name, text)): where not all fit, those of the highest ranks are left out first."""


def lines(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """A framed table, a line per level, the newest last."""
    title = line(("8 ", "key"), ("load levels", "title"))
    caption = line(("each after its settle time", "label"))
    chosen = look.chosen == "levels"
    inner_width, inner = width - 2, height - 2
    if not view.levels:
        return framed(empty(view, inner_width, inner, "no level yet"), width, height, title, caption, chosen=chosen)
    columns = _fitting(inner_width)
    knee = inner - min(len(view.levels) + 1, max(5, inner // 3)) if _has_knee(view, look) and inner >= _KNEE_FROM else 0
    shown = view.levels[-max(1, inner - knee - 1) :]
    head = line((" " + "".join(pad(name, _CELL, right=True) for name, _ in columns), "label"))
    rows = [head, *(_row(level, columns) for level in shown)]
    curve = _knee(view, inner_width, knee, look) if knee else []
    return framed([*curve, *rows], width, height, title, caption, chosen=chosen)


def _fitting(width: int) -> list[Column]:
    """The columns there is room for, with a word about the level at the end."""
    most = max(3, (width - 13) // _CELL)
    ranked = sorted(range(len(_COLUMNS)), key=lambda place: (_COLUMNS[place][0], place))[:most]
    return [_COLUMNS[place][1] for place in sorted(ranked)]


def _row(level: LevelView, columns: list[Column]) -> Row:
    cells = "".join(pad(text(level), _CELL, right=True) for _, text in columns)
    state = "" if level.settled else "  settling" if level.to_us is None else "  too short"
    unsteady = "  ! unsteady" if level.settled and level.steady is False else ""
    return line((" " + cells, "value"), (state, "label"), (unsteady, "warn"))


def _has_knee(view: RunView, look: Look) -> bool:
    return look.figures_ready and len(_points(view)) >= 2


def _points(view: RunView) -> tuple[tuple[float, float, str], ...]:
    return tuple(
        (level.output_tokens_per_s, level.itl.p50, load_word(level.concurrency, level.rate))
        for level in view.levels
        if level.output_tokens_per_s is not None and level.itl.p50 is not None
    )


def _knee(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """Latency per token (y) against throughput (x), a point per level, named by its load."""
    drawn_from = (view.t // 1_000_000, _points(view), width, height, look.glyphs)
    before = look.figures.get("knee")
    if before is None or before[0] != drawn_from:
        ascii_only = look.glyphs == "ascii"
        text = figures.curve(_points(view), width, height, x_label="tok/s", y_label="ITL p50 ms", ascii_only=ascii_only)
        look.figures["knee"] = before = (drawn_from, [line((row, "text")) for row in text])
    return before[1]
