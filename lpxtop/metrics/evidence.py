"""The facts that the rules of diagnosis look at: one struct, made from the state by one function.

The screen's cover the last `EVIDENCE_S` measured seconds of the current load level, a summary's one level each.
Must not judge. GPUs are here only when they serve this endpoint.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from lpxtop.metrics import screen
from lpxtop.metrics.distribution import bucket_ms, bucket_quantiles, merged, percentiles
from lpxtop.metrics.gpus import GpuSource
from lpxtop.metrics.servers import add_scrape
from lpxtop.metrics.slots import SLOT_US, Slot
from lpxtop.metrics.sums import GpuSums, RequestSums, ServerSums, Sums
from lpxtop.metrics.view import LevelView, Verdict

if TYPE_CHECKING:
    from lpxtop.metrics.state import RunState

EVIDENCE_S = 40
"""Seconds the screen's evidence covers at most: above the 30 s that looking locked needs."""


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU that serves the endpoint. Shares are of busy samples, or of the time the driver's counters cover."""

    label: str
    source: str = ""
    samples: int = 0
    busy: int = 0
    busy_s: float = 0.0
    utilization_percent: float | None = None
    memory_utilization_percent: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_low_mhz: float | None = None
    sm_clock_high_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    temperature_c: float | None = None  # highest
    margin_c: float | None = None  # lowest
    pstate: float | None = None  # highest number: lowest performance
    held: dict[str, int] = {}  # busy samples per throttle reason
    capped_low: int = 0  # busy samples power-capped far below the limit
    held_share: dict[str, float] = {}  # of the counters, per reason
    persistence: bool | None = None

    def share(self, *reasons: str) -> float:
        """How much of the busy time clocks were held for the first of these reasons, by bits or by counters."""
        by_bits = [self.held.get(reason, 0) / self.busy for reason in reasons] if self.busy else []
        by_counters = [self.held_share.get(reason.replace(" ", "_"), 0.0) for reason in reasons]
        return min(1.0, max([*by_bits, *by_counters], default=0.0))

    @property
    def clock_lost(self) -> float:
        """How much of the highest clock was not there; 0 where clocks are not known."""
        if self.sm_clock_mhz is None or not self.sm_clock_max_mhz:
            return 0.0
        return max(0.0, 1 - self.sm_clock_mhz / self.sm_clock_max_mhz)


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One server's own metrics. `queued_share` is the share of scrapes with somebody waiting."""

    url: str = ""
    scrapes: int = 0
    running: float | None = None
    running_limit: float | None = None
    waiting: float | None = None
    waiting_high: float | None = None
    queued_share: float = 0.0
    kv_usage: float | None = None
    kv_usage_high: float | None = None
    kv_full_share: float = 0.0
    kv_capacity_tokens: int | None = None
    preemptions: float = 0.0
    prefix_hit_rate: float | None = None
    prefill_share: float | None = None
    queue_ms: float | None = None
    ttft_ms: float | None = None


class LevelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A load level that was visited. `load` is its concurrency, or its rate in requests/s."""

    index: int
    load: float
    requests: int = 0
    output_tokens_per_s: float | None = None
    ttft_p50_ms: float | None = None
    itl_p50_ms: float | None = None
    e2e_p50_ms: float | None = None


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """Least squares of TTFT over prompt tokens that had to be computed: `explained` is the share of the mean TTFT
    that grows with the prompt, `r_squared` how well a line fits."""

    requests: int
    ms_per_thousand_tokens: float
    r_squared: float
    explained: float


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the rules may look at. `level` is the index of the level that the figures are of."""

    ours: bool = True  # whether we send load
    requests: RequestSums = msgspec.field(default_factory=RequestSums)
    in_flight: float | None = None
    ttft_p50_ms: float | None = None
    rtt_p50_ms: float | None = None
    growth: Growth | None = None
    longest_tokens: int | None = None
    open_sent: int = 0
    open_started: int = 0  # of those, with at least one token
    silent_s: float | None = None  # since the last token of any of them
    gpus: tuple[GpuFacts, ...] = ()
    servers: tuple[ServerFacts, ...] = ()
    levels: tuple[LevelFacts, ...] = ()
    level: int | None = None
    quality: tuple[Verdict, ...] = ()


