"""Service-level objectives: `ttft<500ms,tpot<50ms` to terms, and whether one request meets them.

Keys are those of the definitions that one finished request answers. Must not aggregate: the state counts.
"""

import operator
import re
from collections.abc import Callable, Iterable

import msgspec

from lpxtop.errors import UsageError
from lpxtop.events.records import Finished
from lpxtop.metrics.definitions import PER_REQUEST, Metric, e2e, first_chunk_tokens

_TERM = re.compile(r"\s*([A-Za-z_][\w-]*)\s*(<=|>=|<|>|≤|≥)\s*(\d+(?:\.\d+)?)\s*([A-Za-zµ/]*)\s*")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
_TO_MS = {"us": 0.001, "µs": 0.001, "ms": 1.0, "s": 1000.0}
_ROWS = {row.key: row for row in PER_REQUEST}
_EXAMPLE = "write terms like ttft<500ms,tpot<50ms,e2e<5s"


class Term(msgspec.Struct, frozen=True):
    """One objective: `key` compared with `limit`, in the unit of the key's definition."""

    key: str
    op: str
    limit: float

    def __str__(self) -> str:
        row = _ROWS[self.key]
        return f"{self.key}{self.op}{self.limit:g}{row.unit}"

    def met(self, request: Finished) -> bool:
        """Whether the request meets it. A quantity that does not exist is not met, with one exception: a whole
        answer without a token after its first chunk has no per-token latency to violate."""
        value = _ROWS[self.key].value(request)
        if value is None:
            return self.key in ("tpot", "tokens_per_s_per_user") and _one_chunk(request)
        return _COMPARE[self.op](value, self.limit)


def parse(text: str) -> tuple[Term, ...]:
    """The terms of a comma-separated text. Raises UsageError naming the term that is wrong."""
    return tuple(_term(part) for part in text.split(",") if part.strip())


def parse_all(texts: Iterable[str]) -> tuple[Term, ...]:
    """The terms of several texts, as a plan or a header holds them."""
    return tuple(term for text in texts for term in parse(text))


def meets(terms: Iterable[Term], request: Finished) -> bool:
    """Whether a finished request is good: ok, with every term met."""
    return request.outcome == "ok" and all(term.met(request) for term in terms)


def _term(text: str) -> Term:
    match = _TERM.fullmatch(text)
    if match is None:
        raise UsageError(f"SLO term {text.strip()!r} is not a key, a comparison and a number", _EXAMPLE)
    key, op, number, unit = match.groups()
    row = _ROWS.get(key.lower().replace("-", "_"))
    if row is None:
        raise UsageError(f"SLO term {text.strip()!r}: no per-request metric is called {key!r}",
                         f"known: {', '.join(_ROWS)}")  # fmt: skip
    return Term(row.key, op.replace("≤", "<=").replace("≥", ">="), _limit(float(number), unit, row, text.strip()))


def _limit(number: float, unit: str, row: Metric, text: str) -> float:
    """The number in the row's unit; a latency needs its unit spelled out, because 0.5 could be either."""
    if row.unit == "ms":
        if unit not in _TO_MS:
            raise UsageError(f"SLO term {text!r}: give a unit, ms or s", _EXAMPLE)
        return number * _TO_MS[unit]
    if unit not in ("", row.unit, "/s"):
        raise UsageError(f"SLO term {text!r}: {row.key} is in {row.unit}, not {unit!r}", _EXAMPLE)
    return number


def _one_chunk(request: Finished) -> bool:
    out = request.output_tokens
    return e2e(request) is not None and out is not None and out <= first_chunk_tokens(request)
