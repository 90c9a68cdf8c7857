"""The event list: load changes, notes, errors; above it what the tool judges of itself and of the run. Pure lines."""

import time

from lpxtop import format
from lpxtop.metrics.view import EventLine, RunView, Verdict
from lpxtop.tui.look import Look
from lpxtop.tui.panels.chart import centred
from lpxtop.tui.rows import Row, framed, line, pad

_STYLES = {"warn": "warn", "error": "error", "note": "mark", "info": "label"}
_RANKS = {"error": 0, "warn": 1, "info": 2}
_WORDS = {"warn": "! ", "error": "X ", "note": "", "info": ""}


def tail(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """The newest lines without a frame; the first is kept for a verdict when there is one."""
    found = verdicts(view)[: 1 if height < 3 else 2]
    shown = view.events[-(height - len(found)) :] if height > len(found) else ()
    return [*(_verdict(verdict) for verdict in found), *(_row(event, view) for event in shown)][:height]


def verdicts(view: RunView) -> list[Verdict]:
    """Each judgement once, the most serious first."""
    seen = {verdict.code: verdict for verdict in (*view.verdicts, *view.quality.verdicts)}
    return sorted(seen.values(), key=lambda verdict: _RANKS.get(verdict.level, 3))


def lines(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """A framed list, newest last; j and k move in it."""
    title = line(("7 ", "key"), ("events", "title"))
    chosen = look.chosen == "events"
    inner = height - 2
    found = verdicts(view)[: max(1, inner // 3)]
    if not view.events and not found:
        return framed(centred("nothing happened yet", width - 2, inner), width, height, title, chosen=chosen)
    room = max(0, inner - len(found))
    back = min(look.scroll.get("events", 0), max(0, len(view.events) - room))
    end = len(view.events) - back
    rows = [
        *(_verdict(verdict) for verdict in found),
        *(_row(event, view) for event in view.events[max(0, end - room) : end]),
    ]
    caption = line((f"{back} newer below", "label")) if back else ()
    return framed(rows, width, height, title, caption, chosen=chosen)


def _verdict(verdict: Verdict) -> Row:
    style = verdict.level if verdict.level in ("warn", "error") else "label"
    return line((" ! " if style != "label" else "   ", style), (format.clean(verdict.text), style))


def when(event: EventLine, view: RunView) -> str:
    """The time of day of a live event (what other logs say), the position of a replayed one."""
    if view.replay is not None or view.wall_ns is None:
        return format.clock_time(event.t)
    return time.strftime("%H:%M:%S", time.localtime(view.wall_ns / 1e9 + event.t / 1e6))


def _row(event: EventLine, view: RunView) -> Row:
    style = _STYLES.get(event.level, "text")
    word = _WORDS.get(event.level, "")
    code = event.code if event.code and event.code not in ("E",) else ""
    return line((f" {when(event, view)} ", "label"), (pad(code, 4), "mark"), (word + format.clean(event.text), style))
