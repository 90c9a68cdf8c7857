"""The slider: how much load is asked for, applied and in flight; and the arithmetic of its scale and of its entry.

Concurrency is drawn on a logarithmic scale so that 1..1024 fits; the number beside it is exact. Must not apply
anything: the screen does.
"""

import math
import re

from lpxtop import format
from lpxtop.metrics.view import LoadView, RunView
from lpxtop.tui.look import Look
from lpxtop.tui.panels.states import ended, mode_of
from lpxtop.tui.rows import Row, Span, fit, line, pad, width_of

NAME_WIDTH = 6
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,6})?|\.\d{1,6}")


def is_open(load: LoadView) -> bool:
    """Open loop: the slider moves the rate."""
    return load.mode != "closed"


def range_of(load: LoadView) -> tuple[float, float]:
    """(least, most) of the scale: up to the plan's limit; a rate's scale grows with it."""
    if not is_open(load):
        return 1.0, float(max(2, load.max_concurrency))
    return 0.1, 10.0 ** math.ceil(math.log10(max(100.0, 2 * (load.rate or 1.0))))


def wanted(load: LoadView, look: Look) -> float:
    """The value the head of the slider stands at."""
    if look.pending is not None:
        return look.pending
    current = load.rate if is_open(load) else load.target
    return range_of(load)[0] if current is None else float(current)


def stepped(load: LoadView, value: float, steps: int) -> float:
    """`value` moved by single steps, within the range. A rate moves by about a twentieth to a tenth of itself."""
    low, high = range_of(load)
    if not is_open(load):
        return max(low, min(high, value + steps))
    for _ in range(abs(steps)):
        power = 10.0 ** math.floor(math.log10(value if steps > 0 else value * 0.9999))
        size = power / 10 * (1 if value < 2 * power else 2 if value < 5 * power else 5)
        value = round(value + math.copysign(size, steps), 6)
    return max(low, min(1e6, value))


def scaled(load: LoadView, value: float, factor: float) -> float:
    """`value` times `factor`, within the range; concurrency in whole numbers."""
    low, high = range_of(load)
    if is_open(load):
        return max(low, min(1e6, value * factor))
    return float(max(low, min(high, math.floor(value * factor))))


def parse(text: str, load: LoadView, value: float) -> tuple[float, str]:
    """What an entry means and a note when it was limited: `32`, `+8`, `-4`, `x2`, `/2`, `max`.

    Raises ValueError with the reason for anything else.
    """
    low, high = range_of(load)
    limit = 1e6 if is_open(load) else high
    asked = _amount(text.strip().lower().replace(" ", ""), value, limit)
    if not is_open(load) and asked != math.floor(asked):
        if text.strip()[:1] not in ("x", "*", "/"):
            raise ValueError("a whole number of requests, please")
        asked = math.floor(asked)
    given = max(low, min(limit, asked))
    if given == asked:
        return given, ""
    return given, f"{'the most is' if asked > limit else 'the least is'} {_number(load, given)}"


def _amount(text: str, value: float, limit: float) -> float:
    if text == "max":
        return limit
    operator, rest = (text[:1], text[1:]) if text[:1] in ("+", "-", "x", "*", "/") else ("", text)
    if not _NUMBER.fullmatch(rest):
        raise ValueError("a number like 32, or +8, -4, x2, /2, max")
    number = float(rest)
    if operator in ("x", "*", "/") and number <= 0:
        raise ValueError("a number above 0")
    match operator:
        case "+":
            return value + number
        case "-":
            return value - number
        case "x" | "*":
            return value * number
        case "/":
            return value / number
    return number


def at_cell(load: LoadView, cell: int, cells: int) -> float:
    """The value under a cell of the track (for the mouse)."""
    low, high = range_of(load)
    share = max(0.0, min(1.0, cell / max(1, cells - 1)))
    value = low * (high / low) ** share
    return float(f"{value:.2g}") if is_open(load) else float(round(value))


def track_of(view: RunView, width: int, look: Look) -> tuple[int, int]:
    """(first cell, cells) of the track in a row of `width`."""
    side = width_of(_words(view, width, look))
    return NAME_WIDTH + 1, max(0, width - NAME_WIDTH - 2 - side)


def lines(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """One row; with room for two also the scale's numbers."""
    if mode_of(view) == "watch":
        return [line((" watching: no load is sent", "label"))][:height]
    words = _words(view, width, look)
    _, cells = track_of(view, width, look)
    name = ((pad(" rate" if is_open(view.load) else " conc", NAME_WIDTH), "label"),)
    if cells < 8:
        return [fit((*name, *words), width)][:height]
    rows = [(*name, ("├", "track"), *_track(view, cells, look), ("┤", "track"), *words)]
    if height > 1:
        rows.append(line(" " * (NAME_WIDTH + 1), (_scale(view.load, cells), "label")))
    return rows[:height]


def _place(load: LoadView, value: float, cells: int) -> int:
    low, high = range_of(load)
    share = math.log(max(low, min(high, value)) / low) / math.log(high / low)
    return round(share * (cells - 1))


def _track(view: RunView, cells: int, look: Look) -> Row:
    """Played part, head, and a small mark where the requests in flight are."""
    head = _place(view.load, wanted(view.load, look), cells)
    drawn = ["━" if cell < head else "─" for cell in range(cells)]
    if not is_open(view.load) and view.load.in_flight > 0:
        drawn[_place(view.load, view.load.in_flight, cells)] = "┼"
    return line(("".join(drawn[:head]), "track-done"), ("●", "head"), ("".join(drawn[head + 1 :]), "track"))


def _scale(load: LoadView, cells: int) -> str:
    """Numbers under the track at powers of two (of ten for a rate)."""
    low, high = range_of(load)
    text = [" "] * (cells + 4)
    free = 0
    value = low
    while value <= high:
        label, place = f"{value:g}", _place(load, value, cells)
        if place >= free:
            text[place : place + len(label)] = label
            free = place + len(label) + 2
        value *= 10 if is_open(load) else 2
    return "".join(text).rstrip()


def _number(load: LoadView, value: float) -> str:
    return format.with_unit(value, "req/s") if is_open(load) else format.count(round(value))


def _words(view: RunView, width: int, look: Look) -> Row:
    """The exact values: target, what is applied when it differs, in flight; what is late in open loop."""
    load = view.load
    goal = wanted(load, look)
    now = load.rate if is_open(load) else load.applied
    parts: list[str | Span] = [" "]
    if now is not None and now != goal and view.phase != "ready":
        parts += [(f"{_number(load, float(now))} → ", "warn")]
    parts += [(_number(load, goal), "value")]
    if not is_open(load) and width >= 70:
        parts += [(f" / {format.count(load.max_concurrency)}", "label")]
    parts += [("  in flight ", "label"), (format.count(load.in_flight), "value")]
    if is_open(load) and load.due_not_sent:
        parts += [("  late ", "label"), (format.count(load.due_not_sent), "warn")]
    if view.phase == "ready" and not ended(view):
        parts += [("  ", "text"), ("space starts the load" if width >= 76 else "space starts", "key")]
    return line(*parts, " ")
