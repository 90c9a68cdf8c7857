"""The event list of the screen: who changed the load, notes, bursts of errors, sources, throttling. Must not judge.

At most `KEPT` lines, newest last. Failed requests are gathered: one line per outcome and message of a burst.
"""

import re
from collections.abc import Iterable
from typing import Any

from lpxtop import format
from lpxtop.events.records import Control, Finished, Mark, ServerChanged, Source
from lpxtop.metrics.view import EventLine

KEPT = 200
BURST_US = 10_000_000
"""A failure this long after the last one of its kind begins a new line."""
KINDS_PER_BURST = 8
"""More kinds of message than this at a time share one line per outcome."""
_NUMBERS = re.compile(r"[0-9a-fA-F-]*\d[0-9a-fA-F-]*")


class _Line:
    __slots__ = ("code", "count", "last", "level", "t", "text")

    def __init__(self, t: int, level: str, text: str, code: str | None, last: int = 0) -> None:
        self.t, self.level, self.text, self.code = t, level, text, code
        self.count, self.last = 1, last

    def view(self) -> EventLine:
        text = self.text if self.count == 1 else f"{self.text} (×{self.count})"
        return EventLine(t=self.t, level=self.level, text=text, code=self.code)


class EventLog:
    """Lines in the order they came to be known; `lines` gives them by time."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._bursts: dict[tuple[str, str], _Line] = {}
        self._controls = self._notes = 0

    def add(self, t: int, level: str, text: str, code: str | None = None) -> None:
        self._append(_Line(t, level, format.clean(text, 160), code))

    def _append(self, line: _Line) -> None:
        self._lines.append(line)
        if len(self._lines) > KEPT:
            gone = self._lines.pop(0)
            self._bursts = {key: kept for key, kept in self._bursts.items() if kept is not gone}

    def control(self, event: Control) -> None:
        """Load changes get C1, C2…; the rest of the controls are plain lines."""
        by = "" if event.by in ("key", "done") else f" ({event.by})"
        if event.what not in ("concurrency", "rate"):
            self.add(event.t, "info", f"{event.what}{by}")
            return
        self._controls += 1
        before, after = (_load(event.what, value) for value in (event.before, event.after))
        self.add(event.t, "note", f"{event.what} {before} → {after}{by}", f"C{self._controls}")

    def mark(self, event: Mark) -> None:
        """Notes get m1, m2…; automatic marks keep their own code."""
        if event.level == "note":
            self._notes += 1
            self.add(event.t, "note", event.text, f"m{self._notes}")
        else:
            self.add(event.t, event.level, event.text, event.code)

    def source(self, event: Source) -> None:
        level = {"failed": "error", "unavailable": "warn"}.get(event.state, "info")
        where = f" on {event.host}" if event.host else ""
        why = f": {event.text}" if event.text else ""
        self.add(event.t, level, f"{event.kind} source {event.src}{where} {event.state}{why}")

    def server_changed(self, event: ServerChanged) -> None:
        before, after = event.before or format.UNKNOWN, event.after or format.UNKNOWN
        self.add(event.t, "warn", f"server changed: {event.what} {before} → {after}")

    def failure(self, t: int, request: Finished) -> None:
        """One line per burst and kind of failure, with how often."""
        self._bursts = {key: line for key, line in self._bursts.items() if t - line.last <= BURST_US}
        message = format.clean(request.error or request.error_type or "", 120)
        kind = _NUMBERS.sub("#", message)
        if (request.outcome, kind) not in self._bursts and len(self._bursts) >= KINDS_PER_BURST:
            kind = message = ""
        line = self._bursts.get((request.outcome, kind))
        if line is not None:
            line.count += 1
            line.last = max(line.last, t)
            return
        status = f" {request.status}" if request.status is not None and request.status >= 400 else ""
        line = _Line(t, "error", f"{request.outcome}{status}{': ' if message else ''}{message}", "E", t)
        self._bursts[request.outcome, kind] = line
        self._append(line)

    def lines(self) -> tuple[EventLine, ...]:
        return tuple(line.view() for line in sorted(self._lines, key=_time))

    def snapshot(self) -> dict[str, Any]:
        place = {id(line): index for index, line in enumerate(self._lines)}
        return {
            "lines": [[line.t, line.level, line.text, line.code, line.count, line.last] for line in self._lines],
            "bursts": [[*key, place[id(line)]] for key, line in self._bursts.items() if id(line) in place],
            "controls": self._controls,
            "notes": self._notes,
        }

    def restore(self, state: dict[str, Any]) -> None:
        for t, level, text, code, count, last in state["lines"]:
            line = _Line(t, level, text, code, last)
            line.count = count
            self._lines.append(line)
        self._bursts = {(outcome, kind): self._lines[index] for outcome, kind, index in state["bursts"]}
        self._controls, self._notes = state["controls"], state["notes"]


def _load(what: str, value: float | None) -> str:
    if what == "rate":
        return format.with_unit(value, "req/s")
    return format.count(None if value is None else round(value))


def _time(line: _Line) -> int:
    return line.t


def codes(lines: Iterable[EventLine]) -> tuple[tuple[int, str], ...]:
    """Where charts draw a mark: load changes and notes."""
    return tuple((line.t, line.code) for line in lines if line.code is not None and line.level == "note")
