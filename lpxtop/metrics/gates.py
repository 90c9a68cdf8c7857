"""Gates: `p95 ttft > +10%` or `p95 ttft > 800ms` to a condition that fails a run or a comparison.

    gate    := [figure] metric op limit
    figure  := p50 | p90 | p95 | p99 | mean | max        (latencies; in a comparison p50, p95, p99)
    op      := < | <= | > | >=
    limit   := number unit        an absolute value: 800ms, 1.2s, 20 req/s; 5% of an error rate
             | +number% | -number%  a change from A to B; of an error rate in percentage points

A gate says what must NOT be: it fails when its condition holds. Must not know where values come from.
"""

import operator
import re
from collections.abc import Callable
from typing import Literal

import msgspec

from lpxtop.errors import UsageError
from lpxtop.metrics import definitions

_TEXT = re.compile(
    r"\s*(?:(p\d+(?:\.\d+)?|mean|max)\s+)?([A-Za-z][\w-]*)\s*(<=|>=|<|>|≤|≥)\s*([+\-−]?)\s*(\d+(?:\.\d+)?)\s*(.*?)\s*",
    re.IGNORECASE,
)
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_TO_MS = {"us": 0.001, "µs": 0.001, "ms": 1.0, "s": 1000.0}
_FIGURES = ("p50", "p90", "p95", "p99", "mean", "max")
_RATES = ("output_tokens_per_s", "input_tokens_per_s", "requests_per_s", "goodput", "error_rate", "attainment",
          "energy_per_token_j", "tokens_per_s_per_gpu")  # fmt: skip
_LATENCIES = ("ttft", "ttft_due", "ttft_any", "ttfo", "icl", "itl", "tpot", "e2e", "schedule_delay")
_NAMES = {"throughput": "output_tokens_per_s", "errors": "error_rate", "tokens_per_s": "output_tokens_per_s"}
_EXAMPLE = 'write gates like "p95 ttft > +10%", "p99 itl > 80ms", "output_tokens_per_s < -5%", "error_rate > 1%"'

State = Literal["passed", "failed", "unknown"]


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """One gate. `limit` is in the metric's unit (ratios 0..1), or for a `relative` one in percent (percentage points
    for a ratio)."""

    text: str
    key: str
    figure: str | None
    op: str
    limit: float
    relative: bool

    def holds(self, value: float) -> bool:
        """Whether the condition is true of a value: the gate fails."""
        return _COMPARE[self.op](value, self.limit)

    def proven(self, low: float, high: float) -> bool:
        """Whether it is true of the whole interval, so that noise alone cannot fail a gate."""
        return self.holds(low if self.op in (">", ">=") else high)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a gate. `unknown` fails a build too: a gate that could not be judged must not let one pass."""

    gate: str
    state: State
    text: str
    level: str | None = None


def parse(text: str) -> Gate:
    """One gate. Raises UsageError saying which part is wrong."""
    shown = text.strip()
    match = _TEXT.fullmatch(text)
    if match is None:
        raise UsageError(f"gate {shown!r} is not [figure] metric comparison limit", _EXAMPLE)
    figure, name, op, sign, number, unit = match.groups()
    key = _key(name, shown)
    figure = _figure(figure, key, shown)
    op = op.replace("≤", "<=").replace("≥", ">=")
    if sign:
        if unit != "%":
            raise UsageError(f"gate {shown!r}: a change needs %, like {sign}{number}%", _EXAMPLE)
        value = float(number) * (1 if sign == "+" else -1)
        return Gate(text=shown, key=key, figure=figure, op=op, limit=value, relative=True)
    limit = _absolute(float(number), unit, definitions.BY_KEY[key], shown)
    return Gate(text=shown, key=key, figure=figure, op=op, limit=limit, relative=False)


def _key(name: str, shown: str) -> str:
    key = name.lower().replace("-", "_")
    key = _NAMES.get(key, key)
    if key not in (*_LATENCIES, *_RATES):
        raise UsageError(f"gate {shown!r}: no metric is called {name!r}", f"known: {', '.join((*_LATENCIES, *_RATES))}")
    return key


def _figure(figure: str | None, key: str, shown: str) -> str | None:
    if key in _RATES:
        if figure is not None:
            raise UsageError(f"gate {shown!r}: {key} has no {figure}, leave it out", _EXAMPLE)
        return None
    if figure is None or figure.lower() not in _FIGURES:
        what = f"has no {figure}" if figure else "needs a figure before it"
        raise UsageError(f"gate {shown!r}: {key} {what}", f"one of {', '.join(_FIGURES)}, like p95 {key}")
    return figure.lower()


def _absolute(number: float, unit: str, row: definitions.Metric, shown: str) -> float:
    if row.unit == "ms":
        if unit not in _TO_MS:
            raise UsageError(
                f"gate {shown!r}: give a unit, ms or s; or a sign for a change", f"{row.key} > {number:g}ms or +10%"
            )
        return number * _TO_MS[unit]
    if row.unit == "ratio":
        if unit not in ("%", ""):
            raise UsageError(f"gate {shown!r}: {row.key} is a ratio, like 0.01 or 1%", _EXAMPLE)
        return number / 100 if unit == "%" else number
    if unit == "%":
        raise UsageError(f"gate {shown!r}: say which way the change goes, +{number:g}% or -{number:g}%", _EXAMPLE)
    if unit not in ("", row.unit, "/s"):
        raise UsageError(f"gate {shown!r}: {row.key} is in {row.unit}, not {unit!r}", _EXAMPLE)
    return number
