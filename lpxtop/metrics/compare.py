"""Compares two sets of runs: level by level, figure by figure, with an interval and a verdict word.

Five runs a side and more are tested run against run; fewer by a block bootstrap within runs, which cannot see how
runs differ from each other, and says so. Must not read recordings or format text.
"""

from collections.abc import Collection, Sequence
from math import ceil, exp, inf, log, log1p
from statistics import NormalDist, median
from typing import Literal

import msgspec
import numpy as np

from lpxtop.metrics import comparability, ranks
from lpxtop.metrics.comparability import Difference
from lpxtop.metrics.definitions import BY_KEY
from lpxtop.metrics.distribution import MIN_SAMPLES
from lpxtop.metrics.resampling import Floats, Pool
from lpxtop.metrics.samples import PERCENTILES, Figure, LevelSample, RunSample

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
DRAWS = 500
LATENCIES = ("ttft", "ttft_due", "itl", "icl", "tpot", "e2e")
_LINEAR = ("error_rate",)
_RATES: dict[str, tuple[str, str | None]] = {
    "error_rate": ("failed", "ended"), "output_tokens_per_s": ("tokens", None), "goodput": ("good", None),
    "energy_per_token_j": ("energy", "tokens"),
}  # fmt: skip
"""Which sums by second make a rate: above, below (None: per second)."""
_RANKS = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_NORMAL = NormalDist()


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


def compare(
    a: Sequence[RunSample], b: Sequence[RunSample], *, seed: int = 0, meant: Collection[str] = ()
) -> Comparison:
    """Compare two sides of one or more runs each. `meant` names differences that shall not block."""
    found = comparability.differences(a, b, meant)
    loads, only = _loads(a, b)
    reasons = [f"{row.what} differs ({row.a} and {row.b})" for row in found if row.effect == "blocks"]
    if not loads:
        reasons.append("there is no load level that every run has")
    by_runs = min(len(a), len(b)) >= MIN_RUNS
    measured = [_measure(load, a, b, by_runs, seed + place) for place, load in enumerate(loads)]
    rows = [row for level in measured for row in level.rows]
    judged = _by_runs(rows, a, b, measured, seed) if by_runs else _by_blocks(measured)
    words = _withheld(judged, measured, found, reasons, by_runs)
    at = 0
    levels = []
    for level in measured:
        levels.append(msgspec.structs.replace(level, rows=tuple(words[at : at + len(level.rows)])))
        at += len(level.rows)
    return Comparison(
        a=tuple(run.label for run in a),
        b=tuple(run.label for run in b),
        comparable=not reasons,
        reasons=tuple(reasons),
        differences=tuple(found),
        same=tuple(comparability.same(a, b)),
        levels=tuple(levels),
        only=only,
        method="runs" if by_runs else "bootstrap",
        caveats=tuple(_caveats(a, b, by_runs)),
        family=sum(row.p is not None for row in words),
        simulated=any(run.summary["run"].get("simulated") for run in [*a, *b]),
    )


def _loads(
    a: Sequence[RunSample], b: Sequence[RunSample]
) -> tuple[list[Load], tuple[tuple[Load, ...], tuple[Load, ...]]]:
    """Loads that every run has, lowest first, and those that only one side has."""
    sides = [set.intersection(*(set(run.levels) for run in side)) for side in (a, b)]
    seen = [set.union(*(set(run.levels) for run in side)) for side in (a, b)]
    both = sides[0] & sides[1]
    return sorted(both), (tuple(sorted(seen[0] - both)), tuple(sorted(seen[1] - both)))


def _caveats(a: Sequence[RunSample], b: Sequence[RunSample], by_runs: bool) -> list[str]:
    if by_runs:
        return []
    if len(a) == len(b) == 1:
        return ["single run: run-to-run noise not included. Five runs a side would include it"]
    return [
        f"{len(a)} and {len(b)} runs: too few to know how much runs differ by themselves; five a side are needed. "
        "The spread between runs of one side only widens the band"
    ]


# --- what is compared ---------------------------------------------------------------------------------------------


def figures_of(a: Sequence[LevelSample], b: Sequence[LevelSample], load: Load) -> list[Figure]:
    """The rows of a level: errors first, then latencies, then rates. Those that no run measured are left out."""
    first = ("ttft_due", "ttft") if load[0] == "rate" else ("ttft",)
    trusted = all(level.figures.get(("itl", "p50")) is not None for level in [*a, *b])
    keys = (*first, "itl" if trusted else "icl", "tpot", "e2e")
    rows: list[Figure] = [("error_rate", None), *((key, name) for key in keys for name in PERCENTILES)]
    rows += [("output_tokens_per_s", None), ("goodput", None), ("energy_per_token_j", None)]
    return [row for row in rows if _shown(row, a, b)]


def _shown(row: Figure, a: Sequence[LevelSample], b: Sequence[LevelSample]) -> bool:
    """Latencies without a percentile stay as long as there are samples: "too few" is an answer."""
    if row[1] is not None:
        return any(level.counts.get(row[0]) for level in [*a, *b])
    return any(level.figures.get(row) is not None for level in [*a, *b])


