"""Why it is slow: each rule on both sides of its thresholds, contradictions, order, evidence with every finding."""

import random
from typing import Any

import msgspec
import pytest
from metrics_streams import header, session

from lpxtop import report
from lpxtop.events.buckets import bucket
from lpxtop.events.records import (
    End,
    Event,
    Finished,
    Gpu,
    Header,
    Keyframe,
    LoadSample,
    Phase,
    Request,
    Server,
    Source,
)
from lpxtop.metrics.diagnosis import RULES, diagnose, diagnose_levels, findings
from lpxtop.metrics.evidence import Evidence, GpuFacts, Growth, LevelFacts, ServerFacts, growth, kv_capacity, of_screen
from lpxtop.metrics.state import RunState
from lpxtop.metrics.summary import summary
from lpxtop.metrics.sums import GpuSums, RequestSums, ServerSums
from lpxtop.metrics.view import Verdict

S = 1_000_000


def codes(**facts: Any) -> list[str]:
    return [verdict.code for verdict in diagnose(Evidence(**facts))]


def outcomes(**counts: int) -> RequestSums:
    return RequestSums(ended=sum(counts.values()), outcomes=counts)


def gpu(label: str = "GPU 0", **facts: Any) -> GpuFacts:
    """A busy, healthy GPU: 20 samples at full clocks and half its power."""
    fields: dict[str, Any] = {
        "source": "gpu0", "samples": 20, "busy": 20, "busy_s": 10.0, "utilization_percent": 95.0,
        "memory_utilization_percent": 40.0, "power_watts": 350.0, "power_limit_watts": 700.0, "sm_clock_mhz": 1980.0,
        "sm_clock_low_mhz": 1900.0, "sm_clock_high_mhz": 1980.0, "sm_clock_max_mhz": 1980.0, "temperature_c": 60.0,
        "margin_c": 25.0, "pstate": 0.0,
    }  # fmt: skip
    return GpuFacts(label=label, **(fields | facts))


def server(**facts: Any) -> ServerFacts:
    """A server at work, nobody waiting, a third of its KV cache in use."""
    fields: dict[str, Any] = {
        "url": "http://h:8000/metrics", "scrapes": 20, "running": 6.0, "waiting": 0.0, "waiting_high": 0.0,
        "kv_usage": 0.3, "kv_usage_high": 0.4,
    }  # fmt: skip
    return ServerFacts(**(fields | facts))


def level(index: int, load: float, tokens_per_s: float, e2e_ms: float, itl_ms: float = 10.0, n: int = 50) -> LevelFacts:
    return LevelFacts(
        index=index, load=load, requests=n, output_tokens_per_s=tokens_per_s, e2e_p50_ms=e2e_ms, itl_p50_ms=itl_ms
    )


QUEUED = server(waiting=5.0, waiting_high=9.0, queued_share=0.9)
FULL = server(waiting=3.0, waiting_high=4.0, queued_share=0.8, kv_usage=0.95, kv_usage_high=0.99, kv_full_share=0.9)
LIMITED = Verdict(code="client_limited", text="client-limited", level="error", evidence={"client_cpu_ratio": 0.9})
LOCKED: dict[str, Any] = {
    "sm_clock_mhz": 1410.0, "sm_clock_low_mhz": 1410.0, "sm_clock_high_mhz": 1410.0, "busy_s": 31.0,
}  # fmt: skip
KNEE = (level(0, 8, 1000.0, 500.0), level(1, 16, 1050.0, 1000.0))
MEMORY_BUSY = gpu(memory_utilization_percent=80.0)
BARELY, NOT_QUITE = (msgspec.structs.replace(MEMORY_BUSY, utilization_percent=busy) for busy in (90.0, 89.0))

FIRES: dict[str, dict[str, Any]] = {
    "client_limited": {"quality": (LIMITED,)},
    "stalled": {"open_sent": 3, "open_started": 2, "silent_s": 6.0},
    "errors_dominate": {"requests": outcomes(ok=80, http_5xx=15, timeout=5)},
    "rate_limited": {"requests": outcomes(ok=90, rate_limited=10)},
    "buffered": {"quality": (Verdict(code="buffered", text="b", evidence={"buffered": 9, "ok": 10}),)},
    "network": {"rtt_p50_ms": 40.0, "ttft_p50_ms": 100.0, "requests": RequestSums(rtt={bucket(40_000): 20})},
    "kv_full": {"servers": (FULL,)},
    "queueing": {"servers": (QUEUED,)},
    "power_wall": {"gpus": (gpu(power_watts=698.0, held={"power cap": 15}, sm_clock_mhz=1700.0),)},
    "power_capped_elsewhere": {"gpus": (gpu(power_watts=240.0, capped_low=15, sm_clock_mhz=1500.0),)},
    "thermal_wall": {"gpus": (gpu(held={"thermal": 8}, temperature_c=88.0, margin_c=-1.0),)},
    "power_brake": {"gpus": (gpu(held={"power brake": 1}),)},
    "hw_slowdown": {"gpus": (gpu(held={"hw slowdown": 2}),)},
    "slower_gpu": {"gpus": (gpu("GPU 0"), gpu("GPU 1"), gpu("GPU 2", sm_clock_mhz=1500.0))},
    "clocks_locked": {"gpus": (gpu(**LOCKED),)},
    "clocks_low": {"gpus": (gpu(sm_clock_mhz=600.0, pstate=5.0),)},
    "host_bound": {"gpus": (gpu(utilization_percent=20.0, busy=0),), "servers": (server(running=20.0),)},
    "over_knee": {"levels": KNEE, "level": 1},
    "prefill_bound": {"growth": Growth(requests=40, ms_per_thousand_tokens=200.0, r_squared=0.9, explained=0.8)},
    "decode_bound": {
        "gpus": (MEMORY_BUSY,), "level": 1, "levels": (level(0, 4, 400, 500.0, 10.0), level(1, 16, 1500, 520.0, 11.0)),
    },
    "prefix_cache": {"servers": (server(prefix_hit_rate=0.8),)},
    "kv_room": {"servers": (server(kv_capacity_tokens=10_000),), "longest_tokens": 6_000},
    "under_fed": {"in_flight": 1.0, "servers": (server(running=1.0, kv_usage=0.002),)},
    "persistence_off": {"gpus": (gpu(persistence=False),)},
}  # fmt: skip
"""For each rule facts that are a clear case of it, and of nothing else."""


