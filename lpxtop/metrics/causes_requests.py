"""Causes seen in our own requests: the client, a proxy, refusals, errors, silence, the network, prefill.

Each function takes the evidence and returns a finding or None. Must not look at GPUs or a server's metrics.
"""

from lpxtop import format
from lpxtop.metrics.evidence import Evidence
from lpxtop.metrics.finding import CAUSE, FIRST, HINT, Finding, share
from lpxtop.metrics.sums import NO_FIRST_TOKEN_S, STALLED_S
from lpxtop.metrics.view import Verdict

BUFFERED_SHARE = 0.05
"""Answers in one or two pieces above this share are something on the way, not chance."""
RATE_LIMITED_SHARE = 0.01
ERRORS_SHARE = 0.10
"""From here on latencies are those of survivors (wire-metrics-stats.md D.5: errors first)."""
ERRORS_LEAST = 3
_UNANSWERED = ("cut", "cancelled", "stall", "timeout")
"""Outcomes of a request that the server left waiting."""
NETWORK_SHARE, NETWORK_LEAST_MS = 0.25, 2.0
NETWORK_SAMPLES = 5
PREFILL_SAMPLES = 20
PREFILL_R_SQUARED, PREFILL_EXPLAINED = 0.5, 0.5
"""A line explains half of the differences, and half of the mean TTFT grows with the prompt."""
PREFIX_HIDES = 0.5

_AFTER_ERRORS = {
    "http_4xx": "read the message in the event list: the request itself is refused (model, length, parameters)",
    "http_5xx": "read the server's log at the times of the event list",
    "unavailable": "the server or what stands before it turns requests away: check its health and replicas",
    "connect_error": "check that the server runs and listens there, and how many connections it accepts",
    "tls_error": "check the certificate and the name it is for: lpxtop doctor URL",
    "timeout": "the server takes longer than the time-out: look at its queue, or send fewer at once",
    "stall": "look whether the engine hangs: its log, and whether its GPUs work",
    "truncated": "something closes connections early: the proxy's read time-out, or a server that restarts",
}


def client_limited(evidence: Evidence) -> Finding | None:
    """What quality says of the client, as the first thing to mend."""
    return _of_quality(
        _spoken(evidence, "client_limited"), 1.0,
        "use more load processes (--workers) or an idle, faster machine, then measure again",
    )  # fmt: skip


def buffered(evidence: Evidence) -> Finding | None:
    """What quality says of buffering, when it is more than chance."""
    verdict = _spoken(evidence, "buffered")
    if verdict is None:
        return None
    part = verdict.evidence["buffered"] / max(1, verdict.evidence["ok"])
    if part < BUFFERED_SHARE:
        return None
    return _of_quality(
        verdict, 0.9 * part,
        "turn response buffering off on the way (nginx: proxy_buffering off), or measure at the server itself",
    )  # fmt: skip


def _spoken(evidence: Evidence, code: str) -> Verdict | None:
    return next((verdict for verdict in evidence.quality if verdict.code == code), None)


def _of_quality(verdict: Verdict | None, explains: float, next_step: str) -> Finding | None:
    if verdict is None:
        return None
    return Finding(
        code=verdict.code, text=verdict.text, level=verdict.level, evidence=verdict.evidence, next_step=next_step,
        weight=FIRST + share(explains),
    )  # fmt: skip


def rate_limited(evidence: Evidence) -> Finding | None:
    ended, limited = evidence.requests.ended, evidence.requests.outcomes.get("rate_limited", 0)
    if not limited or limited / ended < RATE_LIMITED_SHARE:
        return None
    return Finding(
        code="rate_limited",
        text=f"rate limited: {format.count(limited)} of {format.count(ended)} requests got 429; the figures are of "
        "those that were let through",
        next_step="stay below the limit (lower --concurrency or --rate), or have the key's quota raised",
        weight=FIRST + share(limited / ended),
        evidence={"rate_limited_requests": limited, "ended_requests": ended, "share_ratio": limited / ended},
    )


def errors_dominate(evidence: Evidence) -> Finding | None:
    outcomes, ended = evidence.requests.outcomes, evidence.requests.ended
    bad = {name: n for name, n in outcomes.items() if name not in ("ok", "cut", "cancelled", "rate_limited")}
    failed = sum(bad.values())
    if failed < ERRORS_LEAST or failed / ended < ERRORS_SHARE:
        return None
    most = max(sorted(bad), key=bad.__getitem__)
    return Finding(
        code="errors_dominate",
        text=f"{format.percent(failed / ended)} of the requests fail, most with {most} ({format.count(bad[most])}): "
        "latencies are those of the survivors",
        next_step=_AFTER_ERRORS.get(most, "read the messages in the event list and the server's log at those times"),
        level="error",
        weight=FIRST + share(failed / ended),
        evidence={
            "failed_requests": failed,
            "ended_requests": ended,
            "share_ratio": failed / ended,
            f"{most}_requests": bad[most],
        },
    )


