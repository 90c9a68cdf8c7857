"""Time strips in braille, blocks or ASCII: numbers in, rows of styled text out, always by fixed time slots.

A column is one slot (1 s), or several when the time asked for does not fit; columns are aligned to session time, so a
strip moves only when a cell is full. None is a hole, never a line across it. Must not know views or colours.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lpxtop import format
from lpxtop.tui.rows import Row, Span, pad

Shape = Literal["line", "thick", "points", "area"]
How = Literal["worst", "mean"]

GUTTER = 6
_NICE = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_SLOTS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600)
_BITS = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # by dot column, from the bottom up
_FULL = (0x47, 0xB8)


@dataclass(frozen=True)
class Trace:
    """One series. Told apart by shape (and glyph), label and only then by colour. `how` joins the slots of a column."""

    values: Sequence[float | None]
    style: str
    label: str = ""
    shape: Shape = "line"
    glyph: str = "o"
    how: How = "worst"


@dataclass(frozen=True)
class Axis:
    """A y axis from `low` to `top`."""

    low: float
    top: float
    log: bool = False

    def place(self, value: float, steps: int) -> int:
        """The step (0 at the bottom) of `steps` at which a value is drawn."""
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.top / self.low)
        else:
            share = (value - self.low) / (self.top - self.low)
        return max(0, min(steps - 1, round(share * (steps - 1))))

    def value(self, share: float) -> float:
        """The value at a share 0..1 of the axis' height."""
        if self.log:
            return float(self.low * (self.top / self.low) ** share)
        return self.low + share * (self.top - self.low)


