"""Figures with axes as plain lines of text, by plotext: the TTFT histogram and the curve of latency over throughput.

plotext keeps one global figure, so this is its only door, one figure at a time. It is imported on first use, because
it takes a tenth of a second. Must not know views or colours.
"""

import itertools
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from lpxtop import format

_lock = threading.Lock()
_TICK_STEPS = (1, 2, 5)


def load() -> None:
    """Import plotext now, from a thread that may wait, rather than with the first figure."""
    import plotext

    assert plotext.figure


def _plain(figure: Any, ascii_only: bool) -> list[str]:
    import plotext

    text = str(plotext.uncolorize(str(figure.build())))
    rows = text.rstrip("\n").split("\n")
    return [row.translate(_ASCII) for row in rows] if ascii_only else rows


_DRAWN = {"-": "─", "|": "│├┤", "+": "┌┐└┘┬┴┼", "#": "█▄▀"}
_ASCII = {ord(drawn): plain for plain, group in _DRAWN.items() for drawn in group}


def histogram(
    edges: Sequence[float],
    counts: Sequence[int],
    width: int,
    height: int,
    *,
    marks: Mapping[str, float] | None = None,
    ascii_only: bool = False,
) -> list[str]:
    """Counts on a grid of rising edges (log or not), `height` lines of `width` cells, with named vertical lines.

    `edges` has one entry more than `counts`; bars have equal width, the axis shows the edges' values. Marks outside
    the grid stand at its end.
    """
    first, last = _filled(counts)
    edges, counts = edges[first : last + 2], counts[first : last + 1]
    places = {name: _place(value, edges) for name, value in (marks or {}).items()}
    with _lock:
        figure = _fresh(width, height)
        figure.draw(figure.bar(list(range(len(counts))), list(counts), width=1, marker="█"))
        ruler = figure.ruler("x", "lower")
        ruler.lim(-0.5, len(counts) - 0.5)
        ticks = _ticks(edges[0], edges[-1], max(2, width // 12))
        ruler.ticks([_place(value, edges) for value in ticks], [_short(value) for value in ticks])
        _count_axis(figure, max(counts), height)
        for place in places.values():
            figure.line(place, "vertical")
        rows = _plain(figure, ascii_only)
    return _named(rows, places, len(counts), width)


def _fresh(width: int, height: int) -> Any:
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    return figure


def _filled(counts: Sequence[int]) -> tuple[int, int]:
    """First and last bin with something in it, and one empty neighbour on either side."""
    filled = [place for place, n in enumerate(counts) if n]
    return max(0, filled[0] - 1), min(len(counts) - 1, filled[-1] + 1)


def _place(value: float, edges: Sequence[float]) -> float:
    """Where a value is on an axis on which bin i is centred at i; within a bin by its logarithm."""
    if value <= edges[0]:
        return -0.5
    for place, (low, high) in enumerate(itertools.pairwise(edges)):
        if value <= high:
            share = math.log(value / low) / math.log(high / low) if low > 0 else (value - low) / (high - low)
            return place - 0.5 + share
    return len(edges) - 1.5


def _ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` round values of a logarithmic axis."""
    if low <= 0:
        low = high / 1000
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 5, 7), _TICK_STEPS, (1, 3), (1,)):
        found = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(found) <= most:
            return found
    return found[:: max(1, len(found) // most + 1)]


def _short(value: float) -> str:
    text = format.significant(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def _count_axis(figure: Any, most: int, height: int) -> None:
    """Whole numbers only."""
    parts = min(most, 2 if height < 12 else 4)
    values = sorted({round(most * part / parts) for part in range(parts + 1)})
    figure.ruler("y", "left").ticks(values, [format.count(value) for value in values])


def _named(rows: list[str], places: Mapping[str, float], bins: int, width: int) -> list[str]:
    """Names of the vertical lines, written into the upper axis; of two that collide the first named wins."""
    left = next((place for place, letter in enumerate(rows[0]) if letter in "┌+"), 0)
    canvas = len(rows[0].rstrip()) - left - 2
    top = list(rows[0].ljust(width))
    taken: set[int] = set()
    for name, place in places.items():
        column = left + 1 + round((place + 0.5) / bins * max(1, canvas - 1))
        begin = max(left + 1, min(left + 1 + canvas - len(name), column - len(name) // 2))
        cells = set(range(begin - 1, begin + len(name) + 1))
        if not cells & taken:
            top[begin : begin + len(name)] = name
            taken |= cells
    return ["".join(top).rstrip(), *rows[1:]]


def _even(top: float, most: int) -> list[float]:
    """Round values from 0 to `top`, at most about `most`."""
    rough = top / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * size for size in (1, 2, 5, 10) if power * size >= rough)
    return [step * n for n in range(int(top / step) + 1)]


def curve(
    points: Sequence[tuple[float, float, str]],
    width: int,
    height: int,
    *,
    x_label: str,
    y_label: str,
    ascii_only: bool = False,
) -> list[str]:
    """Points (x, y, name) joined by a line in the order given, each with its name beside it."""
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    with _lock:
        figure = _fresh(width, height)
        signal = figure.signal(xs, ys, marker="*" if ascii_only else "braille")
        signal.lines(True)
        figure.draw(signal)
        for x, y, name in points:
            figure.draw(figure.text(x, y, name, alignment="right" if x > max(xs) / 2 else "left"))
        for axis, values, side in (("x", xs, "lower"), ("y", ys, "left")):
            ruler = figure.ruler(axis, side)
            ruler.lim(0, 1.1 * max(values))
            marks = _even(1.1 * max(values), width // 10 if axis == "x" else height // 3)
            ruler.ticks(marks, [_short(value) for value in marks])
        figure.label(x_label, "x")
        figure.title(y_label)
        return _plain(figure, ascii_only)
