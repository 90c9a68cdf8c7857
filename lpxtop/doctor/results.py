"""What a check says: records of one outcome, of a result, of the whole report. Must not look at anything itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import msgspec

Status = Literal["pass", "warn", "fail", "skip"]
ORDER: tuple[Status, ...] = ("fail", "warn", "pass", "skip")
"""Worst first; a skip says nothing."""


class Outcome(msgspec.Struct, frozen=True):
    """One check's word: a sentence, what to do (empty: nothing), and the raw values it was judged by."""

    status: Status
    text: str
    advice: str = ""
    evidence: dict[str, Any] = {}


def passed(text: str, /, **evidence: Any) -> Outcome:
    return Outcome("pass", text, "", evidence)


def noted(text: str, advice: str, /, **evidence: Any) -> Outcome:
    """Nothing wrong, but worth knowing."""
    return Outcome("pass", text, advice, evidence)


def warned(text: str, advice: str, /, **evidence: Any) -> Outcome:
    return Outcome("warn", text, advice, evidence)


def failed(text: str, advice: str, /, **evidence: Any) -> Outcome:
    return Outcome("fail", text, advice, evidence)


def skipped(text: str, advice: str = "", /, **evidence: Any) -> Outcome:
    """Could not be known, or does not apply here."""
    return Outcome("skip", text, advice, evidence)


def worst(outcomes: list[Outcome]) -> Outcome:
    """One outcome of several: the worst status, the texts and the advice of all that share it."""
    status = min((outcome.status for outcome in outcomes), key=ORDER.index)
    same = [outcome for outcome in outcomes if outcome.status == status]
    evidence: dict[str, Any] = {}
    for outcome in outcomes:
        evidence |= outcome.evidence
    return Outcome(status, "; ".join(o.text for o in same), _joined([o.advice for o in same]), evidence)


def _joined(advices: list[str]) -> str:
    return "; ".join(dict.fromkeys(filter(None, advices)))


Subject = TypeVar("Subject")


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """A row of the table. `id` is stable: scripts name it in --only and --skip.

    `needs` is a name the subject answers for: why the check cannot be made (see `Node.lacks`, `Visit.lacks`).
    """

    id: str
    title: str
    source: str
    rule: str
    look: Callable[[Subject], Outcome]
    needs: str = ""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """An outcome with the check it belongs to."""

    id: str
    title: str
    source: str
    status: Status
    text: str
    advice: str
    evidence: dict[str, Any]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All results, in the table's order. `url` is the endpoint's base; None when only the host was examined."""

    checks: tuple[Result, ...]
    url: str | None = None
    host: str = ""

    @property
    def counts(self) -> dict[Status, int]:
        """How many checks ended how."""
        return {status: sum(c.status == status for c in self.checks) for status in ("pass", "warn", "fail", "skip")}

    @property
    def exit_code(self) -> int:
        """1 when something failed, else 0: a warning is for a person, not for a script."""
        return 1 if self.counts["fail"] else 0
