"""Causes seen in the server's own metrics: its queue, its KV cache, its batch. Also what needs the GPU beside them.

Each function takes the evidence and returns a finding or None. Must not look at load levels other than the current.
"""

from collections.abc import Callable

from lpxtop import format
from lpxtop.metrics.evidence import Evidence, GpuFacts, ServerFacts
from lpxtop.metrics.finding import CAUSE, HINT, Finding, about, share
from lpxtop.metrics.sums import KV_FULL

QUEUED_SHARE, QUEUED_SCRAPES = 0.5, 2
"""Somebody waits in half of the scrapes, and in two at least: one scrape may meet a request on its way in."""
KV_ROOM = 2.0
"""Two of the longest requests should fit the KV cache together."""
STARVED_PERCENT, STARVED_RUNNING = 50.0, 8.0
"""A GPU this idle with so many requests in the batch waits for the CPU."""
UNDER_FED_PERCENT = 30.0
"""GPU utilisation below which it is under-fed (the design's rule)."""
ALONE_IN_FLIGHT, ROOMY_KV = 2.0, 0.05
"""So few in flight, in a KV cache so empty: a batch of one or two leaves most of a batching server unused."""


def _worst(evidence: Evidence, of: Callable[[ServerFacts], float]) -> ServerFacts | None:
    return max(evidence.servers, key=of, default=None)


def _which(evidence: Evidence, server: ServerFacts) -> str:
    return f" at {format.clean(server.url, 60)}" if len(evidence.servers) > 1 else ""


def kv_full(evidence: Evidence) -> Finding | None:
    """Preemptions happen only for want of KV cache; a full cache with somebody waiting is why they wait."""
    server = _worst(evidence, lambda found: (found.preemptions > 0) + found.kv_full_share)
    if server is None:
        return None
    blocked = server.kv_full_share >= QUEUED_SHARE and (server.waiting_high or 0.0) > 0
    if server.preemptions <= 0 and not blocked:
        return None
    usage, waiting = server.kv_usage_high, server.waiting
    seen = [f"up to {format.percent(usage)} in use"] if usage is not None else []
    seen += [f"{about(waiting)} waiting"] if waiting is not None else []
    seen += [f"{about(server.preemptions)} preemptions"] if server.preemptions > 0 else []
    said = "the KV cache is full" if blocked else "the KV cache runs out"
    return Finding(
        code="kv_full",
        text=f"{said}{_which(evidence, server)}: {', '.join(seen)}",
        next_step="give the KV cache more memory (vLLM: --gpu-memory-utilization, --kv-cache-dtype fp8), lower "
        "--max-tokens, or send fewer at once",
        weight=CAUSE + share(0.5 + 0.5 * max(_waiting_share(server), server.kv_full_share)),
        evidence={
            "kv_usage_ratio": server.kv_usage,
            "kv_usage_high_ratio": usage,
            "limit_ratio": KV_FULL,
            "waiting_requests": waiting,
            "preempted_requests": server.preemptions,
            "samples_scrapes": server.scrapes,
        },
    )


def queueing(evidence: Evidence) -> Finding | None:
    server = _worst(evidence, lambda found: found.waiting or 0.0)
    if server is None or server.waiting is None or server.queued_share < QUEUED_SHARE:
        return None
    if server.queued_share * server.scrapes < QUEUED_SCRAPES:
        return None
    beside = "" if server.running is None else f" beside {about(server.running)} running"
    wait = f"; they wait {format.latency(server.queue_ms)} on average" if server.queue_ms is not None else ""
    return Finding(
        code="queueing",
        text=f"requests queue in the server{_which(evidence, server)}: {about(server.waiting)} wait for a place{beside}"
        f"{wait}",
        next_step="raise the batch limit while the KV cache has room (vLLM: --max-num-seqs), add a replica, or send "
        "fewer at once",
        weight=CAUSE + share(_waiting_share(server)),
        evidence={
            "waiting_requests": server.waiting,
            "waiting_high_requests": server.waiting_high,
            "running_requests": server.running,
            "queued_share_ratio": server.queued_share,
            "kv_usage_ratio": server.kv_usage,
            "queue_mean_ms": server.queue_ms,
            "samples_scrapes": server.scrapes,
        },
    )


