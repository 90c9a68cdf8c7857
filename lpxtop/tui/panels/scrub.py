"""The scrub bar of a replay: where the head is, what has been played, and what happened where. And go-to entries.

When two marks fall into one cell the more serious wins (! over C over m over :). Must not seek: the screen does.
"""

import re

from lpxtop import format
from lpxtop.metrics.view import ReplayView, RunView
from lpxtop.tui.look import Look
from lpxtop.tui.rows import Row, Span, line, width_of

_SERIOUS = "!Cm:"
_CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DAY_S = 86_400


def lines(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """One row: position, bar, length; with a second row the notes."""
    replay = view.replay
    if replay is None or height < 1:
        return []
    left = line(" ", (_clock(replay.position_us, replay), "value"), " ")
    right = line(" ", (_clock(replay.end_us, replay), "label"), *_follow(replay), " ")
    cells = width - width_of(left) - width_of(right) - 2
    if cells < 4:
        return [(*left, *right)]
    rows: list[Row] = [(*left, ("├", "track"), *_bar(replay, cells), ("┤", "track"), *right)]
    if height > 1:
        rows.append(line(" ", (replay.note or "", "label")))
    return rows[:height]


def _clock(t: int, replay: ReplayView) -> str:
    tenth = max(0, t - replay.start_us) // 100_000 % 10
    return f"{format.clock_time(t - replay.start_us)}.{tenth}"


def _follow(replay: ReplayView) -> list[str | Span]:
    return ["  ", ("FOLLOW", "state-live")] if replay.following else []


def cell_of(t: int, replay: ReplayView, cells: int) -> int:
    """Where a moment is on a bar of `cells`."""
    length = max(1, replay.end_us - replay.start_us)
    return max(0, min(cells - 1, (t - replay.start_us) * (cells - 1) // length))


def _bar(replay: ReplayView, cells: int) -> Row:
    head = cell_of(replay.position_us, replay, cells)
    glyphs: list[Span] = [("━", "track-done") if cell < head else ("─", "track") for cell in range(cells)]
    for t, glyph in sorted(replay.marks, key=lambda mark: -_rank(mark[1])):
        glyphs[cell_of(t, replay, cells)] = (glyph, "error" if glyph == "!" else "mark")
    glyphs[head] = ("●", "head")
    return _joined(glyphs)


def _rank(glyph: str) -> int:
    return _SERIOUS.find(glyph) if glyph in _SERIOUS else len(_SERIOUS)


def _joined(glyphs: list[Span]) -> Row:
    spans: list[Span] = []
    for text, style in glyphs:
        if spans and spans[-1][1] == style:
            spans[-1] = (spans[-1][0] + text, style)
        else:
            spans.append((text, style))
    return tuple(spans)


def marks_of(replay: ReplayView, glyphs: str) -> list[int]:
    """Times of the marks with one of `glyphs`, in order."""
    return sorted({t for t, glyph in replay.marks if glyph in glyphs})


def next_mark(replay: ReplayView, glyphs: str, direction: int) -> int | None:
    """The mark after (or half a second before) the head."""
    times = marks_of(replay, glyphs)
    if direction > 0:
        return next((t for t in times if t > replay.position_us), None)
    return next((t for t in reversed(times) if t < replay.position_us - 500_000), None)


def parse(text: str, replay: ReplayView) -> int:
    """A go-to entry as session µs: `5:30`, `90s`, `+30`, `-1m`, `50%`, `14:02:11` of the day, `C2`, `!3`, `m1`.

    A clock within the recording's length is a position, else a time of day (UTC). Raises ValueError with the reason.
    """
    word = text.strip().replace(" ", "")
    if word[:1] in ("C", "c", "!", "m") and word[1:].isdigit():
        return _numbered(word, replay)
    if word.endswith("%"):
        share = _number(word[:-1]) / 100
        return _within(replay.start_us + round(share * (replay.end_us - replay.start_us)), replay)
    clock = _CLOCK.fullmatch(word)
    if clock:
        hours, minutes, seconds = (float(part or 0) for part in clock.groups())
        return _at_clock(hours * 3600 + minutes * 60 + seconds, replay)
    unit = word[-1:] if word[-1:] in ("s", "m", "h") else ""
    seconds = _number(word.removesuffix(unit)) * _UNITS[unit]
    base = replay.position_us if word[:1] in ("+", "-") else replay.start_us
    return _within(base + round(seconds * 1e6), replay)


def _numbered(word: str, replay: ReplayView) -> int:
    glyph = "C" if word[0] == "c" else word[0]
    times = marks_of(replay, glyph)
    number = int(word[1:])
    if not 1 <= number <= len(times):
        raise ValueError(f"there are {len(times)} marks {glyph}")
    return times[number - 1]


def _at_clock(seconds: float, replay: ReplayView) -> int:
    t = replay.start_us + round(seconds * 1e6)
    if t > replay.end_us and replay.wall_ns is not None:
        day = (replay.wall_ns // 1_000_000_000) % _DAY_S
        t = round(((seconds - day) % _DAY_S) * 1e6)
    if not replay.start_us <= t <= replay.end_us:
        raise ValueError("not within the recording")
    return t


def _within(t: int, replay: ReplayView) -> int:
    return max(replay.start_us, min(replay.end_us, t))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("like 5:30, +30, -1m, 50%, 14:02:11, C2, !1") from None
