"""A check that is judged GPU by GPU and says the worst. Must not know what is judged."""

from collections.abc import Callable
from typing import Any

from lpxtop.doctor.card import Card
from lpxtop.doctor.node import Node
from lpxtop.doctor.results import Check, Outcome, skipped, worst

Judge = Callable[[Card], Outcome | None]


def each_gpu(judge: Judge, unknown: str) -> Callable[[Node], Outcome]:
    """A check that judges GPU by GPU and says the worst; `judge` gives None where a GPU does not tell."""

    def look(node: Node) -> Outcome:
        found = [(card.label, outcome) for card in node.nvml.cards if (outcome := judge(card)) is not None]
        if not found:
            return skipped(unknown)
        if len({(outcome.status, outcome.text) for _, outcome in found}) == 1:
            outcome = found[0][1]
            return Outcome(outcome.status, f"{_all(len(found))}: {outcome.text}", outcome.advice, _evidence(found))
        whole = worst([_named(label, outcome) for label, outcome in found])
        return Outcome(whole.status, whole.text, whole.advice, _evidence(found))

    return look


def _all(number: int) -> str:
    return "the GPU" if number == 1 else f"all {number} GPUs"


def _named(label: str, outcome: Outcome) -> Outcome:
    return Outcome(outcome.status, f"{label}: {outcome.text}", outcome.advice)


def _evidence(found: list[tuple[str, Outcome]]) -> dict[str, Any]:
    return {label: outcome.evidence for label, outcome in found if outcome.evidence}


def row(name: str, title: str, source: str, rule: str, *, each: Judge, untold: str = "not told") -> Check[Node]:
    """A check that judges GPU by GPU."""
    return Check(name, title, source, rule, each_gpu(each, untold), needs="nvml")