def test_every_rule_has_a_case() -> None:
    """No rule is in the table without a clear case here, and codes are unique."""
    assert sorted(rule.code for rule in RULES) == sorted(FIRES)
    assert all(rule.needs for rule in RULES)


@pytest.mark.parametrize("code", FIRES)
def test_a_clear_case_is_found_and_nothing_else(code: str) -> None:
    """The cause is named, with its evidence, a sentence and a step to try."""
    (verdict,) = diagnose(Evidence(**FIRES[code]))
    assert verdict.code == code
    assert verdict.evidence
    assert verdict.text
    assert verdict.next_step


def test_without_facts_no_finding() -> None:
    """Nothing known, nothing said: neither of a run nor of a watch."""
    assert codes() == []
    assert codes(ours=False) == []


def test_a_healthy_server_is_not_accused() -> None:
    """Busy GPU, room in the KV cache, nobody waiting, all requests answered, latency flat over the levels: silence."""
    assert (
        codes(
            requests=outcomes(ok=500), in_flight=8.0, ttft_p50_ms=80.0, rtt_p50_ms=0.3, gpus=(gpu(), gpu("GPU 1")),
            servers=(server(running_limit=256.0, prefix_hit_rate=0.1, kv_capacity_tokens=200_000),),
            longest_tokens=4000, open_sent=8, open_started=7, silent_s=0.02, level=1,
            levels=(level(0, 4, 500, 400.0), level(1, 8, 900, 440.0)),
        )
        == []
    )  # fmt: skip


