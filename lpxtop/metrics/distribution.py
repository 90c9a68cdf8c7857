"""Distributions as integer counts, exact or on log buckets, and the product's one percentile function.

A distribution is a `dict[int, int]`: value (or log bucket) -> how many. Merging is adding counts; percentiles are
never averaged. Must not know which metric it holds.
"""

from collections import _count_elements  # type: ignore[attr-defined]
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

from lpxtop.events import buckets
from lpxtop.events.records import TICK_US
from lpxtop.metrics.view import Histogram, Quantiles

Counts = dict[int, int]

MIN_SAMPLES = {950: 59, 990: 299, 999: 2995}
"""Per-mille -> samples below which no two-sided 95 % order-statistic interval exists, so no figure is given."""

_TICK_TABLE_LIMIT = 1 << 16
_PERMILLES = (500, 900, 950, 990, 1000)
_HISTOGRAM_BINS = 40


class _TickBuckets(dict[int, int]):
    """Ticks of 10 µs, shared by so many tokens -> log bucket of µs, filled as asked: a C-speed look-up for `map`."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def __missing__(self, ticks: int) -> int:
        found = buckets.bucket(ticks * TICK_US / self.tokens)
        if 0 <= ticks < _TICK_TABLE_LIMIT:
            self[ticks] = found
        return found


tick_bucket = _TickBuckets(1).__getitem__
"""The log bucket (of µs) of a gap in ticks."""


@lru_cache(maxsize=64)
def _shared_bucket(tokens: int) -> Callable[[int], int]:
    return _TickBuckets(tokens).__getitem__


def split_correction(shared: Mapping[int, Iterable[int]]) -> Counts:
    """What turns buckets of gaps into buckets of per-token latencies: for each gap that n tokens share, one less of
    the gap and n more of gap ÷ n. `shared` lists gaps in ticks by n."""
    split: Counts = {}
    for tokens, gaps in shared.items():
        whole: Counts = {}
        parts: Counts = {}
        count_all(whole, map(tick_bucket, gaps))
        count_all(parts, map(_shared_bucket(tokens), gaps))
        merge(split, {index: -n for index, n in whole.items()})
        merge(split, {index: n * tokens for index, n in parts.items()})
    return split


count_all: Callable[[Counts, Iterable[int]], None] = _count_elements
"""Count every value of an iterable: `Counter.update` without its Python part, for the hot path."""


def enough(count: int, permille: int) -> bool:
    """Whether `count` samples support this percentile."""
    return count >= MIN_SAMPLES.get(permille, 1)


def add(into: Counts, value: int, n: int = 1) -> None:
    """Count `value` `n` times (`n` may be negative: a correction)."""
    into[value] = into.get(value, 0) + n


def merge(into: Counts, other: Mapping[int, int]) -> Counts:
    """Add the counts of `other` to `into`, which is returned."""
    get = into.get
    for value, n in other.items():
        into[value] = get(value, 0) + n
    return into


def merged(parts: Iterable[Mapping[int, int]]) -> Counts:
    """One distribution of many."""
    into: Counts = {}
    for part in parts:
        merge(into, part)
    return into


def percentiles(
    counts: Mapping[int, int], permilles: Sequence[int] = _PERMILLES, *, gated: bool = True
) -> list[int | None]:
    """Nearest-rank percentiles (inverse of the empirical CDF), in ascending `permilles`; 1000 is the maximum.

    The value of rank ceil(n·q): always one that was measured. None where there are too few samples; with `gated`
    False only where there is none.
    """
    total = sum(counts.values())
    found: list[int | None] = []
    ordered = iter(sorted(counts.items()))
    value, seen = 0, 0
    for permille in permilles:
        if total <= 0 or (gated and not enough(total, permille)):
            found.append(None)
            continue
        rank = max(1, -(-total * permille // 1000))
        while seen < rank:
            value, n = next(ordered)
            seen += n
        found.append(value)
    return found


def exact_quantiles(counts: Mapping[int, int], per_ms: int) -> Quantiles:
    """The figures of exact counts whose unit is 1/`per_ms` of a ms (ticks 100, µs 1000, ns 1 000 000)."""
    count = sum(counts.values())
    if count == 0:
        return Quantiles()
    mean = sum(value * n for value, n in counts.items()) / count / per_ms
    return _figures(count, mean, [None if value is None else value / per_ms for value in percentiles(counts)])


def bucket_quantiles(counts: Mapping[int, int]) -> Quantiles:
    """The figures, in ms, of log buckets of µs: each within 1 %. The same counts give the same figures to the last
    bit, in whatever order they came."""
    count = sum(counts.values())
    if count == 0:
        return Quantiles()
    value = buckets.value
    mean = sum(value(index) * counts[index] for index in sorted(counts)) / count / 1000
    return _figures(count, mean, [bucket_ms(index) for index in percentiles(counts)])


def bucket_ms(index: int | None) -> float | None:
    """The ms that stand for a log bucket of µs."""
    return None if index is None else buckets.value(index) / 1000


def _figures(count: int, mean: float, found: Sequence[float | None]) -> Quantiles:
    p50, p90, p95, p99, highest = found
    return Quantiles(count=count, mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=highest)


def histogram(counts: Mapping[int, int], bins: int = _HISTOGRAM_BINS) -> Histogram:
    """Log buckets of µs gathered to at most `bins` equal steps on a log axis, empty steps between included."""
    filled = [index for index, n in counts.items() if n]
    if not filled:
        return Histogram()
    low, high = min(filled), max(filled)
    width = max(6, -(-(high - low + 1) // (bins - 1)))
    first, last = low // width, high // width
    gathered = [0] * (last - first + 1)
    for index, n in counts.items():
        gathered[index // width - first] += n
    edges = tuple(buckets.low_edge(step * width) / 1000 for step in range(first, last + 2))
    return Histogram(edges_ms=edges, counts=tuple(gathered))


def pack(counts: Mapping[int, int]) -> list[int]:
    """Counts as one flat list for a keyframe: value differences and counts in turn, small numbers first."""
    flat: list[int] = []
    before = 0
    for value, n in sorted(counts.items()):
        if n:
            flat += (value - before, n)
            before = value
    return flat


def unpack(flat: Sequence[int]) -> Counts:
    """The counts of `pack`."""
    counts: Counts = {}
    value = 0
    for step, n in zip(flat[::2], flat[1::2], strict=True):
        value += step
        counts[value] = n
    return counts
