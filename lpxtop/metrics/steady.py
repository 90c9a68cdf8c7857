"""Was it steady? A drift test on per-second values, and Little's law. Pure arithmetic; must not know where values
come from.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import copysign, inf, sqrt

import msgspec

MIN_SECONDS = 20
"""Fewer values than this say nothing about drift."""


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """A trend over the series: `change` from first to last second as a ratio of the mean, and its t value."""

    what: str
    change: float
    t: float

    @property
    def real(self) -> bool:
        """More than a tenth, and more than noise explains."""
        return abs(self.change) > 0.10 and abs(self.t) > 3


def drift(what: str, values: Sequence[float | None]) -> Drift | None:
    """Least-squares slope of one value per second, its error widened for lag-1 autocorrelation of the residuals
    (effective sample size n·(1 − ρ)/(1 + ρ)). None where there are too few values."""
    points = [(x, y) for x, y in enumerate(values) if y is not None]
    n = len(points)
    if n < MIN_SECONDS:
        return None
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    if mean_y == 0:
        return None
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = [y - mean_y - slope * (x - mean_x) for x, y in points]
    error = sqrt(sum(r * r for r in rest) / (n - 2) / spread) * _widening(rest)
    change = slope * (points[-1][0] - points[0][0]) / mean_y
    if abs(change) < 1e-9:
        return Drift(what=what, change=0.0, t=0.0)
    return Drift(what=what, change=change, t=slope / error if error > 0 else copysign(inf, slope))


def _widening(rest: Sequence[float]) -> float:
    power = sum(r * r for r in rest)
    if power == 0:
        return 1.0
    correlation = sum(a * b for a, b in pairwise(rest)) / power
    bounded = min(max(correlation, 0.0), 0.95)
    return sqrt((1 + bounded) / (1 - bounded))


class Little(msgspec.Struct, frozen=True, kw_only=True):
    """Little's law over a stretch: mean in flight against completions per second × mean time in the system."""

    in_flight: float
    per_s: float
    residence_s: float

    @property
    def gap(self) -> float:
        """How far the two sides are apart, as a ratio of what was in flight."""
        return abs(self.in_flight - self.per_s * self.residence_s) / self.in_flight


def little(in_flight: Sequence[float | None], ended: int, residence_us: int) -> Little | None:
    """From one in-flight value per second. None where the stretch is too short to judge (under ten times a request's
    time, or under 100 requests)."""
    known = [value for value in in_flight if value is not None]
    mean = sum(known) / len(known) if known else 0.0
    if ended < 100 or mean <= 0 or len(known) < len(in_flight):
        return None
    residence_s = residence_us / ended / 1e6
    if len(known) < 10 * residence_s:
        return None
    return Little(in_flight=mean, per_s=ended / len(known), residence_s=residence_s)