NEAR: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("stalled", {"open_sent": 1, "open_started": 1, "silent_s": 5.0},
     {"open_sent": 1, "open_started": 1, "silent_s": 4.9}),
    ("stalled", {"open_sent": 1, "silent_s": 30.0}, {"open_sent": 1, "silent_s": 29.0}),
    ("stalled", {"requests": RequestSums(ended=2, outcomes={"cut": 2}, silent=2)},
     {"requests": RequestSums(ended=2, outcomes={"cut": 2}, silent=1)}),
    ("errors_dominate", {"requests": outcomes(ok=27, http_5xx=3)}, {"requests": outcomes(ok=28, http_5xx=3)}),
    ("errors_dominate", {"requests": outcomes(ok=1, http_5xx=3)}, {"requests": outcomes(ok=1, http_5xx=2)}),
    ("errors_dominate", {"requests": outcomes(cut=5, stall=3)}, {"requests": outcomes(cut=5, cancelled=3)}),
    ("rate_limited", {"requests": outcomes(ok=99, rate_limited=1)}, {"requests": outcomes(ok=100, rate_limited=1)}),
    ("buffered", {"quality": (Verdict(code="buffered", text="b", evidence={"buffered": 5, "ok": 100}),)},
     {"quality": (Verdict(code="buffered", text="b", evidence={"buffered": 4, "ok": 100}),)}),
    ("network", FIRES["network"] | {"rtt_p50_ms": 25.0}, FIRES["network"] | {"rtt_p50_ms": 24.0}),
    ("network", FIRES["network"] | {"rtt_p50_ms": 2.0, "ttft_p50_ms": 4.0},
     FIRES["network"] | {"rtt_p50_ms": 1.9, "ttft_p50_ms": 4.0}),
    ("network", FIRES["network"] | {"requests": RequestSums(rtt={1: 5})},
     FIRES["network"] | {"requests": RequestSums(rtt={1: 4})}),
    ("kv_full", {"servers": (server(preemptions=1.0),)}, {"servers": (server(preemptions=0.0),)}),
    ("kv_full", {"servers": (server(kv_full_share=0.5, waiting_high=1.0),)},
     {"servers": (server(kv_full_share=0.49, waiting_high=1.0),)}),
    ("kv_full", {"servers": (server(kv_full_share=0.5, waiting_high=1.0),)},
     {"servers": (server(kv_full_share=0.5, waiting_high=0.0),)}),
    ("queueing", {"servers": (server(waiting=1.0, queued_share=0.5),)},
     {"servers": (server(waiting=1.0, queued_share=0.49),)}),
    ("queueing", {"servers": (server(waiting=1.0, queued_share=1.0, scrapes=2),)},
     {"servers": (server(waiting=1.0, queued_share=1.0, scrapes=1),)}),
    ("queueing", {"servers": (QUEUED,)}, {"servers": (server(waiting=None, queued_share=1.0),)}),
    ("power_wall", {"gpus": (gpu(power_watts=680.0, held={"power cap": 5}),)},
     {"gpus": (gpu(power_watts=680.0, held={"power cap": 4}),)}),
    ("power_wall", {"gpus": (gpu(power_watts=680.0, held_share={"power_cap": 0.10}),)},
     {"gpus": (gpu(power_watts=680.0, held_share={"power_cap": 0.09}),)}),
    ("power_wall", {"gpus": (gpu(power_watts=0.97 * 700, held={"power cap": 20}),)},
     {"gpus": (gpu(power_watts=0.96 * 700, held={"power cap": 20}),)}),
    ("power_wall", {"gpus": (gpu(power_watts=700.0, held={"power cap": 4}, busy=4),)},
     {"gpus": (gpu(power_watts=700.0, held={"power cap": 3}, busy=3),)}),
    ("power_wall", {"gpus": (gpu(power_watts=700.0, held={"power cap": 20}),)},
     {"gpus": (gpu(power_watts=700.0, power_limit_watts=None, held={"power cap": 20}),)}),
    ("power_capped_elsewhere", {"gpus": (gpu(capped_low=5, sm_clock_mhz=1500.0),)},
     {"gpus": (gpu(capped_low=4, sm_clock_mhz=1500.0),)}),
    ("power_capped_elsewhere", {"gpus": (gpu(capped_low=20, sm_clock_mhz=0.98 * 1980),)},
     {"gpus": (gpu(capped_low=20, sm_clock_mhz=0.99 * 1980),)}),
    ("thermal_wall", {"gpus": (gpu(held={"thermal": 2}),)}, {"gpus": (gpu(held={"thermal": 1}),)}),
    ("thermal_wall", {"gpus": (gpu(held={"hw thermal": 2}),)}, {"gpus": (gpu(held={"hw thermal": 1}),)}),
    ("thermal_wall", {"gpus": (gpu(held_share={"thermal": 0.01}),)}, {"gpus": (gpu(held_share={"thermal": 0.009}),)}),
    ("thermal_wall", {"gpus": (gpu(margin_c=5.0),)}, {"gpus": (gpu(margin_c=6.0),)}),
    ("thermal_wall", {"gpus": (gpu(margin_c=1.0),)}, {"gpus": (gpu(margin_c=0.0),)}),
    ("power_brake", {"gpus": (gpu(held={"power brake": 1}),)}, {"gpus": (gpu(held={"power brake": 0}),)}),
    ("hw_slowdown", {"gpus": (gpu(held={"hw slowdown": 2}),)}, {"gpus": (gpu(held={"hw slowdown": 1}),)}),
    ("hw_slowdown", {"gpus": (gpu(held={"hw slowdown": 2}),)},
     {"gpus": (gpu(held={"hw slowdown": 2, "hw thermal": 1}),)}),
    ("slower_gpu", {"gpus": (gpu("GPU 0", sm_clock_mhz=1000.0), gpu("GPU 1", sm_clock_mhz=900.0))},
     {"gpus": (gpu("GPU 0", sm_clock_mhz=1000.0), gpu("GPU 1", sm_clock_mhz=901.0))}),
    ("slower_gpu", FIRES["slower_gpu"], {"gpus": (gpu("GPU 0"), gpu("GPU 2", sm_clock_mhz=1500.0, source="other"))}),
    ("clocks_locked", {"gpus": (gpu(**LOCKED | {"busy_s": 30.0}),)}, {"gpus": (gpu(**LOCKED | {"busy_s": 29.0}),)}),
    ("clocks_locked", {"gpus": (gpu(**LOCKED | {"sm_clock_low_mhz": 1400.0}),)},
     {"gpus": (gpu(**LOCKED | {"sm_clock_low_mhz": 1390.0}),)}),
    ("clocks_locked", {"gpus": (gpu(**LOCKED | {"sm_clock_mhz": 0.90 * 1980}),)},
     {"gpus": (gpu(**LOCKED | {"sm_clock_mhz": 0.91 * 1980}),)}),
    ("clocks_locked", {"gpus": (gpu(**LOCKED, utilization_percent=90.0),)},
     {"gpus": (gpu(**LOCKED, utilization_percent=89.0),)}),
    ("clocks_locked", {"gpus": (gpu(**LOCKED | {"pstate": 2.0}),)}, {"gpus": (gpu(**LOCKED | {"pstate": 3.0}),)}),
    ("clocks_locked", {"gpus": (gpu(**LOCKED),)}, {"gpus": (gpu(**LOCKED, held={"power cap": 1}),)}),
    ("clocks_low", {"gpus": (gpu(sm_clock_mhz=0.60 * 1980),)}, {"gpus": (gpu(sm_clock_mhz=0.61 * 1980),)}),
    ("clocks_low", {"gpus": (gpu(sm_clock_mhz=600.0),)}, {"gpus": (gpu(sm_clock_mhz=600.0, held={"thermal": 1}),)}),
    ("clocks_low", {"gpus": (gpu(sm_clock_mhz=600.0),)}, {"gpus": (gpu(sm_clock_mhz=600.0, sm_clock_max_mhz=None),)}),
    ("host_bound", {"gpus": (gpu(utilization_percent=49.0),), "servers": (server(running=8.0),)},
     {"gpus": (gpu(utilization_percent=50.0),), "servers": (server(running=8.0),)}),
    ("host_bound", {"gpus": (gpu(utilization_percent=49.0),), "servers": (server(running=8.0),)},
     {"gpus": (gpu(utilization_percent=49.0),), "servers": (server(running=7.9),)}),
    ("over_knee", {"levels": (level(0, 8, 1000, 500), level(1, 12, 1100, 650)), "level": 1},
     {"levels": (level(0, 8, 1000, 500), level(1, 12, 1101, 650)), "level": 1}),
    ("over_knee", {"levels": (level(0, 8, 1000, 500), level(1, 12, 1100, 650)), "level": 1},
     {"levels": (level(0, 8, 1000, 500), level(1, 12, 1100, 649)), "level": 1}),
    ("over_knee", {"levels": KNEE, "level": 1}, {"levels": KNEE, "level": 0}),
    ("over_knee", {"levels": KNEE, "level": 1}, {"levels": (KNEE[0], level(1, 11, 1050, 1000)), "level": 1}),
    ("over_knee", {"levels": (level(0, 8, 1000, 500, n=8), KNEE[1]), "level": 1},
     {"levels": (level(0, 8, 1000, 500, n=7), KNEE[1]), "level": 1}),
    ("prefill_bound", {"growth": Growth(requests=20, ms_per_thousand_tokens=1.0, r_squared=0.5, explained=0.5)},
     {"growth": Growth(requests=19, ms_per_thousand_tokens=1.0, r_squared=0.5, explained=0.5)}),
    ("prefill_bound", FIRES["prefill_bound"],
     {"growth": Growth(requests=40, ms_per_thousand_tokens=1.0, r_squared=0.49, explained=0.8)}),
    ("prefill_bound", FIRES["prefill_bound"],
     {"growth": Growth(requests=40, ms_per_thousand_tokens=1.0, r_squared=0.9, explained=0.49)}),
    ("prefill_bound", FIRES["prefill_bound"] | {"gpus": (gpu(busy=1),)},
     FIRES["prefill_bound"] | {"gpus": (gpu(busy=0),)}),
    ("decode_bound", FIRES["decode_bound"] | {"gpus": (gpu(memory_utilization_percent=60.0),)},
     FIRES["decode_bound"] | {"gpus": (gpu(memory_utilization_percent=59.0),)}),
    ("decode_bound", FIRES["decode_bound"] | {"gpus": (BARELY,)},
     FIRES["decode_bound"] | {"gpus": (NOT_QUITE,)}),
    ("decode_bound", FIRES["decode_bound"] | {"levels": (level(0, 4, 400, 500, 10.0), level(1, 8, 700, 510, 12.5))},
     FIRES["decode_bound"] | {"levels": (level(0, 4, 400, 500, 10.0), level(1, 8, 700, 510, 12.6))}),
    ("decode_bound", FIRES["decode_bound"] | {"levels": (level(0, 4, 400, 500), level(1, 8, 700, 510))},
     FIRES["decode_bound"] | {"levels": (level(0, 4, 400, 500), level(1, 7, 700, 510))}),
    ("prefix_cache", {"servers": (server(prefix_hit_rate=0.5),)}, {"servers": (server(prefix_hit_rate=0.49),)}),
    ("prefix_cache", {"requests": RequestSums(input_tokens=100, cached_tokens=50)},
     {"requests": RequestSums(input_tokens=100, cached_tokens=49)}),
    ("prefix_cache", {"servers": (server(prefix_hit_rate=0.9),)},
     {"servers": (server(prefix_hit_rate=0.9),), "ours": False}),
    ("kv_room", {"servers": (server(kv_capacity_tokens=9999),), "longest_tokens": 5000},
     {"servers": (server(kv_capacity_tokens=10_000),), "longest_tokens": 5000}),
    ("under_fed", {"in_flight": 2.0, "servers": (server(kv_usage=0.049),)},
     {"in_flight": 2.1, "servers": (server(kv_usage=0.049),)}),
    ("under_fed", {"in_flight": 2.0, "servers": (server(kv_usage=0.049),)},
     {"in_flight": 2.0, "servers": (server(kv_usage=0.05),)}),
    ("under_fed", {"in_flight": 4.0, "servers": (server(),), "gpus": (gpu(utilization_percent=29.0),)},
     {"in_flight": 4.0, "servers": (server(),), "gpus": (gpu(utilization_percent=30.0),)}),
    ("under_fed", FIRES["under_fed"], FIRES["under_fed"] | {"servers": (server(kv_usage=0.002, waiting=None),)}),
    ("under_fed", FIRES["under_fed"], FIRES["under_fed"] | {"ours": False}),
    ("under_fed", FIRES["under_fed"] | {"levels": KNEE, "level": 1}, FIRES["under_fed"] | {"levels": KNEE, "level": 0}),
    ("persistence_off", {"gpus": (gpu(persistence=False),)}, {"gpus": (gpu(persistence=True),)}),
    ("persistence_off", {"gpus": (gpu(persistence=False),)}, {"gpus": (gpu(persistence=None),)}),
]  # fmt: skip
"""Rule, facts that just make it speak, facts that just do not."""