def _waiting_share(server: ServerFacts) -> float:
    """Of all requests inside the server, those that wait."""
    waiting = server.waiting or 0.0
    return waiting / (waiting + (server.running or 0.0)) if waiting > 0 else 0.0


def kv_room(evidence: Evidence) -> Finding | None:
    capacities = [found.kv_capacity_tokens for found in evidence.servers if found.kv_capacity_tokens is not None]
    longest = evidence.longest_tokens
    if not capacities or longest is None or longest <= 0 or min(capacities) / longest >= KV_ROOM:
        return None
    capacity = min(capacities)
    return Finding(
        code="kv_room",
        text=f"the KV cache holds {format.count(capacity)} tokens and the longest request needs up to "
        f"{format.count(longest)}: two of them do not fit together",
        next_step="give the KV cache more memory, or bound --max-tokens and the prompts' length",
        weight=HINT + share(longest / capacity),
        evidence={"kv_capacity_tokens": capacity, "longest_request_tokens": longest, "limit_ratio": KV_ROOM},
    )


# --- the server's metrics beside its GPUs --------------------------------------------------------------------------


def mean_utilization(gpus: tuple[GpuFacts, ...]) -> float | None:
    """Over the GPUs that serve the endpoint, in percent."""
    known = [gpu.utilization_percent for gpu in gpus if gpu.utilization_percent is not None]
    return sum(known) / len(known) if known else None


def running(evidence: Evidence) -> float | None:
    known = [server.running for server in evidence.servers if server.running is not None]
    return sum(known) if known else None


def nobody_waits(evidence: Evidence) -> bool:
    """Whether the servers say that their queues are empty; not knowing is not empty."""
    known = [server for server in evidence.servers if server.waiting is not None]
    return bool(known) and all(server.queued_share < QUEUED_SHARE for server in known)


def host_bound(evidence: Evidence) -> Finding | None:
    """A batch that is there and GPUs that do not work on it: what feeds them is too slow."""
    busy, batch = mean_utilization(evidence.gpus), running(evidence)
    if busy is None or batch is None or busy >= STARVED_PERCENT or batch < STARVED_RUNNING:
        return None
    return Finding(
        code="host_bound",
        text=f"host-bound: {about(batch)} requests run, but the GPUs work {about(busy)}% of "
        "the time: the CPU side does not feed them",
        next_step="look at the engine process (top -H): one thread at 100% is the scheduler, tokenizer or HTTP server; "
        "give it CPUs of its own",
        weight=CAUSE + share(1 - busy / 100),
        evidence={"utilization_percent": busy, "limit_percent": STARVED_PERCENT, "running_requests": batch},
    )


def under_fed(evidence: Evidence) -> Finding | None:
    """Room in the server at the highest load it was given: an idle GPU, or a batch of one or two in an empty cache."""
    if not evidence.ours or evidence.in_flight is None or not nobody_waits(evidence) or not _at_the_top(evidence):
        return None
    busy, batch = mean_utilization(evidence.gpus), running(evidence)
    usage = max((server.kv_usage for server in evidence.servers if server.kv_usage is not None), default=None)
    idle = busy is not None and busy < UNDER_FED_PERCENT and (batch is None or batch < STARVED_RUNNING)
    alone = evidence.in_flight <= ALONE_IN_FLIGHT and usage is not None and usage < ROOMY_KV
    if evidence.in_flight <= 0 or not (idle or alone):
        return None
    seen = [f"{about(evidence.in_flight)} in flight", "none waiting"]
    seen += [f"GPU {about(busy)}% busy"] if idle else []
    seen += [f"KV cache {format.percent(usage, 1)} in use"] if usage is not None else []
    return Finding(
        code="under_fed",
        text=f"under-fed: {', '.join(seen)}; the server could do more, these figures are not its limit",
        next_step="raise the concurrency until throughput stops growing",
        level="info",
        weight=HINT + share(1 - (busy or 0.0) / 100 if idle else 1 - (usage or 0.0)),
        evidence={
            "in_flight_requests": evidence.in_flight,
            "waiting_requests": max(server.waiting or 0.0 for server in evidence.servers),
            "utilization_percent": busy,
            "kv_usage_ratio": usage,
        },
    )


def _at_the_top(evidence: Evidence) -> bool:
    """Whether no higher load was tried: one that was says better what the server can do."""
    return not evidence.levels or evidence.level is None or evidence.levels[-1].index == evidence.level
