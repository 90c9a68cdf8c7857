"""A finding: a cause with its evidence and the next step to try, and the rule that makes one. Must not hold rules."""

from collections.abc import Callable
from typing import Any

import msgspec

from lpxtop import format
from lpxtop.metrics.evidence import Evidence
from lpxtop.metrics.view import Verdict

FIRST, CAUSE, HINT = 3.0, 2.0, 1.0
"""Classes of weight: the answers themselves are wrong or do not come; a cause; something to know. A share of 0..1,
how much it explains, is added."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`evidence` holds numbers, their unit at the end of each name (None: not known, left out of the verdict);
    `weight` is a class plus what it explains."""

    code: str
    text: str
    next_step: str
    weight: float
    evidence: dict[str, Any]
    level: str = "warn"

    def verdict(self) -> Verdict:
        known = {name: value for name, value in self.evidence.items() if value is not None}
        return Verdict(code=self.code, text=self.text, level=self.level, evidence=known, next_step=self.next_step)


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table. `needs` says in words which facts it takes; it is silent when one of `yields_to` speaks.

    `of_level`: what it finds belongs to a load level, and a summary of several levels says to which.
    """

    code: str
    needs: str
    find: Callable[[Evidence], Finding | None]
    yields_to: frozenset[str] = frozenset()
    of_level: bool = True


def share(value: float) -> float:
    """A share as the part of a weight that explains."""
    return min(0.99, max(0.0, value))


def about(value: float | None) -> str:
    """A mean or a count in a sentence: 3, 0.25, 1 284."""
    if value is None:
        return format.UNKNOWN
    return format.significant(value) if abs(value) >= 1000 else f"{value:.3g}"
