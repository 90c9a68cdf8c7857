"""Tests between two groups of runs: Mann-Whitney, Hodges-Lehmann, Holm, and a permutation test of a whole family.

Plain numbers in, plain numbers out; a run is one number per figure. Must not know metrics, levels or recordings.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from math import comb, sqrt
from statistics import NormalDist, median

import numpy as np
from numpy.typing import NDArray

_NORMAL = NormalDist()
_EXACT_PAIRS = 2500
_ENUMERATED = 20_000
_FUDGE = 0.002
"""Added to the standard error of a permutation's statistic (natural log, or ratio): a figure that hardly moves from
run to run must not win by moving 0.01 % (the idea of Tusher, Tibshirani and Chu 2001)."""


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p of the Mann-Whitney U test: exact for small groups (with ties by enumeration over midranks), else
    the normal approximation with tie and continuity correction. 1.0 for an empty group."""
    n, m = len(a), len(b)
    if n == 0 or m == 0:
        return 1.0
    ranks = midranks([*a, *b])
    u = sum(ranks[:n]) - n * (n + 1) / 2
    tied = len({*a, *b}) < n + m
    if not tied and n * m <= _EXACT_PAIRS:
        return _exact(n, m, min(u, n * m - u))
    if tied and comb(n + m, n) <= _ENUMERATED:
        return _enumerated(ranks, n, u)
    return _approximate(ranks, n, m, u)


def midranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for place in order[start:end]:
            ranks[place] = (start + 1 + end) / 2
        start = end
    return ranks


@lru_cache(maxsize=64)
def _u_counts(n: int, m: int) -> tuple[int, ...]:
    """How many arrangements give U = 0, 1, … n·m: coefficients of the Gaussian binomial (Mann and Whitney 1947)."""
    ways = [1, *[0] * (n * m)]
    for i in range(1, n + 1):
        for u in range(n * m, m + i - 1, -1):
            ways[u] -= ways[u - m - i]
        for u in range(i, n * m + 1):
            ways[u] += ways[u - i]
    return tuple(ways)


def _exact(n: int, m: int, low: float) -> float:
    counts = _u_counts(n, m)
    return min(1.0, 2 * sum(counts[: int(low) + 1]) / comb(n + m, n))


def _enumerated(ranks: Sequence[float], n: int, u: float) -> float:
    middle = n * (len(ranks) - n) / 2
    shift = n * (n + 1) / 2
    seen = [abs(sum(chosen) - shift - middle) for chosen in combinations(ranks, n)]
    return sum(far >= abs(u - middle) - 1e-9 for far in seen) / len(seen)


def _approximate(ranks: Sequence[float], n: int, m: int, u: float) -> float:
    total = n + m
    groups = [ranks.count(rank) for rank in set(ranks)]
    ties = sum(size**3 - size for size in groups) / (total * (total - 1))
    variance = n * m / 12 * (total + 1 - ties)
    if variance <= 0:
        return 1.0
    z = max(0.0, abs(u - n * m / 2) - 0.5) / sqrt(variance)
    return min(1.0, 2 * (1 - _NORMAL.cdf(z)))


def hodges_lehmann(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """The shift from `a` to `b`: median of all differences b − a, and its interval by inverting the exact test (the
    normal approximation for large groups). With few runs the interval is as wide as the differences go."""
    differences = sorted(y - x for x in a for y in b)
    pairs = len(differences)
    cut = max(0, _critical(len(a), len(b), (1 - confidence) / 2) - 1)
    return median(differences), differences[cut], differences[pairs - 1 - cut]


def _critical(n: int, m: int, tail: float) -> int:
    """The largest k with P(U ≤ k − 1) ≤ tail: that many differences are cut off at each end."""
    if n * m > _EXACT_PAIRS:
        deviation = sqrt(n * m * (n + m + 1) / 12)
        return max(0, int(n * m / 2 + _NORMAL.inv_cdf(tail) * deviation))
    allowed, seen = tail * comb(n + m, n), 0
    for k, ways in enumerate(_u_counts(n, m)):
        seen += ways
        if seen > allowed:
            return k
    return 0


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted so that the whole family errs at the nominal rate (Holm 1979); the order is kept."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    adjusted = [1.0] * len(p_values)
    highest = 0.0
    for place, index in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - place) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def permuted(figures: Sequence[tuple[Sequence[float], Sequence[float]]], seed: int, limit: int = 5000) -> list[float]:
    """p values for a family of figures, adjusted for the whole family by permuting runs (step-down maxT of Westfall
    and Young 1993). Every figure has the same runs.

    Holm over Mann-Whitney could never find anything with 5 runs a side: its smallest p, 0.008, times 16 figures is
    0.13. Permuting whole runs keeps how figures move together, so the correction costs only what it must.
    """
    if not figures:
        return []
    n, m = len(figures[0][0]), len(figures[0][1])
    rows = np.array([[*a, *b] for a, b in figures], dtype=np.float64)
    chosen = _splits(n, m, seed, limit)
    statistics = _statistics(rows, chosen)
    observed = statistics[:, 0]
    order = np.argsort(-observed, kind="stable")
    highest = np.maximum.accumulate(statistics[order][::-1], axis=0)[::-1]
    p_values = (highest >= observed[order][:, None] - 1e-12).mean(axis=1)
    adjusted = np.empty(len(figures))
    adjusted[order] = np.maximum.accumulate(p_values)
    return [float(p) for p in adjusted]


def _splits(n: int, m: int, seed: int, limit: int) -> NDArray[np.float64]:
    """Memberships of group A, one row per split, the true one first; all splits where they are few."""
    true = np.array([[1.0] * n + [0.0] * m])
    if comb(n + m, n) <= limit:
        found = np.zeros((comb(n + m, n), n + m))
        for row, chosen in enumerate(combinations(range(n + m), n)):
            found[row, list(chosen)] = 1.0
        return found
    rng = np.random.default_rng(seed)
    return np.concatenate([true, rng.permuted(np.repeat(true, limit - 1, axis=0), axis=1)])


def _statistics(rows: NDArray[np.float64], chosen: NDArray[np.float64]) -> NDArray[np.float64]:
    """|mean B − mean A| over its standard error, figures × splits."""
    centred = rows - rows.mean(axis=1, keepdims=True)
    squares = centred**2
    n, m = chosen[0].sum(), (1 - chosen[0]).sum()
    mean_a, mean_b = centred @ chosen.T / n, centred @ (1 - chosen).T / m
    rest_a = np.maximum(squares @ chosen.T - n * mean_a**2, 0) / max(n - 1, 1)
    rest_b = np.maximum(squares @ (1 - chosen).T - m * mean_b**2, 0) / max(m - 1, 1)
    found: NDArray[np.float64] = np.abs(mean_b - mean_a) / (np.sqrt(rest_a / n + rest_b / m) + _FUDGE)
    return found
