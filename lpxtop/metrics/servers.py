"""The server's own metrics: what its last scrape said, and its counters as rates over a window.

Values of the last scrape of each second lie in the slots (`Slot.servers`), so any window can be asked for. A counter
that went back began again at 0 (the probe tells of the restart). Must not scrape or parse.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import Any

from lpxtop.events.records import Server
from lpxtop.metrics.holding import Holding
from lpxtop.metrics.slots import Slot
from lpxtop.metrics.sums import KV_FULL, ServerSums
from lpxtop.metrics.view import ServerView

COUNTERS = (
    "prefix_cache_hits", "prefix_cache_queries", "preemptions", "output_tokens", "prompt_tokens", "decode_seconds",
    "prefill_seconds",
)  # fmt: skip
HISTOGRAMS = ("ttft", "itl", "queue")
_GAUGES = ("running", "waiting", "kv_usage", "running_max")
CONDITIONS: dict[str, tuple[str, Callable[[Mapping[str, float], Mapping[str, float]], bool]]] = {
    "queueing": ("requests wait in the server's queue", lambda now, _: now.get("waiting", 0.0) > 0),
    "kv_full": ("the KV cache is full", lambda now, _: now.get("kv_usage", 0.0) > KV_FULL),
    "preemptions": ("requests are preempted", lambda now, before: _grew(now, before, "preemptions")),
}
"""Code -> what to say of it, and whether it holds, from a scrape and the one before."""

Alert = tuple[int, str, str]
"""t, level, text of something that began or ended."""


class ServerSource:
    """One scraped server. `first` and `extremes` cover the whole session, for the summary."""

    def __init__(self, src: str, url: str = "") -> None:
        self.src, self.url = src, url
        self.t = 0
        self.ok = True
        self.error: str | None = None
        self.info: dict[str, str] = {}
        self.values: dict[str, float] = {}
        self.totals: dict[str, list[float]] = {}
        self.histograms: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._holding: dict[str, Holding] = {}
        self._held_before: deque[tuple[str, int, int]] = deque(maxlen=1000)

    def scrape(self, event: Server, slot: Slot | None, measured: bool, sums: ServerSums | None = None) -> list[Alert]:
        """Fold one scrape; what began or ended with it. `sums` are those of the measured time it is in."""
        news = self._news(event)
        self.url, self.ok, self.error, self.t = event.url, event.ok, event.error, max(self.t, event.t)
        if not event.ok:
            return news
        self.info = self.info | event.info
        before, self.values = self.values, _flat(event)
        values = self.values
        alerts = self._alerts(event.t, values, before)
        if slot is not None:
            slot.servers[self.src] = [event.t, {name: values[name] for name in _IN_SLOT if name in values}]
        if measured:
            self._measure(event)
        if sums is not None:
            add_scrape(sums, values)
        return [*news, *alerts]

    def _news(self, event: Server) -> list[Alert]:
        if self.ok and not event.ok:
            return [(event.t, "warn", f"server metrics unreachable: {event.error or event.url}")]
        return [(event.t, "info", "server metrics are back")] if event.ok and not self.ok else []

    def _alerts(self, t: int, values: Mapping[str, float], before: Mapping[str, float]) -> list[Alert]:
        found: list[Alert] = []
        for code, (text, holds) in CONDITIONS.items():
            held = holds(values, before)
            if not held and code not in self._holding:
                continue
            change = self._holding.setdefault(code, Holding()).look(held, t)
            if change is None:
                continue
            what, began, last = change
            if what == "began":
                found.append((began, "warn", text))
            else:
                found.append((last, "info", f"{text}: ended after {(last - began) / 1e6:.0f} s"))
                self._held_before.append((code, began, last))
        return found

    def held(self) -> list[tuple[str, int, int | None]]:
        """Code, begin and end (None: still) of each stretch of queueing, full KV cache or preemptions."""
        now = [(code, state.since, None) for code, state in self._holding.items() if state.since is not None]
        return sorted([*self._held_before, *now], key=lambda stretch: stretch[1])

    def _measure(self, event: Server) -> None:
        """First, last, sum, count, highest and gain of each concept; first and last of each histogram."""
        for name, value in event.concepts.items():
            total = self.totals.setdefault(name, [value, value, 0.0, 0, value, 0.0])
            total[5] += value - total[1] if value >= total[1] else value  # a restarted counter began at 0
            total[1], total[2], total[3], total[4] = value, total[2] + value, total[3] + 1, max(total[4], value)
        for name, buckets in event.histograms.items():
            first, _ = self.histograms.get(name, (buckets, buckets))
            self.histograms[name] = first, buckets

    def view(self, now: int, window: Sequence[Slot]) -> ServerView:
        scrapes = [found for slot in window if (found := slot.servers.get(self.src)) is not None]
        return ServerView(
            url=self.url,
            age_s=(now - self.t) / 1e6,
            ok=self.ok,
            error=self.error,
            running=self.values.get("running"),
            waiting=self.values.get("waiting"),
            kv_usage=self.values.get("kv_usage"),
            prefix_hit_rate=self._hit_rate(scrapes),
            preemptions_per_s=_rate(scrapes, "preemptions"),
            output_tokens_per_s=_rate(scrapes, "output_tokens"),
            ttft_mean_ms=_mean_ms(scrapes, "ttft"),
            itl_mean_ms=_itl_mean_ms(scrapes),
            info=self.info,
        )

    def _hit_rate(self, scrapes: list[list[Any]]) -> float | None:
        """From counters in the window; a server that only tells a rate is taken at its word."""
        hits, queries = (_difference(scrapes, f"prefix_cache_{what}") for what in ("hits", "queries"))
        if hits is not None and queries:
            return hits / queries
        return self.values.get("prefix_hit_rate")

    def quantiles_ms(self, name: str) -> dict[str, dict[str, float | None]]:
        """p50, p95 and p99 of what a histogram (of seconds) gained over the session, as the edges of the bucket that
        holds each: nothing finer is known. `high` is None in the last, open bucket."""
        first, last = self.histograms[name]
        gained = _gained(first.get("le"), last.get("le"))
        total = gained[-1][1] if gained else 0.0
        if total <= 0:
            return {}
        return {f"p{permille / 10:g}": _bucket(gained, total * permille / 1000) for permille in (500, 950, 990)}

    def snapshot(self) -> dict[str, Any]:
        return {
            "url": self.url, "t": self.t, "ok": self.ok, "error": self.error, "info": self.info, "values": self.values,
            "holding": {code: held.snapshot() for code, held in self._holding.items()},
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        for name in ("url", "t", "ok", "error", "info", "values"):
            setattr(self, name, state[name])
        self._holding = {code: Holding(*held) for code, held in state.get("holding", {}).items()}


_SUMS = tuple(f"{name}.{part}" for name in HISTOGRAMS for part in ("sum", "count"))
_IN_SLOT = (*_GAUGES, *COUNTERS, *_SUMS)


def add_scrape(sums: ServerSums, values: Mapping[str, float]) -> None:
    """Add a scrape's values, as they lie in the slots, to the sums of a stretch."""
    sums.scrape(values, _GAUGES, (*COUNTERS, *_SUMS))


