"""The TTFT histogram of the window: log bins, percentiles and SLO marked. Drawn by figures, once a second at most."""

import re

from lpxtop import figures, format
from lpxtop.metrics.view import RunView
from lpxtop.tui.look import Look
from lpxtop.tui.panels.chart import centred, empty
from lpxtop.tui.panels.tiles import covers
from lpxtop.tui.rows import Row, Span, framed, line

_SLO = re.compile(r"\s*ttft\s*<=?\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*")
_BARS = re.compile(r"([█▄▀#]+)")


def lines(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """A framed histogram of `height` rows."""
    now = view.window.ttft
    parts: list[str | Span] = [("2 ", "key"), ("TTFT ms", "title")]
    if width >= 56:
        for name, value in (("p50", now.p50), ("p95", now.p95), ("p99", now.p99)):
            parts += [(f"  {name} ", "label"), (format.milliseconds(value), "value")]
    caption = line((f"{covers(view)}, n {format.count(now.count)}", "label"))
    return framed(
        _body(view, width - 2, height - 2, look), width, height, line(*parts), caption, chosen=look.chosen == "ttft"
    )


def slo_ms(terms: tuple[str, ...]) -> float | None:
    """The TTFT limit among SLO texts, if there is one."""
    for term in (part for text in terms for part in text.split(",")):
        found = _SLO.fullmatch(term)
        if found:
            return float(found[1]) * (1000 if found[2] == "s" else 1)
    return None


def _body(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    histogram = view.window.ttft_histogram
    if not any(histogram.counts):
        return empty(view, width, height, "no first token in this window")
    if height < 4 or width < 24:
        return centred("too small for a histogram: z zooms", width, height)
    if not look.figures_ready:
        return centred("…", width, height)
    drawn_from = (view.t // 1_000_000, histogram, width, height, look.glyphs)
    before = look.figures.get("ttft")
    if before is None or before[0] != drawn_from:
        look.figures["ttft"] = before = (drawn_from, _figure(view, width, height, look))
    return before[1]


def _figure(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    now = view.window.ttft
    found = {"SLO": slo_ms(view.slo), "p50": now.p50, "p95": now.p95, "p99": now.p99}
    marks = {name: value for name, value in found.items() if value is not None}
    histogram = view.window.ttft_histogram
    text = figures.histogram(
        histogram.edges_ms, histogram.counts, width, height, marks=marks, ascii_only=look.glyphs == "ascii"
    )
    return [_styled(row) for row in text]


def _styled(text: str) -> Row:
    return tuple((part, "ttft" if _BARS.fullmatch(part) else "label") for part in _BARS.split(text) if part)