def evidence(
    state: "RunState",
    sums: Sums,
    *,
    ttft_p50_ms: float | None,
    level: int | None,
    levels: Sequence[LevelView],
    quality: tuple[Verdict, ...],
) -> Evidence:
    """What the sums of a stretch, the levels and the requests in flight say."""
    sent = [stream for stream in state.streams.by_id.values() if stream.sent is not None]
    heard = screen.known_until(state)
    rows = [total / n for total, n in sums.in_flight.values() if n]
    return Evidence(
        ours=not state.watching,
        requests=sums.requests,
        in_flight=sum(rows) if rows else None,
        ttft_p50_ms=ttft_p50_ms,
        rtt_p50_ms=bucket_ms(percentiles(sums.requests.rtt, (500,), gated=False)[0]),
        growth=growth(sums.requests.fit),
        longest_tokens=state.counts.longest_tokens,
        open_sent=len(sent),
        open_started=sum(stream.chunks > 0 for stream in sent),
        silent_s=min((max(0, heard - stream.last) / 1e6 for stream in sent), default=None),
        gpus=tuple(_gpus(state, sums)),
        servers=tuple(
            _server(state, src, found) for src, found in sums.servers.items() if found.scrapes and src in state.servers
        ),
        levels=_levels(levels),
        level=level,
        quality=quality,
    )


