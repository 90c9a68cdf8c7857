"""Prometheus and OpenMetrics text to samples, only of the families that are wanted. Pure; must not know concepts.

Half a megabyte is mostly families nobody asked for: lines are dropped by their name before anything is parsed.
"""

import math
import re
from collections.abc import Iterator

import msgspec

_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SUFFIXES = ("_total", "_bucket", "_sum", "_count")


class Sample(msgspec.Struct, frozen=True):
    """One line: `name` as exposed, its labels, its value (NaN and infinities included)."""

    name: str
    labels: dict[str, str]
    value: float


def parse(text: str, wanted: frozenset[str]) -> Iterator[Sample]:
    """Samples whose family (the name without `_total`, `_bucket`, `_sum`, `_count`) is wanted. Damaged lines are
    left out; exemplars and timestamps are ignored."""
    for line in text.splitlines():
        match = _NAME.match(line)
        if match is None:
            continue
        name = match.group()
        if name not in wanted and family(name) not in wanted:
            continue
        sample = _sample(name, line[match.end() :])
        if sample is not None:
            yield sample


def family(name: str) -> str:
    """The family of a sample's name."""
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return name


def families(text: str) -> set[str]:
    """Every family of an exposition, for telling servers apart."""
    return {family(match.group()) for match in map(_NAME.match, text.splitlines()) if match}


def _sample(name: str, rest: str) -> Sample | None:
    labels: dict[str, str] = {}
    rest = rest.lstrip()
    if rest[:1] == "{":
        position = 1
        while match := _LABEL.match(rest, position):
            labels[match.group(1)] = re.sub(r"\\.", lambda m: _ESCAPES.get(m.group(), m.group()), match.group(2))
            position = match.end()
        closing = rest.find("}", position)
        if closing < 0:
            return None
        rest = rest[closing + 1 :]
    words = rest.split()
    if not words:
        return None
    try:
        return Sample(name, labels, float(words[0]))
    except ValueError:
        return None


def finite(value: float) -> float | None:
    """The value, or None for NaN and infinities: they are kept out of sums and charts."""
    return value if math.isfinite(value) else None
