"""Per-token latency over time: p50, p95 and p99 of each second, with the load changes. Pure lines."""

from lpxtop import format
from lpxtop.metrics.view import RunView
from lpxtop.tui.look import Look
from lpxtop.tui.panels.chart import draw, empty, span_caption
from lpxtop.tui.panels.tiles import per_token
from lpxtop.tui.plot import Trace
from lpxtop.tui.rows import Row, framed, line


def lines(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """A framed chart of `height` rows."""
    name, now = per_token(view)
    figures = ((" p50 ", now.p50), ("  p95 ", now.p95), ("  p99 ", now.p99)) if width >= 60 else ()
    title = line(
        ("1 ", "key"), (f"{name} ms", "title"),
        *(part for label, value in figures for part in ((label, "label"), (format.milliseconds(value), "value"))),
    )  # fmt: skip
    series = view.series
    traces = [
        Trace(series.itl_p99_ms, "p99", "p99", "line", "^"),
        Trace(series.itl_p95_ms, "p95", "p95", "points", "+"),
        Trace(series.itl_p50_ms, "p50", "p50", "thick", "o"),
    ]
    body = draw(view, traces, width - 2, height - 2, look, key="latency", log=look.log)
    if body is None:
        body = empty(view, width - 2, height - 2, "no tokens yet")
    caption = span_caption(view, width - 2, look, "worst of", labels=3)
    return framed(body, width, height, title, caption, chosen=look.chosen == "latency")
