"""How far the figures can be trusted: a small table of rules over measured evidence, each a sentence for a person.

A rule returns a verdict with its evidence, or None. Must not gather evidence (the state does) or explain the
server's behaviour (diagnosis does).
"""

from collections.abc import Callable

import msgspec

from lpxtop import format
from lpxtop.metrics.distribution import Counts, bucket_ms, percentiles
from lpxtop.metrics.steady import Drift, Little
from lpxtop.metrics.view import QualityView, Verdict

_MIN_SAMPLES = 20


class Client(msgspec.Struct, kw_only=True):
    """The load processes about themselves, over a window or a run. Distributions are log buckets of µs."""

    loop_lag: Counts = {}
    read_delay: Counts = {}
    send_lateness: Counts = {}
    events: int = 0
    reads: int = 0
    coalesced: int = 0
    user_stamps: int = 0
    cpu_ratio: float | None = None
    timestamp_source: str | None = None
    dropped_events: int = 0


class Answers(msgspec.Struct, kw_only=True):
    """What the answers showed, since the start, warm-up left out."""

    ok: int = 0
    not_streamed: int = 0
    buffered: int = 0
    limited: int = 0
    over_limit: int = 0
    stopped_early: int = 0
    usage_tokens: int = 0
    usage_chunks: int = 0
    token_sources: dict[str, int] = {}
    first_chunk_assumed: int = 0
    ignore_eos: bool = False


class Evidence(msgspec.Struct, kw_only=True):
    """Everything the rules may look at."""

    client: Client
    answers: Answers
    icl_p50_ms: float | None = None
    ttft_p50_ms: float | None = None
    e2e_p50_ms: float | None = None
    open_loop: bool = False
    seconds_per_send: float | None = None
    drifts: tuple[Drift, ...] = ()
    little: Little | None = None


def percentile_us(counts: Counts, permille: int) -> float | None:
    """A percentile of buckets, in µs, of however few samples: it is a check, not a result."""
    value = bucket_ms(percentiles(counts, (permille,), gated=False)[0])
    return None if value is None else value * 1000


def p99(counts: Counts) -> float | None:
    return percentile_us(counts, 990)


def view(client: Client, verdicts: tuple[Verdict, ...]) -> QualityView:
    """The figures of the measurement for the screen."""
    lag, late = p99(client.loop_lag), p99(client.send_lateness)
    return QualityView(
        timestamp_source=client.timestamp_source,
        read_delay_us_p99=p99(client.read_delay),
        coalesced_ratio=client.coalesced / client.events if client.events else None,
        loop_lag_ms_p99=None if lag is None else lag / 1000,
        send_lateness_ms_p99=None if late is None else late / 1000,
        client_cpu_ratio=client.cpu_ratio,
        dropped_events=client.dropped_events,
        verdicts=verdicts,
    )


def judge(evidence: Evidence) -> tuple[Verdict, ...]:
    """Every rule that has something to say, worst first."""
    found = [verdict for rule in RULES if (verdict := rule(evidence)) is not None]
    return tuple(sorted(found, key=lambda verdict: ("error", "warn", "info").index(verdict.level)))


def client_cpu(evidence: Evidence) -> Verdict | None:
    ratio = evidence.client.cpu_ratio
    if ratio is None or ratio <= 0.8:
        return None
    return Verdict(
        code="client_limited",
        text=f"client-limited: the load process used {format.percent(ratio)} of a core; use more workers or a faster "
        "machine before trusting these figures",
        level="error",
        evidence={"client_cpu_ratio": ratio, "limit": 0.8},
    )


def loop_lag(evidence: Evidence) -> Verdict | None:
    lag_us, icl_ms = p99(evidence.client.loop_lag), evidence.icl_p50_ms
    limit_ms = max(5.0, 0.2 * icl_ms) if icl_ms is not None else 5.0
    if lag_us is None or sum(evidence.client.loop_lag.values()) < _MIN_SAMPLES or lag_us / 1000 <= limit_ms:
        return None
    return Verdict(
        code="client_limited",
        text=f"client-limited: the load process's loop ran {format.latency(lag_us / 1000)} late at p99; something "
        "else uses its CPU",
        evidence={"loop_lag_ms_p99": lag_us / 1000, "limit_ms": limit_ms},
    )


def send_lateness(evidence: Evidence) -> Verdict | None:
    """Open loop: against the schedule and the TTFT that it adds to. Closed loop: against the time a request holds its
    place, of which it takes a share."""
    late_us = p99(evidence.client.send_lateness)
    limit_ms = _open_limit_ms(evidence) if evidence.open_loop else max(5.0, _share(0.05, evidence.e2e_p50_ms))
    if late_us is None or sum(evidence.client.send_lateness.values()) < _MIN_SAMPLES or late_us / 1000 <= limit_ms:
        return None
    means = (
        "read ttft_due, which counts the wait, beside ttft"
        if evidence.open_loop
        else "the server had less in flight than was asked for"
    )
    return Verdict(
        code="late_sends",
        text=f"due requests were sent {format.latency(late_us / 1000)} late at p99: {means}",
        evidence={"send_lateness_ms_p99": late_us / 1000, "limit_ms": limit_ms},
    )


def _open_limit_ms(evidence: Evidence) -> float:
    gap_s = evidence.seconds_per_send
    return max(2.0, _share(0.02, None if gap_s is None else 1000 * gap_s), _share(0.05, evidence.ttft_p50_ms))


def _share(share: float, of: float | None) -> float:
    return 0.0 if of is None else share * of


