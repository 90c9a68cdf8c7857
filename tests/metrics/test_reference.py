"""The fast fold against a slow one: every chunk expanded on its own, with nothing shared between the two."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from metrics_streams import session

from lpxtop.events.records import Arrivals, Event, Finished, Phase, Request
from lpxtop.metrics.state import RunState
from lpxtop.metrics.summary import summary

S = 1_000_000


def chunks(events: list[Event]) -> list[dict[str, Any]]:
    """Every measured chunk: when it came and the gap before it (µs), its tokens, whether it was the first."""
    sent: dict[tuple[str, int], tuple[int, bool]] = {}
    last: dict[tuple[str, int], int] = {}
    found: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, Request) and event.sent is not None:
            sent[event.src, event.slot] = event.sent, event.warmup
            last.pop((event.src, event.slot), None)
        elif isinstance(event, Finished):
            last.pop((event.src, event.slot), None)
        elif isinstance(event, Arrivals):
            tokens = dict(event.tokens)
            index = 0
            for slot, n in zip(event.slot, event.n, strict=True):
                key = event.src, slot
                begin, warmup = sent[key]
                for _ in range(n):
                    first = key not in last
                    came = (begin if first else last[key]) + 10 * event.gap[index]
                    last[key] = came
                    if not warmup:
                        found.append(
                            {"t": came, "gap": 10 * event.gap[index], "n": tokens.get(index, 1), "first": first}
                        )
                    index += 1
    return found


@pytest.mark.parametrize("seed", range(10))
def test_gaps_tokens_and_seconds(seed: int) -> None:
    """ICL, ITL, tokens per second and tokens per level agree with the slow fold, chunk by chunk."""
    events = session(seed, seconds=40, trouble=False)
    state = RunState()
    for event in events:
        state.apply(event)
    truth = chunks(events)
    icl = np.array([chunk["gap"] for chunk in truth if not chunk["first"]]) / 1000
    per_token = [chunk["gap"] / chunk["n"] for chunk in truth if not chunk["first"] for _ in range(chunk["n"])]
    itl = np.array(per_token) / 1000
    found = summary(state)["latency_ms"]
    for key, values in (("icl", icl), ("itl", itl)):
        assert found[key]["count"] == len(values)
        assert found[key]["mean"] == pytest.approx(values.mean())
        for name, q in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99), ("max", 100)):
            expected = float(np.percentile(values, q, method="inverted_cdf"))
            assert found[key][name] == pytest.approx(expected, abs=1e-6), (key, name)

    by_second = Counter[int]()
    for chunk in truth:
        by_second[chunk["t"] // S] += chunk["n"]
    assert {slot.second: slot.chunks + slot.extra for slot in state.ring if slot.chunks} == dict(by_second)
    firsts = Counter(chunk["t"] // S for chunk in truth if chunk["first"])
    assert {slot.second: sum(slot.ttft.values()) for slot in state.ring if slot.ttft} == dict(firsts)

    for level in state.timeline.levels.values():
        inside = [chunk for chunk in truth if _level_of(events, chunk["t"]) == level.index]
        assert state.exact is not None
        figures = state.exact.level(level.index)
        assert figures.chunks == len(inside)
        assert figures.chunks + figures.extra == sum(chunk["n"] for chunk in inside)
        assert sum(figures.gaps.values()) == sum(not chunk["first"] for chunk in inside)


def _level_of(events: list[Event], t: int) -> int | None:
    """The level measured at `t`, 2 s after its phase began, by reading the phases from the start."""
    current: Phase | None = None
    settled_from = 0
    for event in events:
        if not isinstance(event, Phase) or event.t > t:
            continue
        if event.name == "measure" and not (current and current.name == "measure" and current.level == event.level):
            settled_from = event.t + 2 * S
        current = event
    return current.level if current is not None and current.name == "measure" and t >= settled_from else None
