"""Compares two sets of runs: level by level, figure by figure, with an interval and a verdict word.

Five runs a side and more are tested run against run; fewer by a block bootstrap within runs, which cannot see how
runs differ from each other, and says so. Must not read recordings or format text.
"""

from collections.abc import Collection, Sequence
from math import inf
from statistics import median

import msgspec

from lpxtop.metrics import comparability, ranks
from lpxtop.metrics.bootstrap import bootstrapped, undecided
from lpxtop.metrics.comparability import Difference
from lpxtop.metrics.comparison import (
    ALPHA,
    BAND,
    LATENCIES,
    LINEAR,
    MIN_BLOCKS,
    MIN_RUNS,
    POINTS_BAND,
    Comparison,
    LevelResult,
    Load,
    Row,
    reach,
    scale,
    unscale,
)
from lpxtop.metrics.definitions import BY_KEY
from lpxtop.metrics.distribution import MIN_SAMPLES
from lpxtop.metrics.samples import PERCENTILES, Figure, LevelSample, RunSample


def compare(
    a: Sequence[RunSample], b: Sequence[RunSample], *, seed: int = 0, meant: Collection[str] = ()
) -> Comparison:
    """Compare two sides of one or more runs each. `meant` names differences that shall not block."""
    found = comparability.differences(a, b, meant)
    loads, only = _loads(a, b)
    reasons = [f"{row.what} differs ({row.a} and {row.b})" for row in found if row.effect == "blocks"]
    watched = [run.label for run in [*a, *b] if run.summary["run"].get("kind") == "watch"]
    if watched:
        reasons.append(f"{watched[0]} only watched: it has no requests of its own")
    elif not loads:
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
        drawn = bootstrapped(rows, left, right, seed)
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
    points = figure[0] in LINEAR
    row = Row(key=figure[0], figure=figure[1], a=None, b=None, points=points, band=POINTS_BAND if points else BAND)
    whole = all(len(side) == len(levels) for side, levels in zip(known, (a, b), strict=True))
    shown = [median(side) if side and whole else None for side in known]
    row = msgspec.structs.replace(row, a=shown[0], b=shown[1])
    if not whole:
        return msgspec.structs.replace(row, a=_one(known[0], a), b=_one(known[1], b), why=_few(figure, a, b))
    if not points and (min(known[0]) <= 0 or min(known[1]) <= 0):
        return msgspec.structs.replace(row, why="a value is 0, so there is no ratio")
    shift = scale(row, shown[1]) - scale(row, shown[0])
    return msgspec.structs.replace(row, difference=unscale(row, shift))


def _one(known: Sequence[float], levels: Sequence[LevelSample]) -> float | None:
    return median(known) if len(known) == len(levels) else None


def _few(figure: Figure, a: Sequence[LevelSample], b: Sequence[LevelSample]) -> str:
    key, name = figure
    if name is None:
        return "not measured in every run"
    needed = MIN_SAMPLES.get(int(float(name[1:]) * 10), 1)
    fewest = min(level.counts.get(key, 0) for level in [*a, *b])
    return f"n too small for {name} ({fewest}; {needed} needed)"


# --- one or a few runs a side --------------------------------------------------------------------------------------


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
        found.append(undecided(tested_row, _short(level)) if short else _word(tested_row, adjusted[place] <= ALPHA))
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
        tuple([scale(row, run.levels[load].figures[row.key, row.figure]) for run in side] for side in (a, b))
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
            row, difference=unscale(row, shift), interval=(unscale(row, low), unscale(row, high)), p=adjusted[place]
        )
        real = single <= ALPHA and adjusted[place] <= ALPHA and abs(shift) > reach(row)
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
