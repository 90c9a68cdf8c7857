"""Block bootstrap of one load level: how far its figures would wander if the same stretch were measured again.

Whole blocks of time are drawn with everything in them (circular blocks, Politis and Romano 1992), so neither tokens
nor requests pass for independent. Must not know what is better or worse, nor where samples come from.
"""

from collections.abc import Sequence
from math import ceil, log

import msgspec
import numpy as np
from numpy.typing import NDArray

from lpxtop.events.buckets import GAMMA
from lpxtop.metrics.distribution import Counts

Floats = NDArray[np.float64]
_CHUNK = 4_000_000
MIN_BLOCK_S = 5


class Stretch(msgspec.Struct, frozen=True):
    """One measured stretch of a level in cells of a second; every array has one entry per cell, `requests` holds per
    metric the cell and the value of each request, `gaps` log buckets of µs by cell."""

    cells: int
    requests: dict[str, tuple[Sequence[int], Sequence[float]]]
    gaps: dict[str, dict[int, Counts]]
    sums: dict[str, Sequence[float]]


class Pool:
    """The stretches of one side behind each other."""

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self.lengths = [stretch.cells for stretch in stretches]
        self.cells = sum(self.lengths)
        starts = np.cumsum([0, *self.lengths])[:-1]
        pairs = list(zip(stretches, starts, strict=True))
        self._values = {key: self._sorted(pairs, key) for key in stretches[0].requests}
        self._gaps = {key: self._grid(pairs, key) for key in stretches[0].gaps}
        self._sums = {
            key: np.concatenate([np.asarray(stretch.sums[key], dtype=np.float64) for stretch in stretches])
            for key in stretches[0].sums
            if all(key in stretch.sums for stretch in stretches)
        }

    @staticmethod
    def _sorted(pairs: Sequence[tuple[Stretch, int]], key: str) -> tuple[NDArray[np.int64], Floats]:
        cells = np.concatenate([np.asarray(stretch.requests[key][0], dtype=np.int64) + at for stretch, at in pairs])
        values = np.concatenate([np.asarray(stretch.requests[key][1], dtype=np.float64) for stretch, _ in pairs])
        order = np.argsort(values, kind="stable")
        return cells[order], values[order]

    def _grid(self, pairs: Sequence[tuple[Stretch, int]], key: str) -> tuple[int, Floats]:
        """Cells × buckets from the lowest bucket on."""
        used = [bucket for stretch, _ in pairs for counts in stretch.gaps[key].values() for bucket in counts]
        low, high = min(used, default=0), max(used, default=0)
        grid = np.zeros((self.cells, high - low + 1))
        for stretch, at in pairs:
            for cell, counts in stretch.gaps[key].items():
                for bucket, n in counts.items():
                    grid[at + cell, bucket - low] += n
        return low, grid

    # --- figures under weights ------------------------------------------------------------------------------------

    def quantiles(self, key: str, ranks: Sequence[float], weights: Floats) -> Floats:
        """ln of the quantiles of a metric, draws × ranks; nan where a draw holds nothing."""
        return self._of_gaps(key, ranks, weights) if key in self._gaps else self._of_values(key, ranks, weights)

    def _of_values(self, key: str, ranks: Sequence[float], weights: Floats) -> Floats:
        cells, values = self._values[key]
        found = np.full((len(weights), len(ranks)), np.nan)
        if not len(values):
            return found
        logs = np.log(np.maximum(values, 1e-9))
        small = weights.astype(np.float32)  # counts: exact up to 2**24, and half the memory to move
        step = max(1, _CHUNK // len(values))
        for first in range(0, len(weights), step):
            reached = np.cumsum(small[first : first + step].take(cells, axis=1), axis=1)
            for column, rank in enumerate(ranks):
                target = np.ceil(reached[:, -1] * np.float64(rank) - 1e-9)
                places = (reached < target[:, None]).sum(axis=1)
                found[first : first + step, column] = logs[np.minimum(places, len(logs) - 1)]
            found[first : first + step][reached[:, -1] <= 0] = np.nan
        return found

    def _of_gaps(self, key: str, ranks: Sequence[float], weights: Floats) -> Floats:
        """Within its bucket a quantile is placed by its share of the bucket's count, for the sake of smooth draws."""
        low, grid = self._gaps[key]
        reached = np.cumsum(np.maximum(weights @ grid, 0), axis=1)
        found = np.full((len(weights), len(ranks)), np.nan)
        for row, below in enumerate(reached):
            if below[-1] <= 0:
                continue
            for column, rank in enumerate(ranks):
                target = below[-1] * rank
                place = min(int(np.searchsorted(below, target)), len(below) - 1)
                before = below[place - 1] if place else 0.0
                share = (target - before) / (below[place] - before)
                found[row, column] = (low + place + share) * log(GAMMA)
        return found

    def ratio(self, above: str, below: str | None, weights: Floats) -> Floats | None:
        """Weighted sum of one quantity over another's (over the cells if None); None where it was not measured."""
        if above not in self._sums or (below is not None and below not in self._sums):
            return None
        under = weights.sum(axis=1) if below is None else weights @ self._sums[below]
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Floats = (weights @ self._sums[above]) / under
        return found

    # --- weights --------------------------------------------------------------------------------------------------

    def once(self) -> Floats:
        """Every cell as it was."""
        return np.ones((1, self.cells))

    def halves(self) -> Floats:
        """The first and the second half of every stretch."""
        first = np.concatenate([np.arange(length) < length / 2 for length in self.lengths])
        return np.stack([first, ~first]).astype(np.float64)

    def blocks(self, block_s: int) -> int:
        """How many blocks of that length there are."""
        return sum(length // block_s for length in self.lengths)

    def draws(self, block_s: int, count: int, rng: np.random.Generator) -> Floats:
        """How often each cell is drawn, draws × cells."""
        return np.concatenate([_circular(length, block_s, count, rng) for length in self.lengths], axis=1)

    def block_s(self, longest_request_s: float) -> int:
        """Length of a block: ten times the time over which values remember each other, one request, 5 s at least."""
        remembered = max((memory(series) for series in self._series()), default=0.0)
        return max(MIN_BLOCK_S, ceil(10 * remembered), ceil(longest_request_s))

    def _series(self) -> list[Floats]:
        """Per second: mean ln TTFT, and tokens."""
        found = [self._sums["tokens"]] if "tokens" in self._sums else []
        cells, values = self._values.get("ttft", (np.zeros(0, dtype=np.int64), np.zeros(0)))
        if len(values):
            n = np.bincount(cells, minlength=self.cells)
            total = np.bincount(cells, weights=np.log(np.maximum(values, 1e-9)), minlength=self.cells)
            found.append(np.where(n > 0, total / np.maximum(n, 1), np.nan))
        return found


def _circular(length: int, block_s: int, count: int, rng: np.random.Generator) -> Floats:
    block = min(block_s, length)
    starts = rng.integers(0, length, size=(count, ceil(length / block)))
    edges = np.zeros((count, 2 * length + 1))
    rows = np.repeat(np.arange(count), starts.shape[1])
    np.add.at(edges, (rows, starts.ravel()), 1)
    np.add.at(edges, (rows, starts.ravel() + block), -1)
    covered = np.cumsum(edges[:, :-1], axis=1)
    found: Floats = covered[:, :length] + covered[:, length:]
    return found


def memory(series: Floats) -> float:
    """Seconds until the autocorrelation of one value per second falls to 1/e; 0 where it cannot be told from noise."""
    known = ~np.isnan(series)
    n = int(known.sum())
    if n < 20:
        return 0.0
    rest = np.where(known, series - series[known].mean(), 0.0)
    power = float((rest**2).sum())
    if power <= 0:
        return 0.0
    before = 1.0
    for lag in range(1, n // 2):
        now = float((rest[lag:] * rest[:-lag]).sum()) / power
        if now < 2 / n**0.5 and lag == 1:
            return 0.0
        if now < np.exp(-1):
            return -1 / log(now) if lag == 1 else lag - 1 + (before - np.exp(-1)) / (before - now)
        before = now
    return n / 2
