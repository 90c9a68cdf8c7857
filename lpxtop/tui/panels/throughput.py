"""Throughput over time with the requests in flight under it, each on its own axis. Pure lines."""

from lpxtop import format
from lpxtop.metrics.view import RunView
from lpxtop.tui.look import Look
from lpxtop.tui.panels.chart import draw, empty, span_caption
from lpxtop.tui.plot import GUTTER, Trace
from lpxtop.tui.rows import Row, framed, line


def lines(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """A framed pair of charts of `height` rows in all; the lower one from 8 rows on."""
    by_token = any(value is not None for value in view.series.output_tokens_per_s)
    values = view.series.output_tokens_per_s if by_token else view.series.chunks_per_s
    unit = "tok/s" if by_token or all(value is None for value in values) else "chunk/s"
    now = view.window.output_tokens_per_s if by_token else view.window.chunks_per_s
    title = line(
        ("3 ", "key"), ("out ", "title"), (format.with_unit(now, unit), "value"), ("  in flight ", "title"),
        (format.count(view.load.in_flight), "value"),
    )  # fmt: skip
    inner = width - 2, height - 2
    caption = span_caption(view, inner[0], look, "mean of")
    return framed(
        _body(view, values, unit, inner, look), width, height, title, caption, chosen=look.chosen == "throughput"
    )


def _body(view: RunView, values: tuple[float | None, ...], unit: str, size: tuple[int, int], look: Look) -> list[Row]:
    width, height = size
    rate = [Trace(values, "rate", shape="area", glyph="#", how="mean")]
    flight = [Trace(view.series.in_flight, "flight", shape="line", glyph="o", how="mean")]
    below = max(3, height // 3) if height >= 8 else 0
    above = draw(view, rate, width, height - below, look, key=f"rate {unit}", floor=10.0, time_axis=not below)
    if above is None:
        return empty(view, width, height, "nothing received yet")
    if not below:
        return above
    under = draw(view, flight, width, below - 1, look, key="flight", floor=2.0, time_axis=below >= 6)
    return [*above, line((f"{'in flight':>{GUTTER + 4}}", "flight")), *(under or [])]
