"""Why is it slow: a table of rules over the evidence, each a cause with its numbers and the next step to try.

What explains most comes first; rules that contradict each other do not both speak (`yields_to`). No rule reads the
state: `evidence.py` gathers the facts, `causes_*.py` hold the rules. Must not measure.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from lpxtop import format
from lpxtop.metrics import causes_gpu, causes_levels, causes_requests, causes_server
from lpxtop.metrics.evidence import Evidence
from lpxtop.metrics.finding import Finding, Rule
from lpxtop.metrics.view import Verdict

_BROKEN = frozenset({"client_limited", "stalled", "errors_dominate"})
"""While these hold, what rests on latency or throughput alone says nothing about the server."""
_QUEUED = frozenset({"kv_full", "queueing"})

RULES: tuple[Rule, ...] = (
    Rule(code="client_limited", needs="load processes: CPU, loop lag", find=causes_requests.client_limited,
         of_level=False),
    Rule(code="stalled", needs="requests in flight: time since the last token of any", find=causes_requests.stalled),
    Rule(code="errors_dominate", needs="requests: outcomes", find=causes_requests.errors_dominate),
    Rule(code="rate_limited", needs="requests: outcomes", find=causes_requests.rate_limited),
    Rule(code="buffered", needs="requests: answers in one or two pieces", find=causes_requests.buffered,
         of_level=False),
    Rule(code="network", needs="requests: kernel round-trip time, TTFT", find=causes_requests.network,
         yields_to=_BROKEN | {"buffered"}),
    Rule(code="kv_full", needs="server: KV usage, waiting, preemptions", find=causes_server.kv_full),
    Rule(code="queueing", needs="server: waiting, running", find=causes_server.queueing,
         yields_to=frozenset({"kv_full"})),
    Rule(code="power_wall", needs="GPU: throttle reasons, power, limit", find=causes_gpu.power_wall),
    Rule(code="power_capped_elsewhere", needs="GPU: throttle reasons, power, limit",
         find=causes_gpu.power_capped_elsewhere),
    Rule(code="thermal_wall", needs="GPU: throttle reasons, or margin", find=causes_gpu.thermal_wall),
    Rule(code="power_brake", needs="GPU: throttle reasons", find=causes_gpu.power_brake),
    Rule(code="hw_slowdown", needs="GPU: throttle reasons", find=causes_gpu.hw_slowdown),
    Rule(code="slower_gpu", needs="GPUs of one host: SM clocks", find=causes_gpu.slower_gpu),
    Rule(code="clocks_locked", needs="GPU: utilisation, SM clock, its maximum, P-state", find=causes_gpu.clocks_locked),
    Rule(code="clocks_low", needs="GPU: utilisation, SM clock, its maximum", find=causes_gpu.clocks_low,
         yields_to=frozenset({"clocks_locked"})),
    Rule(code="host_bound", needs="GPU: utilisation; server: running", find=causes_server.host_bound,
         yields_to=_BROKEN),
    Rule(code="over_knee", needs="two load levels: throughput, e2e", find=causes_levels.over_knee,
         yields_to=_BROKEN | {"rate_limited"}),
    Rule(code="prefill_bound", needs="requests: prompt tokens and TTFT of 20 that differ",
         find=causes_requests.prefill_bound, yields_to=_BROKEN | _QUEUED | {"buffered"}),
    Rule(code="decode_bound", needs="GPU: both utilisations; two load levels: ITL", find=causes_levels.decode_bound,
         yields_to=_BROKEN | _QUEUED | {"over_knee", "buffered", "host_bound"}),
    Rule(code="prefix_cache", needs="requests: cached tokens; or server: prefix cache counters",
         find=causes_requests.prefix_cache),
    Rule(code="kv_room", needs="server: KV capacity; requests: longest", find=causes_server.kv_room, of_level=False),
    Rule(code="under_fed", needs="server: waiting, KV usage; GPU: utilisation; requests in flight",
         find=causes_server.under_fed, yields_to=_BROKEN | _QUEUED | {"over_knee", "rate_limited", "host_bound"}),
    Rule(code="persistence_off", needs="GPU: persistence mode", find=causes_gpu.persistence_off, of_level=False),
)  # fmt: skip
"""Every rule. Among findings of equal weight the earlier one comes first."""
_OF_LEVEL = frozenset(rule.code for rule in RULES if rule.of_level)


def findings(evidence: Evidence) -> tuple[Finding, ...]:
    """What the rules find, weightiest first, without those that yield to another."""
    found = {rule.code: finding for rule in RULES if (finding := rule.find(evidence)) is not None}
    kept = [found[rule.code] for rule in RULES if rule.code in found and not rule.yields_to & found.keys()]
    return _by_weight(kept)


def diagnose(evidence: Evidence) -> tuple[Verdict, ...]:
    """The findings as verdicts."""
    return tuple(finding.verdict() for finding in findings(evidence))


def diagnose_levels(levels: Mapping[str, Evidence]) -> tuple[Verdict, ...]:
    """The findings of several load levels, by what to call each: of each cause the weightiest, named with its level
    where there is more than one."""
    found: dict[str, Finding] = {}
    for name, evidence in levels.items():
        for finding in findings(evidence):
            named = _named(finding, name) if len(levels) > 1 else finding
            if finding.code not in found or named.weight > found[finding.code].weight:
                found[finding.code] = named
    return tuple(finding.verdict() for finding in _by_weight(list(found.values())))


def _named(finding: Finding, name: str) -> Finding:
    if finding.code not in _OF_LEVEL:
        return finding
    evidence: dict[str, Any] = finding.evidence | {"level_label": name}
    return msgspec.structs.replace(finding, text=f"at {format.clean(name)}: {finding.text}", evidence=evidence)


def _by_weight(found: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(found, key=lambda finding: -finding.weight))