def of_screen(state: "RunState", levels: Sequence[LevelView], quality: tuple[Verdict, ...]) -> Evidence:
    """The evidence of the last seconds of the current level; of all servers and GPUs when watching."""
    current = state.timeline.current
    first = state.t // SLOT_US - EVIDENCE_S + 1
    if current is not None and not state.watching:
        first = max(first, -(-current.from_us // SLOT_US))
    slots = state.ring.since(first)
    ttft = bucket_quantiles(merged(slot.ttft for slot in slots)).p50
    index = None if current is None else current.index
    sums = _recent(state, slots)
    return evidence(state, sums, ttft_p50_ms=ttft, level=index, levels=levels, quality=quality)


def _recent(state: "RunState", slots: Sequence[Slot]) -> Sums:
    sums = Sums()
    for slot in slots:
        sums.join(slot.sums)
        if state.measuring(slot.second * SLOT_US):
            for src, (total, n) in slot.in_flight.items():
                sums.load(src, total, n)
        for src, (t, values) in slot.servers.items():
            if state.measuring(t):
                add_scrape(sums.servers.setdefault(src, ServerSums()), values)
    return sums


# --- GPUs ---------------------------------------------------------------------------------------------------------


def serving(state: "RunState") -> list[GpuSource]:
    """Sources of GPUs known to serve this endpoint: simulated ones, or those whose source says so."""
    simulated = state.header is not None and state.header.simulated
    return [source for source in state.gpus.values() if simulated or source.serves_target]


def _gpus(state: "RunState", sums: Sums) -> list[GpuFacts]:
    return [
        _gpu(source, gpu, row)
        for source in serving(state)
        for gpu, row in enumerate(sums.gpus.get(source.src, ()))
        if _known(source, gpu).get("serves_target") is not False
    ]


def _known(source: GpuSource, gpu: int) -> dict[str, Any]:
    return source.inventory[gpu] if gpu < len(source.inventory) else {}


def _gpu(source: GpuSource, gpu: int, row: GpuSums) -> GpuFacts:
    known = _known(source, gpu)
    of = {name: values for name, values in row.of.items() if values.n}
    means = {name: values.mean for name, values in of.items()}
    clock, heat = of.get("sm_clock_mhz"), of.get("temperature_c")
    limit = means.get("power_limit_watts")
    return GpuFacts(
        label=source.label(gpu),
        source=source.src,
        samples=row.samples,
        busy=row.busy,
        busy_s=row.busy_s,
        utilization_percent=means.get("utilization_percent"),
        memory_utilization_percent=means.get("memory_utilization_percent"),
        power_watts=means.get("power_watts"),
        power_limit_watts=known.get("power_limit_watts") if limit is None else limit,
        sm_clock_mhz=means.get("sm_clock_mhz"),
        sm_clock_low_mhz=None if clock is None else clock.low,
        sm_clock_high_mhz=None if clock is None else clock.high,
        sm_clock_max_mhz=known.get("sm_clock_max_mhz"),
        temperature_c=None if heat is None else heat.high,
        margin_c=row.margin_c.low if row.margin_c.n else None,
        pstate=row.pstate.high if row.pstate.n else None,
        held=dict(row.held),
        capped_low=row.capped_low,
        held_share={reason: held_s / row.counted_s for reason, held_s in row.held_s.items()} if row.counted_s else {},
        persistence=known.get("persistence"),
    )


# --- servers, levels, requests ------------------------------------------------------------------------------------


def _server(state: "RunState", src: str, found: ServerSums) -> ServerFacts:
    source = state.servers[src]
    of, gained = found.of, found.gained

    def mean(name: str) -> float | None:
        return of[name].mean if name in of else None

    def high(name: str) -> float | None:
        return of[name].high if name in of else None

    queries, prefill = gained.get("prefix_cache_queries", 0.0), gained.get("prefill_seconds")
    working = gained.get("decode_seconds", 0.0) + (0.0 if prefill is None else prefill)
    return ServerFacts(
        url=source.url,
        scrapes=found.scrapes,
        running=mean("running"),
        running_limit=high("running_max"),
        waiting=mean("waiting"),
        waiting_high=high("waiting"),
        queued_share=found.queued / found.scrapes,
        kv_usage=mean("kv_usage"),
        kv_usage_high=high("kv_usage"),
        kv_full_share=found.full / found.scrapes,
        kv_capacity_tokens=kv_capacity(source.info),
        preemptions=gained.get("preemptions", 0.0),
        prefix_hit_rate=gained.get("prefix_cache_hits", 0.0) / queries if queries > 0 else None,
        prefill_share=prefill / working if prefill is not None and working > 0 else None,
        queue_ms=_mean_ms(gained, "queue"),
        ttft_ms=_mean_ms(gained, "ttft"),
    )


def _mean_ms(gained: dict[str, float], name: str) -> float | None:
    count = gained.get(f"{name}.count", 0.0)
    return 1000 * gained.get(f"{name}.sum", 0.0) / count if count > 0 else None


def kv_capacity(info: dict[str, str]) -> int | None:
    """Tokens that the KV cache holds, from a server's settings; None where they do not say."""
    try:
        if "kv_cache_size_tokens" in info:
            return int(info["kv_cache_size_tokens"])
        return int(info["num_gpu_blocks"]) * int(info["block_size"])
    except (KeyError, ValueError):
        return None


def _levels(levels: Sequence[LevelView]) -> tuple[LevelFacts, ...]:
    """Levels with figures, by load."""
    found: list[LevelFacts] = []
    for level in levels:
        load = level.rate if level.rate is not None else level.concurrency
        if load is not None and level.settled:
            found.append(
                LevelFacts(
                    index=level.index, load=load, requests=level.requests,
                    output_tokens_per_s=level.output_tokens_per_s, ttft_p50_ms=level.ttft.p50,
                    itl_p50_ms=level.itl.p50, e2e_p50_ms=level.e2e.p50,
                )
            )  # fmt: skip
    return tuple(sorted(found, key=lambda level: level.load))


def growth(fit: Sequence[float]) -> Growth | None:
    """The line through the sums of `RequestSums.fit`; None where prompts or waits did not differ."""
    if not fit or fit[0] < 2:
        return None
    n, x, y, xx, xy, yy = fit
    spread_x, spread_y, shared = xx - x * x / n, yy - y * y / n, xy - x * y / n
    if spread_x <= 1e-9 * xx or spread_y <= 1e-9 * yy or y <= 0:
        return None
    slope = shared / spread_x
    return Growth(
        requests=int(n),
        ms_per_thousand_tokens=1000 * slope,
        r_squared=shared * shared / (spread_x * spread_y),
        explained=slope * x / y,
    )
