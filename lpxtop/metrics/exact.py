"""Exact integer counts for the summary: gaps in ticks, times in µs or ns. Grows by a few bytes per request.

The screen never needs these. Everything measured is in exactly one `Figures`: a level's, or that of the rest.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lpxtop.events.records import TICK_US, Finished
from lpxtop.metrics.definitions import ANSWERED, PER_REQUEST
from lpxtop.metrics.distribution import Counts, add, count_all, exact_quantiles, merged
from lpxtop.metrics.levels import Part, Route
from lpxtop.metrics.view import Quantiles

TICK_NS = TICK_US * 1000
_BY_SENT = ("ttft", "ttft_due", "ttft_any", "ttfo", "schedule_delay")
_STREAMED = ("ttft", "ttft_due", "ttft_any", "ttfo", "tpot", "tokens_per_s_per_user")
_ROWS = {row.key: row for row in PER_REQUEST}


class Figures:
    """What was measured in one place. `shared` counts, by number of tokens, the gaps that so many tokens share (they
    are among `gaps` too); `times` holds values per request;
    `ok`, `ended`, `good` and `usage_tokens` are of requests by their end."""

    def __init__(self) -> None:
        self.gaps: Counts = {}
        self.shared: dict[int, Counts] = {}
        self.times: dict[str, array[int]] = {row.key: array("q") for row in PER_REQUEST}
        self.chunks = self.extra = self.unknown = self.input_tokens = 0
        self.ok = self.ended = self.good = self.usage_tokens = 0

    def arrivals(self, gaps: Sequence[int], shared: Mapping[int, Sequence[int]]) -> None:
        count_all(self.gaps, gaps)
        for tokens, together in shared.items():
            count_all(self.shared.setdefault(tokens, {}), together)


class Exact:
    """The exact side of the state."""

    def __init__(self) -> None:
        self.levels: dict[int, Figures] = {}
        self.by_kind: dict[str, Figures] = {}
        self.rest = Figures()

    def of_part(self, part: Part) -> Figures:
        """Where arrivals in `part` count."""
        if part.kind == "steady" and part.level is not None:
            return self.level(part.level)
        return self.by_kind.setdefault(part.kind, Figures())

    def level(self, index: int) -> Figures:
        return self.levels.setdefault(index, Figures())

    def finished(self, request: Finished, route: Route, end_part: Part, streamed: bool, good: bool) -> None:
        """Each value of a measured request, to the level it belongs to or to the rest."""
        ended = self.of_part(end_part)
        ended.ended += 1
        ended.ok += request.outcome == "ok"
        ended.good += good
        ended.usage_tokens += 0 if request.output_tokens is None else request.output_tokens
        sent = self.rest if route.sent is None else self.level(route.sent)
        inside = self.rest if route.inside is None else self.level(route.inside)
        for key, row in _ROWS.items():
            if not _counts(key, request, streamed) or row.measure is None:
                continue
            value = row.measure(request)
            if value is not None:
                (sent if key in _BY_SENT else inside).times[key].append(value)

    def all(self) -> list[Figures]:
        return [self.rest, *self.by_kind.values(), *self.levels.values()]


def _counts(key: str, request: Finished, streamed: bool) -> bool:
    """Whether the request is of the metric's population."""
    if key == "schedule_delay":
        return True
    if key in _STREAMED:
        return request.outcome == "ok" and streamed
    return request.outcome in ANSWERED


def quantiles_of(places: Sequence[Figures], key: str) -> Quantiles:
    """The figures of a per-request metric, in its unit, over several places."""
    counts: Counts = {}
    for place in places:
        count_all(counts, place.times[key])
    return exact_quantiles(counts, _ROWS[key].per_unit)


def gap_quantiles(places: Sequence[Figures], split: bool) -> Quantiles:
    """ICL, or with `split` ITL, in ms."""
    gaps = merged(place.gaps for place in places)
    if not split or not any(place.shared for place in places):
        return exact_quantiles(gaps, 1_000_000 // TICK_NS)
    in_ns: Counts = {gap * TICK_NS: n for gap, n in gaps.items()}
    for place in places:
        for tokens, together in place.shared.items():
            for gap, n in together.items():
                add(in_ns, gap * TICK_NS, -n)
                add(in_ns, round(gap * TICK_NS / tokens), n * tokens)
    return exact_quantiles({value: n for value, n in in_ns.items() if n}, 1_000_000)


def arrived(places: Iterable[Figures]) -> tuple[int, int, int]:
    """Chunks, tokens beyond one per chunk, and chunks whose tokens nobody counted."""
    found = list(places)
    return sum(p.chunks for p in found), sum(p.extra for p in found), sum(p.unknown for p in found)


def as_dict(figures: Quantiles) -> dict[str, Any]:
    """The summary's form."""
    return {
        "count": figures.count, "mean": figures.mean, "p50": figures.p50, "p90": figures.p90, "p95": figures.p95,
        "p99": figures.p99, "max": figures.max,
    }  # fmt: skip