@pytest.mark.parametrize(("code", "over", "under"), NEAR)
def test_both_sides_of_each_threshold(code: str, over: dict[str, Any], under: dict[str, Any]) -> None:
    """At the threshold the rule speaks, a hair short of it it does not."""
    rule = next(rule for rule in RULES if rule.code == code)
    assert rule.find(Evidence(**over)) is not None
    assert rule.find(Evidence(**under)) is None


# --- contradictions and order -------------------------------------------------------------------------------------

SILENCED = [
    ("client_limited", "over_knee"), ("client_limited", "under_fed"), ("client_limited", "prefill_bound"),
    ("client_limited", "network"), ("client_limited", "host_bound"), ("client_limited", "decode_bound"),
    ("kv_full", "queueing"), ("kv_full", "under_fed"), ("queueing", "under_fed"), ("queueing", "prefill_bound"),
    ("queueing", "decode_bound"), ("buffered", "prefill_bound"), ("buffered", "network"), ("over_knee", "under_fed"),
    ("over_knee", "decode_bound"), ("rate_limited", "under_fed"), ("rate_limited", "over_knee"),
    ("clocks_locked", "clocks_low"), ("host_bound", "under_fed"), ("stalled", "under_fed"),
    ("errors_dominate", "over_knee"),
]  # fmt: skip


