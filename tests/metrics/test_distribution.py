"""Percentiles, means and log buckets against numpy and by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpxtop.events import buckets
from lpxtop.metrics.distribution import (
    bucket_quantiles,
    count_all,
    exact_quantiles,
    histogram,
    merge,
    pack,
    percentiles,
    tick_bucket,
    unpack,
)

values = st.lists(st.integers(0, 10_000_000), min_size=1, max_size=400)


def counted(numbers: list[int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    count_all(counts, numbers)
    return counts


@given(values)
def test_percentiles_are_nearest_rank(numbers: list[int]) -> None:
    """Every percentile equals numpy's inverted empirical CDF and is a value that was measured."""
    permilles = (500, 900, 950, 990, 999, 1000)
    expected = np.percentile(np.array(numbers), [p / 10 for p in permilles], method="inverted_cdf")
    found = percentiles(counted(numbers), permilles, gated=False)
    assert found == [int(value) for value in expected]


@pytest.mark.parametrize(("permille", "needed"), [(950, 59), (990, 299), (999, 2995)])
def test_too_few_samples_give_no_percentile(permille: int, needed: int) -> None:
    """One sample below the limit there is no figure; at the limit there is."""
    assert percentiles({7: needed - 1}, (permille,)) == [None]
    assert percentiles({7: needed}, (permille,)) == [7]


def test_figures_of_a_small_sample_by_hand() -> None:
    """Four gaps of 1, 2, 3 and 10 ms in ticks: mean 4, median 2, p90 and maximum 10, no p95."""
    figures = exact_quantiles({100: 1, 200: 1, 300: 1, 1000: 1}, per_ms=100)
    assert (figures.count, figures.mean, figures.p50, figures.p90, figures.max) == (4, 4.0, 2.0, 10.0, 10.0)
    assert figures.p95 is None
    assert figures.p99 is None


def test_nothing_gives_nothing() -> None:
    """No samples: a count of 0 and no figure at all, never 0.0."""
    for figures in (exact_quantiles({}, 1000), bucket_quantiles({})):
        assert figures.count == 0
        assert {figures.mean, figures.p50, figures.p90, figures.p95, figures.p99, figures.max} == {None}


@given(st.lists(st.integers(1, 3_600_000_000), min_size=300, max_size=600))
def test_log_buckets_are_within_one_percent(times_us: list[int]) -> None:
    """Each figure of the screen lies within 1 % of the exact one, whatever the values (1 µs to an hour)."""
    in_buckets: dict[int, int] = {}
    count_all(in_buckets, map(buckets.bucket, times_us))
    about, exact = bucket_quantiles(in_buckets), exact_quantiles(counted(times_us), per_ms=1000)
    for name in ("mean", "p50", "p90", "p95", "p99", "max"):
        assert getattr(about, name) == pytest.approx(getattr(exact, name), rel=0.01)


@given(values, values)
def test_merging_is_counting_together(left: list[int], right: list[int]) -> None:
    """Figures of merged counts are those of all the values; no percentile is ever averaged."""
    together = exact_quantiles(counted(left + right), 1000)
    assert exact_quantiles(merge(counted(left), counted(right)), 1000) == together


@given(st.dictionaries(st.integers(-5, 2000), st.integers(-3, 50)))
def test_packed_counts_come_back(counts: dict[int, int]) -> None:
    """A keyframe's packed form loses nothing but empty entries."""
    assert unpack(pack(counts)) == {value: n for value, n in counts.items() if n}


@given(st.integers(0, 200_000))
def test_tick_table_agrees_with_the_grid(ticks: int) -> None:
    """The look-up table of gaps gives the bucket of the same time in µs."""
    assert tick_bucket(ticks) == buckets.bucket(ticks * 10)
    assert tick_bucket(ticks) == buckets.bucket(ticks * 10)


@given(st.dictionaries(st.integers(0, 1100), st.integers(1, 50), min_size=1))
def test_histogram_keeps_every_sample_in_few_bins(counts: dict[int, int]) -> None:
    """At most 40 bins, rising edges, no sample lost, and each within its bin."""
    drawn = histogram(counts)
    assert sum(drawn.counts) == sum(counts.values())
    assert len(drawn.counts) <= 40
    assert len(drawn.edges_ms) == len(drawn.counts) + 1
    assert all(low < high for low, high in zip(drawn.edges_ms, drawn.edges_ms[1:], strict=False))
    middle = buckets.value(min(counts)) / 1000
    assert drawn.edges_ms[0] <= middle < drawn.edges_ms[1]