def stalled(evidence: Evidence) -> Finding | None:
    """Now: nobody in flight hears anything. In the end: all that were left without an answer had long been silent."""
    limit_s = STALLED_S if evidence.open_started else NO_FIRST_TOKEN_S
    now = evidence.open_sent if evidence.silent_s is not None and evidence.silent_s >= limit_s else 0
    silent = evidence.requests.silent
    left = sum(evidence.requests.outcomes.get(outcome, 0) for outcome in _UNANSWERED)
    if not now and not (silent and silent >= left):
        return None
    said = (
        f"{format.count(now)} requests are in flight and none got a token for {format.duration(evidence.silent_s)}"
        if now
        else f"{format.count(silent)} requests ended without an answer, after {STALLED_S:.0f} s or more without a token"
    )
    return Finding(
        code="stalled",
        text=f"the server fell silent: {said}",
        next_step="look whether the engine hangs: its log, and whether its GPUs work",
        level="error",
        weight=FIRST + 0.99,
        evidence={
            "in_flight_requests": now or None,
            "silent_s": evidence.silent_s if now else None,
            "silent_requests": silent or None,
            "limit_s": limit_s if now else STALLED_S,
        },
    )


def network(evidence: Evidence) -> Finding | None:
    rtt, ttft = evidence.rtt_p50_ms, evidence.ttft_p50_ms
    known = sum(evidence.requests.rtt.values())
    if rtt is None or ttft is None or ttft <= 0 or known < NETWORK_SAMPLES:
        return None
    if rtt < NETWORK_LEAST_MS or rtt / ttft < NETWORK_SHARE:
        return None
    return Finding(
        code="network",
        text=f"the network takes {format.percent(min(1.0, rtt / ttft))} of TTFT: a round trip is "
        f"{format.latency(rtt)}, TTFT p50 {format.latency(ttft)}",
        next_step="measure from a host next to the server: tuning the server cannot shorten the way to it",
        weight=CAUSE + share(rtt / ttft),
        evidence={"rtt_p50_ms": rtt, "ttft_p50_ms": ttft, "share_ratio": min(1.0, rtt / ttft), "rtt_samples": known},
    )


def prefill_bound(evidence: Evidence) -> Finding | None:
    """TTFT grows with the prompt. Where the GPUs are known they must work: an idle one does not compute prompts."""
    growth = evidence.growth
    if growth is None or growth.requests < PREFILL_SAMPLES:
        return None
    if growth.r_squared < PREFILL_R_SQUARED or growth.explained < PREFILL_EXPLAINED:
        return None
    if evidence.gpus and not any(gpu.busy for gpu in evidence.gpus):
        return None
    return Finding(
        code="prefill_bound",
        text=f"prefill-bound: TTFT grows by {format.latency(growth.ms_per_thousand_tokens)} per 1000 prompt tokens, "
        f"which is {format.percent(min(1.0, growth.explained))} of it",
        next_step="shorten or cache what prompts share (prefix caching), or give prefill more tokens per step "
        "(vLLM: --max-num-batched-tokens)",
        weight=CAUSE + share(0.5 * growth.explained),
        evidence={
            "growth_ms": growth.ms_per_thousand_tokens,
            "explained_ratio": min(1.0, growth.explained),
            "r_squared_ratio": growth.r_squared,
            "samples_requests": growth.requests,
        },
    )


def prefix_cache(evidence: Evidence) -> Finding | None:
    """Prompt tokens from the cache, by the answers' own usage, else by the server's counters."""
    requests = evidence.requests
    told = requests.cached_tokens / requests.input_tokens if requests.input_tokens else None
    rates = [server.prefix_hit_rate for server in evidence.servers if server.prefix_hit_rate is not None]
    hits = told if told else max(rates, default=None)
    if not evidence.ours or hits is None or hits < PREFIX_HIDES:
        return None
    return Finding(
        code="prefix_cache",
        text=f"the prefix cache hides prefill: {format.percent(hits)} of the prompt tokens came from it, so TTFT is "
        "better than with prompts that differ",
        next_step="if your users' prompts differ, send prompts that do (another --seed, --prompts FILE)",
        level="info",
        weight=HINT + share(hits),
        evidence={"prefix_hit_ratio": hits, "limit_ratio": PREFIX_HIDES},
    )
