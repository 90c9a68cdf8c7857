"""The block bootstrap: weights, weighted figures, memory, and how often its intervals hold the truth."""

import numpy as np
import pytest

from lpxtop.events.buckets import bucket
from lpxtop.metrics.resampling import Pool, Stretch, memory


def stretch(values, per_second, gaps=None, tokens=None):
    """`per_second` values in each second, one after the other."""
    cells = [place // per_second for place in range(len(values))]
    size = cells[-1] + 1
    sums = {"tokens": [float(second) for second in range(size)] if tokens is None else tokens, "energy": [2.0] * size}
    return Stretch(cells=size, requests={"ttft": (cells, list(values))}, gaps={"itl": gaps or {}}, sums=sums)


def test_weighted_quantiles_are_nearest_rank():
    """With every cell once they are the plain nearest-rank percentiles, with weights those of the repeated sample."""
    values = [5.0, 1.0, 9.0, 3.0, 7.0, 2.0]
    pool = Pool([stretch(values, 2)])
    plain = np.exp(pool.quantiles("ttft", (0.5, 0.95), pool.once())[0])
    assert plain == pytest.approx([3.0, 9.0])  # ranks ceil(6 × 0.5) = 3 and 6 of 1 2 3 5 7 9
    twice = np.exp(pool.quantiles("ttft", (0.5,), np.array([[2.0, 0.0, 1.0], [2.0, 1.0, 0.0]]))[:, 0])
    assert twice == pytest.approx([2.0, 3.0])  # the third of 1 1 2 5 5 7, and of 1 1 3 5 5 9


def test_ratios_are_sums_over_sums():
    """Tokens per second and joules per token under weights."""
    pool = Pool([stretch([1.0] * 8, 2)])
    weights = np.array([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 4.0]])
    assert pool.ratio("tokens", None, weights) == pytest.approx([1.5, 3.0])
    assert pool.ratio("energy", "tokens", weights) == pytest.approx([8 / 6, 8 / 12])
    assert pool.ratio("good", None, weights) is None


def test_gap_quantiles_lie_in_their_bucket():
    """A quantile of log buckets is within the bucket that holds it: 2 % at most."""
    gaps = {0: {bucket(20_000.0): 90, bucket(50_000.0): 10}, 1: {bucket(20_000.0): 100}}
    pool = Pool([stretch([1.0] * 4, 2, gaps)])
    found = np.exp(pool.quantiles("itl", (0.5, 0.99), pool.once())[0])
    assert found == pytest.approx([20_000, 50_000], rel=0.02)


def test_draws_are_circular_blocks_of_equal_chance():
    """Every draw covers each stretch's length, in whole blocks, and no cell is favoured."""
    pool = Pool([stretch([1.0] * 40, 2), stretch([1.0] * 60, 2)])
    draws = pool.draws(5, 4000, np.random.default_rng(0))
    assert draws.shape == (4000, 50)
    assert set(draws[:, :20].sum(axis=1)) == {20.0}
    assert set(draws[:, 20:].sum(axis=1)) == {30.0}
    assert draws.mean(axis=0) == pytest.approx(np.ones(50), abs=0.07)


def test_memory_of_noise_is_none_and_of_a_slow_series_its_time_constant():
    """White noise has no memory; AR(1) with time constant 10 s is told within a third."""
    rng = np.random.default_rng(1)
    assert memory(rng.normal(size=500)) <= 0.6
    series = np.zeros(4000)
    for place in range(1, len(series)):
        series[place] = np.exp(-1 / 10) * series[place - 1] + rng.normal()
    assert memory(series) == pytest.approx(10, rel=0.34)
    assert memory(np.full(100, 3.0)) == 0.0


def test_intervals_of_a_wandering_series_hold_the_truth():
    """AR(1) noise (2 s, 20 %) over 300 s: 95 % intervals of the median hold it in at least 85 % of 60 series, where
    resampling requests one by one holds it in less than 60 %."""
    rng = np.random.default_rng(5)
    block_hits = naive_hits = 0
    for _ in range(60):
        slow = np.zeros(300)
        for second in range(1, 300):
            slow[second] = np.exp(-1 / 2) * slow[second - 1] + rng.normal() * 0.2 * np.sqrt(1 - np.exp(-1))
        values = np.exp(np.repeat(slow, 10) + rng.normal(size=3000) * 0.05)
        pool = Pool([stretch(values, 10, tokens=[10.0] * 300)])
        drawn = pool.quantiles("ttft", (0.5,), pool.draws(pool.block_s(0.0), 200, rng))[:, 0]
        low, high = np.quantile(drawn, (0.025, 0.975))
        block_hits += low <= 0 <= high
        naive = [np.median(np.log(rng.choice(values, len(values)))) for _ in range(60)]
        naive_hits += np.quantile(naive, 0.025) <= 0 <= np.quantile(naive, 0.975)
    assert block_hits >= 51
    assert naive_hits < 36
