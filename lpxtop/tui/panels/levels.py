"""Every load level visited: its figures side by side, and zoomed the curve of throughput against latency. Pure lines."""

from lpxtop import figures, format
from lpxtop.metrics.view import LevelView, RunView
from lpxtop.tui.look import Look
from lpxtop.tui.panels.chart import empty
from lpxtop.tui.panels.states import load_word
from lpxtop.tui.rows import Row, framed, line, pad

_HEAD = ("load", "tok/s", "req/s", "TTFT p50", "p95", "ITL p50", "p95", "n", "failed")
_KNEE_ROWS = 8


def lines(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """A framed table, a line per level, the newest last."""
    title = line(("8 ", "key"), ("load levels", "title"))
    caption = line(("each after its settle time", "label"))
    chosen = look.chosen == "levels"
    inner_width, inner = width - 2, height - 2
    if not view.levels:
        return framed(empty(view, inner_width, inner, "no level yet"), width, height, title, caption, chosen=chosen)
    plotted = [level for level in view.levels if level.output_tokens_per_s is not None and level.itl.p50 is not None]
    knee = inner - max(4, inner // 3) if len(plotted) >= 2 and inner >= 16 and look.figures_ready else 0
    shown = view.levels[-max(0, inner - knee - 1) :]
    rows = [
        line((" " + "".join(pad(name, 9, right=True) for name in _HEAD), "label")),
        *(_row(level) for level in shown),
    ]
    return framed(
        [*(_knee(plotted, inner_width, knee, view, look) if knee else []), *rows],
        width,
        height,
        title,
        caption,
        chosen=chosen,
    )


def _row(level: LevelView) -> Row:
    cells = (
        load_word(level.concurrency, level.rate),
        format.significant(level.output_tokens_per_s),
        format.significant(level.requests_per_s),
        format.milliseconds(level.ttft.p50),
        format.milliseconds(level.ttft.p95),
        format.milliseconds(level.itl.p50),
        format.milliseconds(level.itl.p95),
        format.count(level.requests),
        format.count(level.failed),
    )
    state = "" if level.settled else "  settling" if level.to_us is None else "  too short"
    unsteady = "  ! not steady" if level.settled and level.steady is False else ""
    return line(
        (" " + "".join(pad(cell, 9, right=True) for cell in cells), "value"), (state, "label"), (unsteady, "warn")
    )


def _knee(levels: list[LevelView], width: int, height: int, view: RunView, look: Look) -> list[Row]:
    """Latency per token (y) against throughput (x), a point per level, named by its load."""
    points = tuple(
        (level.output_tokens_per_s, level.itl.p50, load_word(level.concurrency, level.rate))
        for level in levels
        if level.output_tokens_per_s is not None and level.itl.p50 is not None
    )
    drawn_from = (view.t // 1_000_000, points, width, height, look.glyphs)
    before = look.figures.get("knee")
    if before is None or before[0] != drawn_from:
        text = figures.curve(
            points, width, height, x_label="tok/s", y_label="ITL p50 ms", ascii_only=look.glyphs == "ascii"
        )
        look.figures["knee"] = before = (drawn_from, [line((row, "text")) for row in text])
    return before[1]