@pytest.mark.parametrize(("stronger", "weaker"), SILENCED)
def test_contradicting_rules_do_not_both_speak(stronger: str, weaker: str) -> None:
    """Where the facts are a case of both, only the stronger is told."""
    rules = {rule.code: rule for rule in RULES}
    assert stronger in rules[weaker].yields_to
    assert weaker not in rules[stronger].yields_to
    facts = {**FIRES[weaker], **FIRES[stronger]}
    facts["servers"] = (*FIRES[stronger].get("servers", ()), *FIRES[weaker].get("servers", ()))
    assert weaker not in codes(**facts)


def test_direct_evidence_stands_beside_a_limited_client() -> None:
    """A limited client does not hide a queue, a power wall or refusals, which are seen directly."""
    found = codes(quality=(LIMITED,), servers=(QUEUED,), requests=outcomes(ok=5, rate_limited=5), **FIRES["power_wall"])
    assert found == ["client_limited", "rate_limited", "queueing", "power_wall"]


def test_what_explains_most_comes_first() -> None:
    """A queue that holds half of the requests goes before a power wall that costs a tenth, and after none that costs
    more; wrong answers go before both, hints after."""
    wall = gpu(power_watts=699.0, held={"power cap": 20}, sm_clock_mhz=0.9 * 1980, persistence=False)
    half = server(waiting=6.0, running=6.0, queued_share=1.0)
    few = server(waiting=0.2, running=6.0, queued_share=1.0)
    errors = outcomes(ok=1, http_5xx=9)
    assert codes(gpus=(wall,), servers=(half,), requests=errors) == [
        "errors_dominate", "queueing", "power_wall", "persistence_off",
    ]  # fmt: skip
    assert codes(gpus=(wall,), servers=(few,)) == ["power_wall", "queueing", "persistence_off"]


def test_several_levels_name_theirs() -> None:
    """Of each cause the weightiest level is told; what belongs to no level is not given one."""
    low = Evidence(servers=(server(waiting=1.0, queued_share=1.0),), quality=(LIMITED,))
    high = Evidence(servers=(server(waiting=20.0, queued_share=1.0),), quality=(LIMITED,))
    client, queue = diagnose_levels({"4 in flight": low, "64 in flight": high})
    assert queue.text.startswith("at 64 in flight: requests queue")
    assert queue.evidence["level_label"] == "64 in flight"
    assert "level_label" not in client.evidence
    (_, alone) = diagnose_levels({"4 in flight": low})
    assert alone.text.startswith("requests queue")


# --- never without evidence ---------------------------------------------------------------------------------------

UNITS = (
    "_ms", "_s", "_ratio", "_percent", "_watts", "_mhz", "_c", "_requests", "_tokens", "_tokens_per_s", "_samples",
    "_scrapes", "_gpus", "_label", "_state", "_before", "_now",
)  # fmt: skip


def random_evidence(rng: random.Random) -> Evidence:
    """Any facts: each known or not, in or out of every range."""

    def some(low: float, high: float) -> float | None:
        return rng.uniform(low, high) if rng.random() < 0.8 else None

    def reasons() -> dict[str, int]:
        words = ("power cap", "thermal", "hw thermal", "power brake", "hw slowdown")
        return {word: rng.randrange(0, 20) for word in words if rng.random() < 0.3}

    gpus = tuple(
        gpu(
            f"GPU {index}", busy=rng.choice((0, 3, 20)), busy_s=rng.uniform(0, 60), utilization_percent=some(0, 100),
            memory_utilization_percent=some(0, 100), power_watts=some(50, 700), power_limit_watts=some(200, 700),
            sm_clock_mhz=some(300, 1980), sm_clock_low_mhz=some(300, 1980), sm_clock_high_mhz=some(300, 1980),
            sm_clock_max_mhz=some(1000, 1980), temperature_c=some(20, 95), margin_c=some(-5, 40), pstate=some(0, 8),
            held=reasons(), capped_low=rng.choice((0, 0, 20)),
            held_share={"power_cap": rng.random()} if rng.random() < 0.5 else {},
            persistence=rng.choice((True, False, None)),
        )
        for index in range(rng.randrange(0, 4))
    )  # fmt: skip
    servers = tuple(
        ServerFacts(
            url="http://h", scrapes=rng.randrange(1, 30), running=some(0, 40), waiting=some(0, 10),
            waiting_high=some(0, 20), queued_share=rng.random(), kv_usage=some(0, 1), kv_usage_high=some(0, 1),
            kv_full_share=rng.random(), kv_capacity_tokens=rng.choice((None, 1000, 100_000)),
            preemptions=rng.choice((0.0, 0.0, 12.0)), prefix_hit_rate=some(0, 1), queue_ms=some(0, 900),
        )
        for _ in range(rng.randrange(0, 3))
    )  # fmt: skip
    levels = tuple(
        LevelFacts(
            index=index, load=2.0**index, requests=rng.randrange(0, 30), output_tokens_per_s=some(100, 1000),
            itl_p50_ms=some(5, 30), e2e_p50_ms=some(100, 2000),
        )
        for index in range(rng.randrange(0, 4))
    )  # fmt: skip
    names = ("ok", "cut", "cancelled", "stall", "rate_limited", "http_5xx", "connect_error")
    requests = outcomes(**{name: rng.randrange(0, 30) for name in names if rng.random() < 0.4})
    requests.silent = rng.randrange(0, 5)
    requests.rtt = {bucket(1000): rng.randrange(0, 20)}
    return Evidence(
        ours=rng.random() < 0.8, requests=requests, in_flight=some(0, 30), ttft_p50_ms=some(1, 500),
        rtt_p50_ms=some(0, 200), longest_tokens=rng.choice((None, 600, 60_000)), open_sent=rng.randrange(0, 4),
        open_started=rng.randrange(0, 2), silent_s=some(0, 40), gpus=gpus, servers=servers, levels=levels,
        level=rng.choice((None, 0, 1, 2, 3)), quality=(LIMITED,) if rng.random() < 0.2 else (),
        growth=rng.choice((None, FIRES["prefill_bound"]["growth"])),
    )  # fmt: skip


