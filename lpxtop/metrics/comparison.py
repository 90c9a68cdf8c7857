"""The records of a comparison: figures, levels, the whole. Must not compute more than the scale of a shift."""

from math import exp, log, log1p
from typing import Literal

import msgspec

from lpxtop.metrics.comparability import Difference

Word = Literal["better", "worse", "same", "undecided"]
Load = tuple[str, float]
Loads = tuple[Load, ...]

BAND = 0.05
"""Differences below this do not matter in practice."""
POINTS_BAND = 0.01
"""The same for ratios such as the error rate, in absolute terms."""
ALPHA = 0.05
MIN_RUNS = 5
MIN_BLOCKS = 20
FEW_BLOCKS = 5
LATENCIES = ("ttft", "ttft_due", "itl", "icl", "tpot", "e2e")
LINEAR = ("error_rate",)
"""Compared as they are, in points, because they may be 0."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one level. `a`, `b` in the metric's unit, the median over a side's runs. `difference` and
    `interval` are ratios − 1 (0.1: B is 10 % higher), for `points` figures plain differences; the interval is 95 %
    for this row alone. `p` is adjusted for the whole family."""

    key: str
    figure: str | None
    a: float | None
    b: float | None
    points: bool = False
    difference: float | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None
    band: float = BAND
    verdict: Word = "undecided"
    why: str = ""


class LevelResult(msgspec.Struct, frozen=True, kw_only=True):
    """One load that both sides have. `unsteady` names the sides that drifted; `block_s` and `blocks`
    are only of the bootstrap."""

    load: Load
    ended: tuple[int, int]
    seconds: tuple[float, float]
    rows: tuple[Row, ...]
    unsteady: tuple[str, ...] = ()
    block_s: int | None = None
    blocks: int | None = None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result. `reasons` say why it is not comparable; `caveats` what a reader must know of the method."""

    a: tuple[str, ...]
    b: tuple[str, ...]
    comparable: bool
    reasons: tuple[str, ...]
    differences: tuple[Difference, ...]
    same: tuple[tuple[str, str], ...]
    levels: tuple[LevelResult, ...]
    only: tuple[Loads, Loads]
    method: Literal["runs", "bootstrap"]
    caveats: tuple[str, ...]
    family: int = 0
    simulated: bool = False


def scale(row: Row, value: float | None) -> float:
    """Ratios are compared as logarithms, shares as they are."""
    if value is None:
        return 0.0
    return value if row.points else log(value)


def unscale(row: Row, shift: float) -> float:
    return shift if row.points else exp(shift) - 1


def reach(row: Row) -> float:
    """The row's band on the scale of shifts."""
    return row.band if row.points else log1p(row.band)
