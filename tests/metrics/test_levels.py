"""Load levels: which of them a gap, a first token and a request belong to, worked out by hand."""

from typing import Any

import pytest
from metrics_streams import header

from lpxtop.events.records import Arrivals, End, Event, Finished, LoadSample, Phase, Request
from lpxtop.metrics.state import RunState
from lpxtop.metrics.summary import summary

S = 1_000_000


def phase(t: float, name: str = "measure", level: int = 0, n: int = 1) -> Phase:
    return Phase(t=round(t * S), name=name, level=level, concurrency=n)


def whole(id: int, sent_s: float, last_s: float, outcome: str = "ok") -> list[Event]:
    """A request with its tokens at `sent` + 0.1 s, + 0.2 s and `last_s`, told in one frame at its end."""
    sent, last = round(sent_s * S), round(last_s * S)
    wait = (last - sent) // 10
    return [
        Request(t=sent, src="load0", id=id, slot=id, due=sent, sent=sent),
        Arrivals(t=last, src="load0", slot=[id], n=[3], gap=[10_000, 10_000, wait - 20_000]),
        Finished(
            t=last, src="load0", id=id, slot=id, due=sent, sent=sent, outcome=outcome, first_token_us=100_000,
            first_event_us=100_000, last_token_us=last - sent, end_us=last - sent, chunks=3, first_chunk_tokens=1,
            output_tokens=3, token_source="continuous_usage",
        ),
    ]  # fmt: skip


def fold(*parts: Event | list[Event], settle_s: float = 2.0) -> RunState:
    state = RunState()
    state.apply(header(plan={"settle_s": settle_s, "load": {"mode": "closed", "concurrency": 1}}))
    for part in parts:
        for event in part if isinstance(part, list) else [part]:
            state.apply(event)
    return state


def counts(state: RunState, level: int) -> dict[str, Any]:
    view = next(found for found in state.view().levels if found.index == level)
    exact = next(found for found in summary(state)["levels"] if found["index"] == level)
    for key in ("ttft", "icl", "tpot", "e2e"):
        assert getattr(view, key).count == exact["latency_ms"][key]["count"], key
    return {
        "ttft": view.ttft.count, "icl": view.icl.count, "tpot": view.tpot.count, "e2e": view.e2e.count,
        "excluded": view.excluded, "requests": view.requests,
    }  # fmt: skip


def test_what_lies_inside_counts_in_full() -> None:
    """Sent at 3 s, ended at 4 s in a level measured from 2 s on."""
    state = fold(phase(0), whole(1, 3, 4), phase(10, level=1))
    assert counts(state, 0) == {"ttft": 1, "icl": 2, "tpot": 1, "e2e": 1, "excluded": 0, "requests": 1}


def test_settling_is_left_out() -> None:
    """Sent at 1 s and ended at 1.5 s, before the level settles at 2 s: in no figure, and counted as left out."""
    state = fold(phase(0), whole(1, 1, 1.5), phase(10, level=1))
    assert counts(state, 0) == {"ttft": 0, "icl": 0, "tpot": 0, "e2e": 0, "excluded": 1, "requests": 0}


def test_a_request_across_the_change_splits_by_definition() -> None:
    """Sent at 9.85 s; tokens at 9.95, 10.05 and 13 s; change at 10 s, settled at 12 s.

    TTFT belongs to level 0 (sent there). The gap that ended at 10.05 s fell into the settling, the last one into
    level 1. TPOT and E2E belong to neither, and both levels say that one was left out.
    """
    state = fold(phase(0), phase(10, level=1, n=2), whole(1, 9.85, 13), phase(20, level=2))
    assert counts(state, 0) == {"ttft": 1, "icl": 0, "tpot": 0, "e2e": 0, "excluded": 1, "requests": 0}
    assert counts(state, 1) == {"ttft": 0, "icl": 1, "tpot": 0, "e2e": 0, "excluded": 1, "requests": 1}


def test_levels_together_with_the_rest_are_the_whole() -> None:
    """The run's figures take every measured request, also those that no level takes."""
    state = fold(
        phase(0), whole(1, 1, 1.5), phase(10, level=1), whole(2, 9.85, 13), whole(3, 14, 15), phase(20, "drain", 1)
    )
    found = summary(state)["latency_ms"]
    assert (found["ttft"]["count"], found["icl"]["count"], found["e2e"]["count"]) == (3, 6, 3)


def test_throughput_of_a_level_is_by_arrival() -> None:
    """Level 0 measured from 2 to 10 s: the three tokens inside it, in 8 s; the request that ended counts too."""
    state = fold(phase(0), whole(1, 3, 4), phase(10, level=1), LoadSample(t=11 * S, src="load0"))
    level = state.view().levels[0]
    assert level.output_tokens_per_s == pytest.approx(3 / 8)
    assert level.requests_per_s == pytest.approx(1 / 8)
    assert (level.from_us, level.to_us) == (2 * S, 10 * S)
    exact = summary(state)["levels"][0]
    assert exact["measured_s"] == 8.0
    assert exact["throughput"]["output_tokens_per_s"] == pytest.approx(3 / 8)