def test_no_finding_without_its_evidence() -> None:
    """Of any facts, known or not: whatever is found carries finite numbers, each named with its unit, and no "–" for
    them in its sentence; weights fall, codes are unique, and nobody speaks whom another silences."""
    rng = random.Random(4)
    yields = {rule.code: rule.yields_to for rule in RULES}
    seen: set[str] = set()
    anything = [random_evidence(rng) for _ in range(4000)]
    for facts in (*anything, *(Evidence(**case) for case in FIRES.values())):
        found = findings(facts)
        weights, told = [one.weight for one in found], [one.code for one in found]
        assert weights == sorted(weights, reverse=True)
        assert len(set(told)) == len(told)
        for verdict in (one.verdict() for one in found):
            assert not yields[verdict.code] & set(told)
            numbers = [value for value in verdict.evidence.values() if not isinstance(value, str)]
            assert numbers
            assert all(isinstance(value, int | float) and abs(value) < 1e12 for value in numbers)
            if verdict.code != "buffered":  # its evidence is that of quality's verdict
                assert all(name.endswith(UNITS) for name in verdict.evidence), verdict
            assert verdict.next_step
            assert "–" not in verdict.text, verdict
            assert "None" not in verdict.text
        seen |= set(told)
    assert seen == {rule.code for rule in RULES}


# --- where the facts come from ------------------------------------------------------------------------------------


def test_ttft_over_prompt_tokens() -> None:
    """TTFT = 50 ms + 0.1 ms per token at 100, 200 … 1000 tokens: slope 100 ms per 1000, and 55/105 of the mean."""
    sums = RequestSums()
    for tokens in range(100, 1100, 100):
        ttft_us = 50_000 + 100 * tokens
        sums.request(
            Finished(t=0, id=0, slot=0, due=0, outcome="ok", input_tokens=tokens + 7, cached_tokens=7,
                     first_token_us=ttft_us), streamed=True,
        )  # fmt: skip
    found = growth(sums.fit)
    assert found is not None
    assert found.requests == 10
    assert found.ms_per_thousand_tokens == pytest.approx(100.0)
    assert found.r_squared == pytest.approx(1.0)
    assert found.explained == pytest.approx(55 / 105)


def test_equal_prompts_say_nothing_of_prefill() -> None:
    """All prompts of one length: there is no line, whatever TTFT does."""
    sums = RequestSums()
    for ttft_us in (10_000, 50_000, 90_000):
        sums.request(
            Finished(t=0, id=0, slot=0, due=0, outcome="ok", input_tokens=256, first_token_us=ttft_us), streamed=True
        )
    assert growth(sums.fit) is None


@pytest.mark.parametrize(
    ("outcome", "last_us", "end_us", "silent"),
    [
        ("stall", 1_000_000, 6_000_000, 1), ("stall", 1_000_001, 6_000_000, 0), ("cut", None, 30_000_000, 1),
        ("cut", None, 29_000_000, 0), ("ok", 1_000_000, 60_000_000, 0), ("connect_error", None, None, 0),
    ],
)  # fmt: skip
def test_silence_before_the_end(outcome: str, last_us: int | None, end_us: int | None, silent: int) -> None:
    """5 s after a token, 30 s before the first one, and only of requests that got no whole answer."""
    sums = RequestSums()
    event = Finished(t=0, id=0, slot=0, due=0, outcome=outcome, last_token_us=last_us, end_us=end_us)
    sums.request(event, streamed=True)
    assert sums.silent == silent


def test_a_counter_that_went_back_began_at_0() -> None:
    """Preemptions 10, 14, then 3 after a restart: 4 + 3."""
    sums = ServerSums()
    for value in (10.0, 14.0, 3.0):
        sums.scrape({"preemptions": value, "waiting": value, "kv_usage": value / 15}, ("waiting",), ("preemptions",))
    assert sums.gained == {"preemptions": 7.0}
    assert (sums.scrapes, sums.queued, sums.full) == (3, 3, 1)
    assert (sums.of["waiting"].mean, sums.of["waiting"].high) == (9.0, 14.0)