def nice(value: float) -> float:
    """The next round number at or above `value` (1, 1.5, 2, 3, 4, 5, 6, 8 × 10ⁿ)."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (*_NICE, 20.0) if step * power >= value * (1 - 1e-9))


def top_of(peak: float | None, floor: float, before: float | None = None) -> float:
    """The top of an axis for values up to `peak`: round, with head-room, and the one before unless it is too low or
    more than twice too high, so that the picture does not jump."""
    wanted = nice(max(floor, 0.0 if peak is None else peak * 1.05))
    if before is not None and (peak is None or peak <= before) and wanted >= 0.45 * before:
        return before
    return wanted


def tick(value: float) -> str:
    """An axis label: as short as the number allows."""
    text = format.significant(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def span_of(cells: int, window_s: float, glyphs: str) -> tuple[int, int]:
    """(columns, seconds per column) of a canvas of `cells` that shows at least `window_s`."""
    columns = cells * (2 if glyphs == "braille" else 1)
    return columns, next((slots for slots in _SLOTS if slots * columns >= window_s), _SLOTS[-1])


def by_column(
    values: Sequence[float | None], first_slot: int, columns: int, slots: int, how: How, *, cell: int = 1
) -> list[float | None]:
    """One value per column, newest last. Column edges are multiples of `slots` (the last cell's of `slots × cell`) of
    session time. `worst` keeps the largest value of a column's slots, `mean` their mean."""
    newest = first_slot + len(values) - 1
    last = (newest // (slots * cell) + 1) * cell - 1
    out: list[float | None] = []
    for column in range(last - columns + 1, last + 1):
        begin = column * slots - first_slot
        known = [value for value in values[max(0, begin) : max(0, begin + slots)] if value is not None]
        out.append(None if not known else max(known) if how == "worst" else sum(known) / len(known))
    return out


class Canvas:
    """Cells with dots. Later drawings win a cell's colour; dots of all remain (braille) or the last glyph does."""

    def __init__(self, width: int, height: int, glyphs: str) -> None:
        self.width, self.height, self.glyphs = width, height, glyphs
        self._bits = [[0] * width for _ in range(height)]
        self._glyph: list[list[str]] = [[" "] * width for _ in range(height)]
        self._style = [["text"] * width for _ in range(height)]

    @property
    def steps(self) -> int:
        """Vertical resolution."""
        return self.height * {"braille": 4, "block": 2}.get(self.glyphs, 1)

    def draw(self, trace: Trace, values: Sequence[float | None], axis: Axis) -> None:
        """One value per column."""
        before: int | None = None
        for column, value in enumerate(values):
            place = None if value is None else axis.place(value, self.steps)
            if place is not None:
                self._column(trace, column, place, before)
            before = place

    def _column(self, trace: Trace, column: int, place: int, before: int | None) -> None:
        if trace.shape == "area":
            self._area(column, place, trace)
            return
        low = high = place
        if trace.shape in ("line", "thick") and before is not None and self.glyphs == "braille":
            low, high = min(place, before + (before < place)), max(place, before - (before > place))
        if trace.shape == "thick" and self.glyphs == "braille":
            low, high = (low, high + 1) if high + 1 < self.steps else (low - 1, high)
        for step in range(low, high + 1):
            self._dot(column, step, trace)

    def _dot(self, column: int, step: int, trace: Trace) -> None:
        per_cell = self.steps // self.height
        row = self.height - 1 - step // per_cell
        if self.glyphs == "braille":
            cell = column // 2
            self._bits[row][cell] |= _BITS[column % 2][step % 4]
        else:
            cell = column
            self._glyph[row][cell] = trace.glyph
        self._style[row][cell] = trace.style

    def _area(self, column: int, place: int, trace: Trace) -> None:
        per_cell = self.steps // self.height
        cell = column // 2 if self.glyphs == "braille" else column
        for row in range(self.height):
            filled = min(per_cell, place + 1 - (self.height - 1 - row) * per_cell)
            if filled <= 0:
                continue
            if self.glyphs == "braille":
                self._bits[row][cell] |= sum(_BITS[column % 2][:filled]) if filled < 4 else _FULL[column % 2]
            else:
                self._glyph[row][cell] = ("█" if filled == per_cell else "▄") if self.glyphs == "block" else "#"
            self._style[row][cell] = trace.style

    def mark(self, cell: int, code: str) -> None:
        """A vertical line where something changed, behind what is drawn, with its code at the top."""
        if not 0 <= cell < self.width:
            return
        for row in range(self.height):
            if not self._bits[row][cell] and self._glyph[row][cell] == " ":
                self._glyph[row][cell], self._style[row][cell] = "┊", "mark"
        for place, letter in enumerate(code[: self.width - cell]):
            self._bits[0][cell + place] = 0
            self._glyph[0][cell + place], self._style[0][cell + place] = letter, "mark"

    def rows(self) -> list[Row]:
        """The picture, spans of one style joined."""
        return [self._row(y) for y in range(self.height)]

    def _row(self, y: int) -> Row:
        spans: list[Span] = []
        text, style = "", "text"
        for bits, glyph, own in zip(self._bits[y], self._glyph[y], self._style[y], strict=True):
            character = chr(0x2800 + bits) if bits else glyph
            if own != style and character != " ":
                if text:
                    spans.append((text, style))
                text, style = "", own
            text += character
        return (*spans, (text, style))


def chart(
    traces: Sequence[Trace],
    width: int,
    height: int,
    *,
    first_slot: int,
    window_s: float,
    glyphs: str = "braille",
    floor: float = 1.0,
    ceiling: float | None = None,
    log: bool = False,
    before: float | None = None,
    marks: Iterable[tuple[int, str]] = (),
    label: Callable[[float], str] = tick,
    time_axis: bool = True,
) -> tuple[list[Row], float]:
    """A strip with its axes, `height` rows of `width` cells, and the top it used (hand it back as `before`).

    `marks` are (slot, code). With room for at least five rows the last one is the time axis. The right margin
    names each trace at its last value.
    """
    names = max((len(trace.label) for trace in traces), default=0)
    cells = max(1, width - GUTTER - 1 - (names + 1 if names else 0))
    body = height - 1 if time_axis and height >= 5 else height
    cell = 2 if glyphs == "braille" else 1
    columns, slots = span_of(cells, window_s, glyphs)
    drawn = [by_column(trace.values, first_slot, columns, slots, trace.how, cell=cell) for trace in traces]
    known = [value for values in drawn for value in values if value is not None]
    top = ceiling if ceiling is not None else top_of(max(known, default=None), floor, before)
    axis = _log_axis(known, top) if log else Axis(0.0, top)
    canvas = Canvas(cells, max(1, body), glyphs)
    for trace, values in zip(traces, drawn, strict=True):
        canvas.draw(trace, values, axis)
    newest = (first_slot + max((len(trace.values) for trace in traces), default=1) - 1) // (slots * cell)
    for slot, code in marks:
        canvas.mark(cells - 1 - (newest - slot // (slots * cell)), code)
    names_at = _names(traces, drawn, axis, canvas)
    ticks = _ticks(axis, canvas.height, label)
    rows = [
        (
            (pad(ticks.get(y, ""), GUTTER, right=True), "label"),
            ("┤" if y in ticks else "│", "axis"),
            *row,
            *((pad(" " + names_at[y][0], names + 1), names_at[y][1]),) * bool(names),
        )
        for y, row in enumerate(canvas.rows())
    ]
    if body < height:
        rows.append(((" " * GUTTER, "text"), ("└", "axis"), *_time_axis(cells, slots * cell, names)))
    return rows, top


def _log_axis(known: Sequence[float], top: float) -> Axis:
    """From the decade below the smallest value, at least one decade."""
    smallest = min((value for value in known if value > 0), default=top / 10)
    low = 10.0 ** math.floor(math.log10(min(smallest, top / 10)))
    return Axis(low, top, log=True)


def _ticks(axis: Axis, height: int, label: Callable[[float], str]) -> dict[int, str]:
    """Row → text, at the row nearest to the value: the ends, and as many between as there is room for."""
    parts = 1 if height < 3 else 2 if height < 9 else _parts(axis)
    shares = [part / parts for part in range(parts + 1)] if height > 1 else [1.0]
    return {round((1 - share) * (height - 1)): label(axis.value(share)) for share in shares}


def _parts(axis: Axis) -> int:
    """Thirds of 1.5, 3 and 6, quarters of the rest: round values between the ends too."""
    return 3 if any(abs(axis.top / 10.0**n - size) < 1e-9 for size in (1.5, 3, 6) for n in range(-4, 9)) else 4


def _names(
    traces: Sequence[Trace], drawn: Sequence[Sequence[float | None]], axis: Axis, canvas: Canvas
) -> list[tuple[str, str]]:
    """For each row the name beside it: a trace's at its last value, the larger above, moved where one is taken."""
    wanted: list[tuple[int, float, Trace]] = []
    for trace, values in zip(traces, drawn, strict=True):
        last = next((value for value in reversed(values) if value is not None), None)
        if last is not None and trace.label:
            row = canvas.height - 1 - axis.place(last, canvas.steps) // (canvas.steps // canvas.height)
            wanted.append((row, -last, trace))
    wanted.sort(key=lambda found: found[:2])
    rows: list[tuple[str, str]] = [("", "text")] * canvas.height
    free = 0
    for place, (row, _, trace) in enumerate(wanted):
        taken = max(free, min(row, canvas.height - (len(wanted) - place)))
        if taken < canvas.height:
            rows[taken] = (trace.label, trace.style)
        free = taken + 1
    return rows


def _time_axis(cells: int, seconds_per_cell: int, margin: int) -> Row:
    """How long ago, at round times."""
    step = next((s for s in (5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600) if s / seconds_per_cell >= 10), 3600)
    text = ["─"] * cells
    end = "now"
    text[max(0, cells - len(end)) :] = end[-cells:]
    for ago in range(step, cells * seconds_per_cell, step):
        label = f"-{ago}s" if ago < 60 else f"-{ago // 60}:{ago % 60:02d}"
        place = cells - 1 - ago // seconds_per_cell
        if place >= 0 and place + len(label) < cells - len(end):
            text[place : place + len(label)] = label
    return (("".join(text), "axis"), (" " * (margin + 1 if margin else 0), "text"))