def _measure(load: Load, a: Sequence[RunSample], b: Sequence[RunSample], by_runs: bool, seed: int) -> LevelResult:
    """Values, differences and, for the bootstrap, intervals and p of one level."""
    left, right = [run.levels[load] for run in a], [run.levels[load] for run in b]
    figures = figures_of(left, right, load)
    rows = [_plain(figure, left, right) for figure in figures]
    drawn: tuple[list[Row], int | None, int | None] = (rows, None, None)
    if not by_runs:
        drawn = _bootstrapped(rows, left, right, seed)
    return LevelResult(
        load=load,
        ended=(sum(level.ended for level in left), sum(level.ended for level in right)),
        seconds=(sum(level.seconds for level in left), sum(level.seconds for level in right)),
        rows=tuple(drawn[0]),
        unsteady=tuple(
            name for name, side in (("A", left), ("B", right)) if any(level.steady is False for level in side)
        ),
        block_s=drawn[1],
        blocks=drawn[2],
    )


def _plain(figure: Figure, a: Sequence[LevelSample], b: Sequence[LevelSample]) -> Row:
    values = [[level.figures.get(figure) for level in side] for side in (a, b)]
    known = [[value for value in side if value is not None] for side in values]
    points = figure[0] in _LINEAR
    row = Row(key=figure[0], figure=figure[1], a=None, b=None, points=points, band=POINTS_BAND if points else BAND)
    whole = all(len(side) == len(levels) for side, levels in zip(known, (a, b), strict=True))
    shown = [median(side) if side and whole else None for side in known]
    row = msgspec.structs.replace(row, a=shown[0], b=shown[1])
    if not whole:
        return msgspec.structs.replace(row, a=_one(known[0], a), b=_one(known[1], b), why=_few(figure, a, b))
    if not points and (min(known[0]) <= 0 or min(known[1]) <= 0):
        return msgspec.structs.replace(row, why="a value is 0, so there is no ratio")
    shift = _scale(row, shown[1]) - _scale(row, shown[0])
    return msgspec.structs.replace(row, difference=_unscale(row, shift))


def _one(known: Sequence[float], levels: Sequence[LevelSample]) -> float | None:
    return median(known) if len(known) == len(levels) else None


def _few(figure: Figure, a: Sequence[LevelSample], b: Sequence[LevelSample]) -> str:
    key, name = figure
    if name is None:
        return "not measured in every run"
    needed = MIN_SAMPLES.get(int(float(name[1:]) * 10), 1)
    fewest = min(level.counts.get(key, 0) for level in [*a, *b])
    return f"n too small for {name} ({fewest}; {needed} needed)"


def _scale(row: Row, value: float | None) -> float:
    """Ratios are compared as logarithms, shares as they are."""
    if value is None:
        return 0.0
    return value if row.points else log(value)


def _unscale(row: Row, shift: float) -> float:
    return shift if row.points else exp(shift) - 1


def _reach(row: Row) -> float:
    """The row's band on the scale of shifts."""
    return row.band if row.points else log1p(row.band)


# --- one or a few runs a side: block bootstrap --------------------------------------------------------------------


def _bootstrapped(
    rows: Sequence[Row], a: Sequence[LevelSample], b: Sequence[LevelSample], seed: int
) -> tuple[list[Row], int | None, int | None]:
    sides = [[stretch for level in side for stretch in level.stretches] for side in (a, b)]
    if not all(sides):
        return [_undecided(row, "too short") for row in rows], None, None
    pools = [Pool(side) for side in sides]
    longest = max((level.figures.get(("e2e", "p50")) or 0.0) / 1000 for level in [*a, *b])
    block_s = ceil(sum(pool.block_s(longest) for pool in pools) / 2)
    blocks = min(pool.blocks(block_s) for pool in pools)
    if blocks < FEW_BLOCKS:
        return [_undecided(row, f"too short: {blocks} blocks of {block_s} s") for row in rows], block_s, blocks
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


def _undecided(row: Row, why: str) -> Row:
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
            found[key, None] = rate if key in _LINEAR else np.log(rate)
    return found


def _interval(row: Row, shifts: Floats, centre: float) -> Row:
    """95 % of the draws, moved to the exact figures' difference; p from their spread, against the band."""
    known = shifts[np.isfinite(shifts)]
    if row.difference is None or not np.isfinite(centre) or len(known) < 0.95 * len(shifts):
        return row if row.why else msgspec.structs.replace(row, why="not enough to draw from")
    exact = row.difference if row.points else log1p(row.difference)
    low, high = (float(q) - centre + exact for q in np.quantile(known, (0.025, 0.975)))
    spread = float(known.std(ddof=1))
    beyond = abs(exact) - _reach(row)
    p = 1.0 if beyond <= 0 else 0.0 if spread == 0 else min(1.0, 2 * (1 - _NORMAL.cdf(beyond / spread)))
    interval = _unscale(row, min(low, exact)), _unscale(row, max(high, exact))
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
            scaled = [_scale(row, value) for value in values if value is not None and (row.points or value > 0)]
            apart.append(max(scaled, default=0.0) - min(scaled, default=0.0))
        floors[at] = max((_unscale(row, far) for far in apart if np.isfinite(far)), default=0.0)
    return floors