def test_sums_join_as_if_folded_together() -> None:
    """Two halves of samples joined are the sums of the whole, field by field."""
    rng = random.Random(1)
    samples = [
        Gpu(t=0, utilization_percent=[rng.choice((10.0, 90.0))], power_watts=[rng.choice((None, 300.0, 400.0))],
            throttle_bits=[rng.choice((0, 4, 0x60))], thermal_margin_c=[rng.choice((None, 4.0, 9.0))])
        for _ in range(40)
    ]  # fmt: skip
    halves, whole = [GpuSums(), GpuSums()], GpuSums()
    for index, sample in enumerate(samples):
        for row in (halves[index // 20], whole):
            row.sample(sample, 0)
            row.interval(0.5, index % 3 == 0, [("power_cap", 0.25)])
    joined = GpuSums()
    for half in halves:
        joined.join(half)
    assert msgspec.to_builtins(joined) == msgspec.to_builtins(whole)
    assert whole.busy == sum(sample.utilization_percent[0] == 90.0 for sample in samples)


def test_a_cap_counts_as_foreign_by_the_power_of_its_moment() -> None:
    """Of a limit of 400 W: capped at 319 W is far below, at 320 W not; at 319 W without the bit neither; the sample's
    own limit goes before the inventory's."""
    for bits, power, limit, counted in (
        (4, 319.0, None, 1),
        (4, 320.0, None, 0),
        (0, 319.0, None, 0),
        (4, 319.0, 350.0, 0),
    ):
        sums = GpuSums()
        event = Gpu(
            t=0, utilization_percent=[90.0], throttle_bits=[bits], power_watts=[power], power_limit_watts=[limit]
        )
        sums.sample(event, 0, 400.0)
        assert sums.capped_low == counted


@pytest.mark.parametrize(
    ("info", "tokens"),
    [
        ({"kv_cache_size_tokens": "120000", "num_gpu_blocks": "1"}, 120_000),
        ({"num_gpu_blocks": "7500", "block_size": "16"}, 120_000),
        ({"block_size": "16"}, None), ({"num_gpu_blocks": "None", "block_size": "16"}, None), ({}, None),
    ],
)  # fmt: skip
def test_kv_capacity_from_the_servers_settings(info: dict[str, str], tokens: int | None) -> None:
    """In tokens where the server says so, blocks times their size otherwise, else not known."""
    assert kv_capacity(info) == tokens


def node(serves: bool, simulated: bool = False, gpu_serves: bool | None = None) -> list[Event]:
    """A run of 20 s on a GPU at its power wall, with a queue; samples at 2 Hz, scrapes at 1 Hz."""
    row: dict[str, Any] = {"index": 3, "sm_clock_max_mhz": 1980, "power_limit_watts": 400.0}
    if gpu_serves is not None:
        row["serves_target"] = gpu_serves
    out: list[Event] = [
        header(simulated=simulated),
        Source(t=0, src="gpu0", kind="gpu", state="joined", descriptor={"gpus": [row], "serves_target": serves}),
        Phase(t=1, name="measure", level=0, concurrency=8),
    ]
    for half in range(1, 40):
        t = half * S // 2
        out.append(
            Gpu(t=t, src="gpu0", seq=half, status=["ok"], utilization_percent=[97.0], power_watts=[399.0],
                throttle_bits=[4], sm_clock_mhz=[1500], pstate=[0])
        )  # fmt: skip
        if half % 2 == 0:
            concepts = {"running": 4.0, "waiting": 4.0, "kv_usage": 0.5}
            out.append(Server(t=t + 1, src="server0", seq=half // 2, url="http://h/metrics", concepts=concepts))
        out.append(LoadSample(t=t + 2, src="load0", seq=half, in_flight=8))
    return out


def fold(events: list[Event]) -> RunState:
    state = RunState()
    for event in events:
        state.apply(event)
    return state


@pytest.mark.parametrize(
    ("serves", "simulated", "gpu_serves", "told"),
    [
        (True, False, None, True), (False, False, None, False), (False, True, None, True), (True, False, False, False),
        (True, False, True, True),
    ],
)  # fmt: skip
def test_gpus_count_only_when_they_serve(serves: bool, simulated: bool, gpu_serves: bool | None, told: bool) -> None:
    """A GPU of somebody else's endpoint explains nothing; a simulated one, or one said to serve, does. One GPU of a
    serving source may be left out."""
    state = fold(node(serves, simulated, gpu_serves))
    assert ("power_wall" in [verdict.code for verdict in state.view().verdicts]) is told
    assert ("power_wall" in [verdict["code"] for verdict in summary(state)["verdicts"]]) is told


def test_screen_and_summary_say_the_same() -> None:
    """One steady level of 20 s: the same causes in the same order, with equal figures where both see all of it."""
    state = fold(node(serves=True))
    shown, told = state.view().verdicts, summary(state)["verdicts"]
    assert [verdict.code for verdict in shown] == [verdict["code"] for verdict in told] == ["queueing", "power_wall"]
    assert told[0]["evidence"] == {
        "waiting_requests": 4.0, "waiting_high_requests": 4.0, "running_requests": 4.0, "queued_share_ratio": 1.0,
        "kv_usage_ratio": 0.5, "samples_scrapes": 19,
    }  # fmt: skip
    assert told[1]["evidence"]["busy_samples"] == 39
    assert told[1]["evidence"]["sm_clock_mhz"] == 1500.0
    assert told[1]["next"] == shown[1].next_step


def test_a_new_level_starts_with_a_clean_slate() -> None:
    """The screen's causes are those of the current level: a queue of the level before is not told any more."""
    events = [
        *node(serves=True),
        Phase(t=20 * S, name="measure", level=1, concurrency=1),
        *(
            Server(t=20 * S + n * S, src="server0", seq=19 + n, url="http://h/metrics",
                   concepts={"running": 1.0, "waiting": 0.0, "kv_usage": 0.2})
            for n in range(1, 6)
        ),
    ]  # fmt: skip
    state = fold(events)
    assert state.view().verdicts == ()
    assert [verdict["code"] for verdict in summary(state)["verdicts"]] == ["queueing", "power_wall"]
    assert summary(state)["verdicts"][0]["text"].startswith("at 8 in flight: ")


def test_warm_up_and_idle_time_are_no_evidence() -> None:
    """The same queue before the measurement is not told."""
    events = [Phase(t=event.t, name="warmup", level=0) if isinstance(event, Phase) else event for event in node(True)]
    state = fold(events)
    assert state.view().verdicts == ()
    assert summary(state)["verdicts"] == []


def test_watch_needs_no_load() -> None:
    """Watching, the server's and the GPU's causes are told from the first sample on, without a phase."""
    events = [event for event in node(serves=True) if not isinstance(event, Phase | LoadSample)]
    head = events[0]
    assert isinstance(head, Header)
    state = fold([msgspec.structs.replace(head, kind="watch"), *events[1:]])
    assert [verdict.code for verdict in state.view().verdicts] == ["queueing", "power_wall"]
    assert "why" in report.text(summary(state))


def test_a_stall_is_seen_while_it_lasts() -> None:
    """A request with a token at 1 s and none since: told from 5 s of silence on, while the load process talks."""
    state = fold([
        header(), Phase(t=0, name="measure", level=0, concurrency=1),
        Request(t=0, src="load0", id=0, slot=0, due=0, sent=0),
    ])  # fmt: skip
    state.streams.by_id["load0", 0].last = S
    state.streams.by_id["load0", 0].chunks = 1
    told = []
    for tenth in range(10, 80, 10):
        state.apply(LoadSample(t=tenth * S // 10, src="load0", seq=tenth, in_flight=1))
        told.append([verdict.code for verdict in state.view().verdicts])
    assert told == [[]] * 5 + [["stalled"]] * 2


def test_restored_evidence_is_the_folded() -> None:
    """From a keyframe in the middle of a session, the screen's evidence goes on as if nothing had happened."""
    events = session(2, seconds=50)
    whole, restored = RunState(exact=False), None
    for event in events:
        whole.apply(event)
        if restored is None and event.t >= 30 * S:
            restored = RunState.restore([Keyframe(t=event.t, state=whole.snapshot())], header=events[0])
        elif restored is not None:
            restored.apply(event)
    assert restored is not None
    levels, quality = whole.view().levels, whole.view().quality.verdicts
    found = of_screen(whole, levels, quality)
    assert found.gpus
    assert found.servers
    assert found.requests.ended
    assert msgspec.to_builtins(of_screen(restored, levels, quality)) == msgspec.to_builtins(found)


# --- what began and ended -----------------------------------------------------------------------------------------


def scrapes(waiting: list[float], kv: list[float], preempted: list[float]) -> list[Event]:
    return [
        Server(t=n * S, src="server0", seq=n, url="http://h/metrics",
               concepts={"running": 1.0, "waiting": w, "kv_usage": k, "preemptions": p})
        for n, (w, k, p) in enumerate(zip(waiting, kv, preempted, strict=True))
    ]  # fmt: skip


def test_queueing_begins_with_two_scrapes_and_ends_after_five_seconds() -> None:
    """One scrape with somebody waiting is no event; 2 s to 5 s is one that began and, five seconds later, ended."""
    waiting = [1.0, 0, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0]
    state = fold([header(kind="watch"), *scrapes(waiting, [0.1] * 12, [0.0] * 12)])
    lines = [(line.t // S, line.level, line.text) for line in state.view().events]
    text = "requests wait in the server's queue"
    assert lines == [(2, "warn", text), (5, "info", f"{text}: ended after 3 s")]
    assert summary(state)["alerts"] == [
        {"code": "queueing", "from_s": 2.0, "to_s": 5.0, "server": "http://h/metrics"}
    ]  # fmt: skip


def test_full_kv_cache_and_preemptions_are_events() -> None:
    """KV above 90 % from 1 s and a counter that grows from 2 s on, both to the end."""
    state = fold([header(kind="watch"), *scrapes([0.0] * 5, [0.90, 0.91, 0.99, 1, 1], [7.0, 7, 8, 9, 11])])
    alerts = [(alert["code"], alert["from_s"], alert["to_s"]) for alert in summary(state)["alerts"]]
    assert alerts == [("kv_full", 1.0, None), ("preemptions", 2.0, None)]


# --- the report ---------------------------------------------------------------------------------------------------


def test_the_report_names_three_causes_with_their_next_steps() -> None:
    """Five causes found, the three weightiest told, each with a step; none is told again under quality."""
    state = fold([*node(serves=True), End(t=21 * S, reason="done")])
    found = summary(state)
    extra = [
        {"code": f"c{n}", "level": "warn", "text": f"cause {n}", "evidence": {"x_s": 1}, "next": f"step {n}"}
        for n in range(3)
    ]
    found["verdicts"] = [*found["verdicts"], *extra]
    text = report.text(found)
    why = text[text.index("\nwhy\n") : text.index("\nquality")]
    assert why.count("→") == 3
    assert "requests queue in the server: 4 wait" in why
    assert "power wall: GPU 3" in why
    assert "cause 0" in why
    assert "cause 1" not in text
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.count("requests queue in the server") == 1


def test_a_report_without_causes_has_no_why() -> None:
    """Nothing found: the block is not there."""
    state = fold([header(), Phase(t=0, name="measure", level=0), End(t=5 * S, reason="done")])
    assert "\nwhy\n" not in report.text(summary(state))