def _grew(now: Mapping[str, float], before: Mapping[str, float], name: str) -> bool:
    return name in now and name in before and now[name] > before[name]


def _flat(event: Server) -> dict[str, float]:
    """Concepts, with each histogram's sum and count beside them."""
    values = dict(event.concepts)
    for name in HISTOGRAMS:
        for part in ("sum", "count"):
            value = event.histograms.get(name, {}).get(part)
            if isinstance(value, int | float):
                values[f"{name}.{part}"] = float(value)
    return values


def _difference(scrapes: list[list[Any]], name: str) -> float | None:
    """How much a counter grew over the scrapes; after a restart it began again at 0."""
    values = [values[name] for _, values in scrapes if name in values]
    if len(values) < 2:
        return None
    steps = pairwise(values)
    return float(sum(after - before if after >= before else after for before, after in steps))


def _rate(scrapes: list[list[Any]], name: str) -> float | None:
    times = [t for t, values in scrapes if name in values]
    grown = _difference(scrapes, name)
    return None if grown is None or times[-1] <= times[0] else grown / ((times[-1] - times[0]) / 1e6)


def _mean_ms(scrapes: list[list[Any]], name: str) -> float | None:
    """The mean of what a histogram (of seconds) gained in the window."""
    total, count = _difference(scrapes, f"{name}.sum"), _difference(scrapes, f"{name}.count")
    return None if total is None or not count else 1000 * total / count


def _itl_mean_ms(scrapes: list[list[Any]]) -> float | None:
    """From the histogram; llama.cpp has decode time and tokens instead."""
    mean = _mean_ms(scrapes, "itl")
    if mean is not None:
        return mean
    seconds, tokens = _difference(scrapes, "decode_seconds"), _difference(scrapes, "output_tokens")
    return 1000 * seconds / tokens if seconds and tokens else None


def _cumulative(raw: Any) -> dict[float, float]:
    """Upper edge -> cumulative count; edges are text on the wire, +Inf the last."""
    return {float(edge): float(count) for edge, count in raw.items()} if isinstance(raw, dict) else {}


def _gained(first: Any, last: Any) -> list[tuple[float, float]]:
    """Cumulative counts gained per edge; after a restart the server counted from 0."""
    before, after = _cumulative(first), _cumulative(last)
    if any(after.get(edge, 0.0) < count for edge, count in before.items()):
        before = {}
    return [(edge, count - before.get(edge, 0.0)) for edge, count in sorted(after.items())]


def _bucket(gained: list[tuple[float, float]], rank: float) -> dict[str, float | None]:
    low = 0.0
    for edge, count in gained:
        if count >= rank:
            return {"low": 1000 * low, "high": None if edge == inf else 1000 * edge}
        low = edge
    return {"low": 1000 * low, "high": None}


def gauge(slot: Slot, name: str) -> float | None:
    """A gauge of a second: summed over servers, or the highest for a ratio."""
    values = [found[1][name] for found in slot.servers.values() if name in found[1]]
    if not values:
        return None
    return float(max(values) if name == "kv_usage" else sum(values))
