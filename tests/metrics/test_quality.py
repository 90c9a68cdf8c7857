"""Verdicts: each with its evidence, none without."""

import random

import pytest

from lpxtop.events.buckets import bucket
from lpxtop.metrics.quality import Answers, Client, Evidence, judge
from lpxtop.metrics.steady import Drift, Little, drift, little


def codes(client: Client | None = None, answers: Answers | None = None, **more: object) -> list[str]:
    evidence = Evidence(client=client or Client(), answers=answers or Answers(), **more)  # type: ignore[arg-type]
    return [verdict.code for verdict in judge(evidence)]


def test_without_evidence_no_verdict() -> None:
    """Nothing measured, nothing said."""
    assert codes() == []


def test_a_good_client_is_not_accused() -> None:
    """Kernel stamps, 40 % CPU, 0.5 ms lag, 0.2 % coalesced: no verdict."""
    client = Client(
        loop_lag={bucket(500): 1000}, send_lateness={bucket(300): 1000}, read_delay={bucket(50): 1000}, events=10_000,
        reads=9_980, coalesced=20, cpu_ratio=0.4, timestamp_source="kernel",
    )  # fmt: skip
    assert codes(client, icl_p50_ms=20.0) == []


@pytest.mark.parametrize(
    ("client", "code"),
    [
        (Client(cpu_ratio=0.81), "client_limited"),
        (Client(loop_lag={bucket(9_000): 100}), "client_limited"),
        (Client(send_lateness={bucket(50_000): 100}), "late_sends"),
        (Client(timestamp_source="user", events=100, reads=100), "user_space_stamps"),
        (Client(timestamp_source="kernel", events=100, reads=100, user_stamps=50), "user_space_stamps"),
        (Client(timestamp_source="kernel", events=1000, reads=900, coalesced=100), "coalesced"),
        (Client(dropped_events=1), "dropped_events"),
    ],
)
def test_faults_of_the_client(client: Client, code: str) -> None:
    """Each threshold passed gives its verdict, with evidence that holds the number."""
    found = judge(Evidence(client=client, answers=Answers()))
    assert [verdict.code for verdict in found] == [code]
    assert found[0].evidence
    assert found[0].text


def test_lag_is_judged_against_the_gaps() -> None:
    """9 ms of lag matter to 20 ms gaps (limit 5 ms), not to 100 ms gaps (limit 20 ms); nor do a handful of samples."""
    lag = Client(loop_lag={bucket(9_000): 100})
    assert codes(lag, icl_p50_ms=20.0) == ["client_limited"]
    assert codes(lag, icl_p50_ms=100.0) == []
    assert codes(Client(loop_lag={bucket(9_000): 5})) == []


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        (Answers(ok=10, buffered=3), "buffered"),
        (Answers(ok=0, not_streamed=2), "not_streaming"),
        (Answers(ok=5, usage_tokens=400, usage_chunks=100), "tokens_per_chunk"),
        (Answers(ok=5, token_sources={"chunks": 5}), "tokens_not_counted"),
        (Answers(ok=5, limited=5, over_limit=1), "limit_not_held"),
        (Answers(ok=50, limited=50, stopped_early=10, ignore_eos=True), "stopped_early"),
    ],
)
def test_faults_of_the_answers(answers: Answers, code: str) -> None:
    """Each thing that makes figures mean something else is said."""
    assert codes(None, answers) == [code]


def test_late_sends_matter_by_what_they_delay() -> None:
    """8 ms late: much for an open loop with 60 ms TTFT (limit 3 ms), nothing for a closed one with 1.2 s a request."""
    late = Client(send_lateness={bucket(8_000): 100})
    assert codes(late, open_loop=True, ttft_p50_ms=60.0, e2e_p50_ms=1200.0) == ["late_sends"]
    assert codes(late, open_loop=True, ttft_p50_ms=600.0) == []
    assert codes(late, ttft_p50_ms=60.0, e2e_p50_ms=1200.0) == []
    assert codes(late, e2e_p50_ms=60.0) == ["late_sends"]


def test_early_stops_are_normal_when_the_model_may_stop() -> None:
    """Without ignore_eos a varying length is what was asked for."""
    assert codes(None, Answers(limited=50, stopped_early=30, ignore_eos=False)) == []


def test_worst_first() -> None:
    """Errors come before warnings before notes."""
    client = Client(cpu_ratio=0.95, dropped_events=3)
    answers = Answers(ok=5, usage_tokens=400, usage_chunks=100)
    assert codes(client, answers) == ["client_limited", "dropped_events", "tokens_per_chunk"]


def test_little_and_drift_verdicts() -> None:
    """L = 10 against X·R = 8 is 20 % apart; a real drift names what moved."""
    law = Little(in_flight=10.0, per_s=4.0, residence_s=2.0)
    assert law.gap == pytest.approx(0.2)
    moved = Drift(what="ttft", change=0.5, t=8.0)
    assert codes(little=law, drifts=(moved,)) == ["not_steady", "littles_law"]
    assert (
        codes(little=Little(in_flight=8.1, per_s=4.0, residence_s=2.0), drifts=(Drift(what="x", change=0.05, t=9),))
        == []
    )


def test_drift_by_hand() -> None:
    """A straight line from 1 to 2 changes by two thirds of its mean, beyond any noise."""
    found = drift("ttft", [1 + n / 39 for n in range(40)])
    assert found is not None
    assert found.change == pytest.approx(1 / 1.5)
    assert found.real


def test_no_drift_in_what_is_constant_or_short() -> None:
    """A flat series has none; 19 values, or gaps down to 19, say nothing."""
    flat = drift("x", [5.0] * 30)
    assert flat is not None
    assert not flat.real
    assert drift("x", [float(n) for n in range(19)]) is None
    assert drift("x", [*map(float, range(19)), None, None]) is None


def test_noise_is_rarely_called_drift() -> None:
    """Of 300 steady but noisy series (20 % noise, also with memory) at most 3 % are called drifting."""
    rng = random.Random(7)
    for memory in (0.0, 0.6):
        false = 0
        for _ in range(300):
            noise, values = 0.0, []
            for _ in range(60):
                noise = memory * noise + rng.gauss(0, 0.2)
                values.append(1 + noise)
            found = drift("x", values)
            false += found is not None and found.real
        assert false <= 9


def test_little_needs_enough() -> None:
    """Under 100 requests, or a stretch under ten times a request's time, or unknown seconds: no judgement."""
    assert little([10.0] * 60, ended=300, residence_us=300 * 2_000_000) is not None
    assert little([10.0] * 60, ended=99, residence_us=99 * 2_000_000) is None
    assert little([10.0] * 15, ended=300, residence_us=300 * 2_000_000) is None
    assert little([10.0] * 59 + [None], ended=300, residence_us=300 * 2_000_000) is None
