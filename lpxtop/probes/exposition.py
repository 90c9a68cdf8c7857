"""Prometheus and OpenMetrics text to numbers, only of the series somebody wants. Must not know what they mean.

A server writes the same series at every scrape, so everything before the value is looked up, not parsed, from the
second scrape on; half a megabyte is mostly series nobody asked for.
"""

import math
import re
from collections.abc import Callable

import msgspec

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPE = re.compile(r"\\(.)")
_CHARACTERS = {"n": "\n", '"': '"', "\\": "\\"}
MAX_SERIES = 200_000
"""More different series than this in a parser's life are somebody's request ids: everything is forgotten."""


class Series(msgspec.Struct, frozen=True, eq=False):
    """One line without its value: `number` counts series from 0, `name` and `text` are as exposed. `group` is the same
    for the buckets of one histogram: all labels but `le`."""

    number: int
    name: str
    labels: dict[str, str]
    text: str
    group: str


class Parser:
    """Reads one server's expositions. `keep` decides by a sample's exposed name, once per name."""

    def __init__(self, keep: Callable[[str], bool]) -> None:
        self._keep = keep
        self._kept_names: dict[str, bool] = {}
        self._known: dict[str, Series | None] = {}
        self._label_sets: dict[str, tuple[dict[str, str], str] | None] = {}
        self._count = 0
        self.damaged = 0

    @property
    def names(self) -> set[str]:
        """Every sample name seen so far, wanted or not."""
        return set(self._kept_names)

    def parse(self, text: str) -> dict[Series, float]:
        """The wanted series and their values, NaN and infinities included. Damaged lines are counted in `damaged` and
        left out; timestamps and exemplars are ignored; a series that occurs twice has its last value."""
        if len(self._known) > MAX_SERIES:
            self._known.clear()
            self._label_sets.clear()
        found: dict[Series, float] = {}
        known = self._known
        for line in text.split("\n"):
            if not line or line[0] == "#":
                continue
            head, brace, tail = line.rpartition("} ") if "{" in line else line.partition(" ")
            if not brace or " # " in line:  # tabs, or an exemplar, which has braces of its own
                head, brace, tail = _split(line)
            series = known.get(head, self)
            if series is self:
                series = known[head] = self._new(head + brace.rstrip())
            if series is not None:
                value = _number(tail)
                if value is None:
                    self.damaged += 1
                else:
                    found[series] = value  # type: ignore[index]
        return found

    def _new(self, text: str) -> Series | None:
        """A series seen for the first time; None if nobody wants it, or it is none."""
        name, brace, labels = text.partition("{")
        name = name.rstrip()
        keep = self._kept_names.get(name)
        if keep is None:
            if not _NAME.fullmatch(name):
                self.damaged += bool(text.strip())
                return None
            keep = self._kept_names[name] = self._keep(name)
        if not keep:
            return None
        if labels not in self._label_sets:
            self._label_sets[labels] = _labels(brace + labels)
        parsed = self._label_sets[labels]
        if parsed is None:
            self.damaged += 1
            return None
        self._count += 1
        return Series(self._count - 1, name, parsed[0], text, parsed[1])


def _split(line: str) -> tuple[str, str, str]:
    """Series, separator and value of any line. It may end in ` # {trace_id="…"} 0.5`; a label may hold ` # ` too."""
    match = _NAME.match(line)
    position = match.end() if match else 0
    brace = line[position : position + 1] == "{"
    if brace:
        position += 1
        while match := _LABEL.match(line, position):
            position = match.end()
    tail = line[position:].partition(" # ")[0].lstrip()
    if brace and tail[:1] != "}":
        return line, "", ""
    return line[:position], "} " if brace else " ", tail[brace:]


def _labels(text: str) -> tuple[dict[str, str], str] | None:
    """The labels between braces, and all but `le` as text; None when they are damaged."""
    labels: dict[str, str] = {}
    if text:
        position = 1
        while match := _LABEL.match(text, position):
            name, value = match.groups()
            labels[name] = _unescape(value) if "\\" in value else value
            position = match.end()
        if text[position:].strip() != "}":
            return None
    return labels, "\x00".join(f"{name}={labels[name]}" for name in sorted(labels) if name != "le")


def _unescape(value: str) -> str:
    return _ESCAPE.sub(lambda match: _CHARACTERS.get(match.group(1), match.group(0)), value)


def _number(text: str) -> float | None:
    """The value; what follows it is a timestamp."""
    try:
        return float(text)
    except ValueError:
        pass
    words = text.split()
    try:
        return float(words[0]) if 0 < len(words) <= 2 else None
    except ValueError:
        return None


def finite(value: float) -> float | None:
    """The value, or None for NaN and infinities: they are kept out of sums and charts."""
    return value if math.isfinite(value) else None