def test_a_running_level_is_measured_up_to_the_last_frame() -> None:
    """Settled at 2 s, last frame at 6 s: 4 s, whatever else happened since."""
    state = fold(phase(0), whole(1, 3, 4), LoadSample(t=6 * S, src="load0"))
    assert state.view().level is not None
    assert state.view().levels[0].output_tokens_per_s == pytest.approx(3 / 4)


def test_a_level_shorter_than_its_settle_time_has_no_figures() -> None:
    """One second at a level that needs two: not settled, no rate, no percentile."""
    state = fold(phase(0), whole(1, 0.2, 0.9), phase(1, level=1), LoadSample(t=2 * S, src="load0"))
    level = state.view().levels[0]
    assert not level.settled
    assert level.output_tokens_per_s is None
    assert level.ttft.count == 0
    assert level.excluded == 1


def test_a_pause_is_not_measured() -> None:
    """Measured 2 to 4 s and, after a pause and settling again, 12 to 14 s: 4 s in all; the level stays the same."""
    state = fold(
        phase(0), whole(1, 3, 3.5), phase(4, "paused"), phase(10), whole(2, 12.5, 13), phase(14, "drain"),
        End(t=15 * S, reason="done"),
    )  # fmt: skip
    assert summary(state)["levels"][0]["measured_s"] == 4.0
    assert len(state.view().levels) == 1
    assert summary(state)["run"]["duration_s"] == 5.0  # from the first due request, at 3 s


def test_every_load_process_may_tell_the_same_phase() -> None:
    """The second "measure" of the same level is no news: it does not settle again."""
    state = fold(phase(0), phase(1), whole(1, 2.5, 3), phase(10, level=1))
    assert counts(state, 0)["ttft"] == 1


def test_failed_requests_of_a_level() -> None:
    """They count among its requests and failures, not in its latencies."""
    state = fold(phase(0), whole(1, 3, 4, "stall"), whole(2, 3, 4), phase(10, level=1))
    level = state.view().levels[0]
    assert (level.requests, level.failed, level.e2e.count) == (2, 1, 1)


def test_a_run_of_so_many_requests_is_measured_to_its_last_token() -> None:
    """Two requests asked for; the load ends with the second's sending at 3 s, its last token comes at 6 s.

    The first was due at 0.5 s: 5.5 s.
    """
    state = RunState()
    state.apply(header(plan={"settle_s": 0.0, "stop": {"requests": 2}, "load": {}}))
    for event in [phase(0), *whole(1, 0.5, 2), *whole(2, 3, 6)[:1], phase(3, "drain"), *whole(2, 3, 6)[1:]]:
        state.apply(event)
    state.apply(End(t=8 * S, reason="done"))
    found = summary(state)
    assert found["run"]["duration_s"] == 5.5
    assert found["throughput"]["output_tokens_per_s"] == pytest.approx(6 / 5.5)
    assert found["throughput"]["requests_per_s"] == pytest.approx(2 / 5.5)


def test_a_run_of_so_long_leaves_the_drain_out_of_its_rates() -> None:
    """First due at 3 s, load ends at 5 s; tokens that come later are in the latencies, not in the throughput."""
    state = fold(
        phase(0), whole(1, 3, 4), phase(5, "drain"), whole(2, 4.5, 9), End(t=9 * S, reason="done"), settle_s=0.0
    )
    found = summary(state)
    assert found["run"]["duration_s"] == 2.0
    assert found["throughput"]["output_tokens_per_s"] == pytest.approx((3 + 2) / 2)
    assert found["latency_ms"]["ttft"]["count"] == 2


def test_waiting_for_the_first_request_is_not_measured() -> None:
    """Phase at 0 s, first request due at 1 s, load ends at 5 s: 4 s."""
    state = fold(phase(0), whole(1, 1, 2), phase(5, "drain"), End(t=6 * S, reason="done"), settle_s=0.0)
    found = summary(state)
    assert found["run"]["duration_s"] == 4.0
    assert found["throughput"]["output_tokens_per_s"] == pytest.approx(3 / 4)


def test_drift_makes_a_level_unsteady() -> None:
    """TTFT that doubles over 40 s is not steady; one that stays is; 10 s say nothing."""

    def level(growth: float, seconds: int) -> bool | None:
        events: list[Event] = []
        for n in range(seconds):
            sent, first = n * S, round(100_000 * (1 + growth * n / 40) / 10) * 10
            events += [
                Request(t=sent, src="load0", id=n, slot=n, due=sent, sent=sent),
                Arrivals(t=sent + 500_000, src="load0", slot=[n], n=[2], gap=[first // 10, 2_000 + n % 3]),
                LoadSample(t=sent + 999_000, src="load0", in_flight=1),
            ]
        return fold(phase(0), events, settle_s=0.0).view().levels[0].steady

    assert level(0.0, 40) is True
    assert level(1.0, 40) is False
    assert level(1.0, 10) is None