def _by_blocks(measured: Sequence[LevelResult]) -> list[Row]:
    """Verdicts of the bootstrap, Holm over everything that is shown."""
    rows = [(level, row) for level in measured for row in level.rows]
    tested = [place for place, (_, row) in enumerate(rows) if row.p is not None]
    adjusted = dict(zip(tested, ranks.holm([rows[place][1].p or 0.0 for place in tested]), strict=True))
    found = []
    for place, (level, row) in enumerate(rows):
        if place not in adjusted:
            found.append(row)
            continue
        tested_row = msgspec.structs.replace(row, p=adjusted[place])
        short = level.blocks is not None and level.blocks < MIN_BLOCKS
        found.append(_undecided(tested_row, _short(level)) if short else _word(tested_row, adjusted[place] <= ALPHA))
    return found


def _short(level: LevelResult) -> str:
    return f"too short: {level.blocks} blocks of {level.block_s} s, {MIN_BLOCKS} needed"


# --- five runs a side and more: run against run ------------------------------------------------------------------


def _by_runs(
    rows: Sequence[Row], a: Sequence[RunSample], b: Sequence[RunSample], measured: Sequence[LevelResult], seed: int
) -> list[Row]:
    """Mann-Whitney and Hodges-Lehmann of the runs' own figures; corrected for the family by permuting runs."""
    loads = [level.load for level in measured for _ in level.rows]
    values = [
        tuple([_scale(row, run.levels[load].figures[row.key, row.figure]) for run in side] for side in (a, b))
        if row.difference is not None
        else None
        for row, load in zip(rows, loads, strict=True)
    ]
    tested = [place for place, sides in enumerate(values) if sides is not None]
    family = [(sides[0], sides[1]) for sides in values if sides is not None]
    adjusted = dict(zip(tested, ranks.permuted(family, seed), strict=True))
    found = []
    for place, (row, sides) in enumerate(zip(rows, values, strict=True)):
        if sides is None:
            found.append(row)
            continue
        shift, low, high = ranks.hodges_lehmann(sides[0], sides[1])
        single = ranks.mann_whitney(sides[0], sides[1])
        moved = msgspec.structs.replace(
            row, difference=_unscale(row, shift), interval=(_unscale(row, low), _unscale(row, high)), p=adjusted[place]
        )
        real = single <= ALPHA and adjusted[place] <= ALPHA and abs(shift) > _reach(row)
        found.append(_word(moved, real))
    return found


# --- words --------------------------------------------------------------------------------------------------------


def _word(row: Row, real: bool) -> Row:
    """The verdict. `same` takes an interval inside the practical band, never the mere lack of proof."""
    if row.difference is None or row.interval is None:
        return row
    practical = POINTS_BAND if row.points else BAND
    if real:
        higher = row.difference > 0
        good = higher == (BY_KEY[row.key].better == "higher")
        return msgspec.structs.replace(row, verdict="better" if good else "worse")
    if -practical <= row.interval[0] and row.interval[1] <= practical:
        return msgspec.structs.replace(row, verdict="same", why=f"within ±{_band(row, practical)}")
    return msgspec.structs.replace(row, why=_why(row, practical))


def _why(row: Row, practical: float) -> str:
    low, high = row.interval if row.interval is not None else (-inf, inf)
    if row.band > practical and (low > practical or high < -practical):
        return f"noise within a side is ±{_band(row, row.band)}"
    if low <= 0 <= high:
        return "the interval holds 0"
    if low > practical or high < -practical:
        return "not proven among so many figures"
    return f"may be within ±{_band(row, practical)}"


def _band(row: Row, band: float) -> str:
    return (
        f"{100 * band:.0f} points"
        if row.points and band != POINTS_BAND
        else f"{100 * band:.0f} " + ("point" if row.points else "%")
    )


def _withheld(
    rows: Sequence[Row],
    measured: Sequence[LevelResult],
    differences: Sequence[Difference],
    reasons: Sequence[str],
    by_runs: bool,
) -> list[Row]:
    """Takes verdicts back where the sides did not measure the same thing, or survivors only."""
    because = {key: f"{row.what} differs" for row in differences for key in row.withheld}
    found: list[Row] = []
    at = 0
    for level in measured:
        own = rows[at : at + len(level.rows)]
        at += len(level.rows)
        errors = next((row for row in own if row.key == "error_rate"), None)
        apart = errors is not None and errors.difference is not None and abs(errors.difference) > POINTS_BAND
        for row in own:
            why = because.get(row.key)
            if apart and row.key in LATENCIES:
                why = "error rates differ: only survivors were timed"
            if level.unsteady and not by_runs:
                why = f"{' and '.join(level.unsteady)} not steady"
            if reasons:
                why = "not comparable" if row.difference is not None else row.why
            found.append(row if why is None else msgspec.structs.replace(row, verdict="undecided", why=why))
    return found