def user_stamps(evidence: Evidence) -> Verdict | None:
    client = evidence.client
    share = client.user_stamps / client.reads if client.reads else 0.0
    if client.timestamp_source in (None, "kernel") and share <= 0.01:
        return None
    delay = p99(client.read_delay)
    return Verdict(
        code="user_space_stamps",
        text="arrivals are stamped in user space, not by the kernel: add the client's own read delay to every figure"
        + (f" (p99 {format.latency(delay / 1000)})" if delay is not None else ""),
        level="info" if share < 0.05 and client.timestamp_source == "kernel" else "warn",
        evidence={"timestamp_source": client.timestamp_source, "user_stamps": client.user_stamps,
                  "events": client.events},
    )  # fmt: skip


def coalesced(evidence: Evidence) -> Verdict | None:
    client = evidence.client
    ratio = client.coalesced / client.events if client.events >= _MIN_SAMPLES else 0.0
    if ratio <= 0.05:
        return None
    return Verdict(
        code="coalesced",
        text=f"{format.percent(ratio)} of the chunks came in one read with their successor: their gaps are estimates, "
        "the percentiles of ICL and ITL with them",
        evidence={"coalesced_ratio": ratio, "events": client.events},
    )


def buffered(evidence: Evidence) -> Verdict | None:
    answers = evidence.answers
    if not answers.buffered:
        return None
    return Verdict(
        code="buffered",
        text=f"buffered by a proxy: {answers.buffered} of {answers.ok} answers came in one or two pieces; their TTFT "
        "and per-token latencies are left out (turn off response buffering on the way)",
        evidence={"buffered": answers.buffered, "ok": answers.ok},
    )


def not_streaming(evidence: Evidence) -> Verdict | None:
    answers = evidence.answers
    if not answers.not_streamed:
        return None
    return Verdict(
        code="not_streaming",
        text=f"{answers.not_streamed} answers were not streamed although streaming was asked for; they have no TTFT "
        "or per-token latency",
        evidence={"not_streamed": answers.not_streamed, "ok": answers.ok},
    )


def tokens_per_chunk(evidence: Evidence) -> Verdict | None:
    answers = evidence.answers
    ratio = answers.usage_tokens / answers.usage_chunks if answers.usage_chunks else 1.0
    if abs(ratio - 1) <= 0.02:
        return None
    return Verdict(
        code="tokens_per_chunk",
        text=f"{ratio:.2g} tokens per chunk: gaps between chunks (ICL) are not per-token latency",
        level="info",
        evidence={"tokens": answers.usage_tokens, "chunks": answers.usage_chunks},
    )


def chunks_as_tokens(evidence: Evidence) -> Verdict | None:
    counted = evidence.answers.token_sources
    if not counted.get("chunks"):
        return None
    return Verdict(
        code="tokens_not_counted",
        text=f"the server sent no usage for {counted['chunks']} answers: their tokens are counted as chunks",
        evidence={"token_sources": dict(counted)},
    )


def over_limit(evidence: Evidence) -> Verdict | None:
    answers = evidence.answers
    if not answers.over_limit:
        return None
    return Verdict(
        code="limit_not_held",
        text=f"{answers.over_limit} of {answers.limited} answers are longer than max tokens allowed: the server does "
        "not hold the limit",
        evidence={"over_limit": answers.over_limit, "requests": answers.limited},
    )


def stopped_early(evidence: Evidence) -> Verdict | None:
    answers = evidence.answers
    share = answers.stopped_early / answers.limited if answers.limited else 0.0
    if not answers.ignore_eos or share <= 0.05:
        return None
    return Verdict(
        code="stopped_early",
        text=f"{format.percent(share)} of the answers stopped before max tokens: output lengths vary, so compare "
        "throughput with care",
        level="info",
        evidence={"stopped_early": answers.stopped_early, "requests": answers.limited},
    )


def not_steady(evidence: Evidence) -> Verdict | None:
    real = [found for found in evidence.drifts if found.real]
    if not real:
        return None
    moves = ", ".join(f"{found.what} {found.change:+.0%}" for found in real)
    return Verdict(
        code="not_steady",
        text=f"not steady within this load level: {moves} from its begin to its end",
        evidence={found.what: {"change": found.change, "t": _finite(found.t)} for found in real},
    )


def littles_law(evidence: Evidence) -> Verdict | None:
    law = evidence.little
    if law is None or law.gap <= 0.05:
        return None
    return Verdict(
        code="littles_law",
        text=f"in flight ({law.in_flight:.3g}) and completions × latency ({law.per_s * law.residence_s:.3g}) differ "
        f"by {format.percent(law.gap)}: not steady, or requests were lost",
        evidence={"in_flight": law.in_flight, "per_s": law.per_s, "residence_s": law.residence_s, "gap": law.gap},
    )


def dropped(evidence: Evidence) -> Verdict | None:
    if not evidence.client.dropped_events:
        return None
    return Verdict(
        code="dropped_events",
        text=f"{format.count(evidence.client.dropped_events)} events were dropped on the way here: gaps and rates "
        "miss them; finished requests are complete",
        evidence={"dropped_events": evidence.client.dropped_events},
    )


def _finite(value: float) -> float | None:
    return value if abs(value) < 1e300 else None


RULES: tuple[Callable[[Evidence], Verdict | None], ...] = (
    client_cpu, loop_lag, send_lateness, user_stamps, coalesced, buffered, not_streaming, tokens_per_chunk,
    chunks_as_tokens, over_limit, stopped_early, not_steady, littles_law, dropped,
)  # fmt: skip
