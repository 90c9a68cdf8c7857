"""Intervals for one or a few runs a side: block bootstrap within runs, against a floor of noise within each side.

Cannot see how runs differ from each other; whoever shows its intervals says so. Must not give verdicts.
"""

from collections.abc import Sequence
from math import ceil, log1p
from statistics import NormalDist

import msgspec
import numpy as np

from lpxtop.metrics.comparison import FEW_BLOCKS, LATENCIES, LINEAR, Row, reach, scale, unscale
from lpxtop.metrics.resampling import Floats, Pool
from lpxtop.metrics.samples import Figure, LevelSample

DRAWS = 500
_RATES: dict[str, tuple[str, str | None]] = {
    "error_rate": ("failed", "ended"), "output_tokens_per_s": ("tokens", None), "goodput": ("good", None),
    "energy_per_token_j": ("energy", "tokens"),
}  # fmt: skip
"""Which sums by second make a rate: above, below (None: per second)."""
_RANKS = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_NORMAL = NormalDist()


def bootstrapped(
    rows: Sequence[Row], a: Sequence[LevelSample], b: Sequence[LevelSample], seed: int
) -> tuple[list[Row], int | None, int | None]:
    """The rows with interval, p against the band, and the band widened to the noise floor; length and number of the
    blocks. The same seed draws the same."""
    sides = [[stretch for level in side for stretch in level.stretches] for side in (a, b)]
    if not all(sides):
        return [undecided(row, "too short") for row in rows], None, None
    pools = [Pool(side) for side in sides]
    longest = max((level.figures.get(("e2e", "p50")) or 0.0) / 1000 for level in [*a, *b])
    block_s = ceil(sum(pool.block_s(longest) for pool in pools) / 2)
    blocks = min(pool.blocks(block_s) for pool in pools)
    if blocks < FEW_BLOCKS:
        return [undecided(row, f"too short: {blocks} blocks of {block_s} s") for row in rows], block_s, blocks
    rng = np.random.default_rng(seed)
    drawn = [_figures(rows, pool, pool.draws(block_s, DRAWS, rng)) for pool in pools]
    whole = [_figures(rows, pool, pool.once()) for pool in pools]
    floors = _floors(rows, pools, a, b)
    found = []
    for row in rows:
        at = row.key, row.figure
        shifts = drawn[1][at] - drawn[0][at]
        centre = float((whole[1][at] - whole[0][at])[0])
        wider = msgspec.structs.replace(row, band=max(row.band, floors[at]))
        found.append(_interval(wider, shifts, centre))
    return found, block_s, blocks


def undecided(row: Row, why: str) -> Row:
    """Without a verdict for this reason, unless there is one already."""
    return row if row.why else msgspec.structs.replace(row, why=why)


def _figures(rows: Sequence[Row], pool: Pool, weights: Floats) -> dict[Figure, Floats]:
    """Each row's figure under each row of weights, on the scale of shifts; nan where it is not defined."""
    found: dict[Figure, Floats] = {}
    for key in dict.fromkeys(row.key for row in rows):
        if key in LATENCIES:
            table = pool.quantiles(key, tuple(_RANKS.values()), weights)
            found |= {(key, name): table[:, column] for column, name in enumerate(_RANKS)}
            continue
        rate = pool.ratio(*_RATES[key], weights)
        if rate is None:
            rate = np.full(len(weights), np.nan)
        with np.errstate(divide="ignore", invalid="ignore"):
            found[key, None] = rate if key in LINEAR else np.log(rate)
    return found


def _interval(row: Row, shifts: Floats, centre: float) -> Row:
    """95 % of the draws, moved to the exact figures' difference; p from their spread, against the band."""
    known = shifts[np.isfinite(shifts)]
    if row.difference is None or not np.isfinite(centre) or len(known) < 0.95 * len(shifts):
        return row if row.why else msgspec.structs.replace(row, why="not enough to draw from")
    exact = row.difference if row.points else log1p(row.difference)
    low, high = (float(q) - centre + exact for q in np.quantile(known, (0.025, 0.975)))
    spread = float(known.std(ddof=1))
    beyond = abs(exact) - reach(row)
    p = 1.0 if beyond <= 0 else 0.0 if spread == 0 else min(1.0, 2 * (1 - _NORMAL.cdf(beyond / spread)))
    interval = unscale(row, min(low, exact)), unscale(row, max(high, exact))
    return msgspec.structs.replace(row, interval=interval, p=p)


def _floors(
    rows: Sequence[Row], pools: Sequence[Pool], a: Sequence[LevelSample], b: Sequence[LevelSample]
) -> dict[Figure, float]:
    """The A/A noise floor of each row: how far the two halves of a side are apart, and runs of one side."""
    halves = [_figures(rows, pool, pool.halves()) for pool in pools]
    floors: dict[Figure, float] = {}
    for row in rows:
        at = row.key, row.figure
        apart = [abs(float(half[at][1] - half[at][0])) for half in halves]
        for side in (a, b):
            values = [level.figures.get(at) for level in side]
            scaled = [scale(row, value) for value in values if value is not None and (row.points or value > 0)]
            apart.append(max(scaled, default=0.0) - min(scaled, default=0.0))
        floors[at] = max((unscale(row, far) for far in apart if np.isfinite(far)), default=0.0)
    return floors
