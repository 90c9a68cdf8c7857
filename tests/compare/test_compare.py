"""Comparisons of whole sessions: what is found, what is not, and what is refused."""

import random
from math import log
from statistics import fmean, stdev

import pytest
from compare_sessions import events, header, requests, sampled, session

from lpxtop.metrics import comparability
from lpxtop.metrics.compare import compare
from lpxtop.metrics.samples import Sampler

SINGLE = {"users": 3, "ttft_ms": 250.0, "gap_ms": 100.0, "tokens": 4, "tau_s": 0.7}
"""A load whose noise remembers for less than a second: 200 s of it are more than 20 blocks."""
SHORT = {"users": 4, "gap_ms": 60.0, "tokens": 4, "tau_s": 0.7, "spread": 0.05, "jitter": 0.1}
"""15 s of it leave as much noise in a median as some minutes of `SINGLE` do."""


def rows(found, level=0):
    return {(row.key, row.figure): row for row in found.levels[level].rows}


def called(found):
    """Figures with a verdict of difference."""
    return [row for level in found.levels for row in level.rows if row.verdict in ("better", "worse")]


@pytest.fixture(scope="module")
def alike():
    """Runs of the same server under the same load: only noise differs."""
    return [session(seed, 200, f"run{seed}", **SINGLE) for seed in range(15)]


def test_a_against_a_calls_a_difference_in_at_most_a_tenth_of_100_pairs(alike):
    """One run a side, long enough for verdicts: of 100 pairs of equal runs at most 10 show any difference at all, and
    most figures are found to be the same."""
    pairs = [(a, b) for a in range(15) for b in range(a)]
    wrong = same = total = 0
    for a, b in random.Random(0).sample(pairs, 100):
        found = compare([alike[a]], [alike[b]], seed=a)
        words = [row.verdict for row in found.levels[0].rows]
        wrong += bool(called(found))
        same += words.count("same")
        total += len(words)
    assert wrong <= 10
    assert same / total > 0.5


def test_a_fifth_more_ttft_is_found_with_one_run_a_side(alike):
    """+20 % TTFT is called worse in p50 for each of 5 pairs, ITL is not called, and the caveat is there."""
    for seed in range(5):
        slow = session(900 + seed, 200, **(SINGLE | {"ttft_ms": 300.0}))
        found = compare([alike[seed]], [slow])
        assert rows(found)["ttft", "p50"].verdict == "worse"
        assert 0.1 < rows(found)["ttft", "p50"].difference < 0.3
        assert not [row for row in called(found) if row.key in ("itl", "error_rate")]
        assert found.method == "bootstrap"
        assert "run-to-run noise not included" in found.caveats[0]


def side(rng, first, ttft_ms, runs=5, noise=0.02):
    """Runs whose server differs a little from run to run, as real ones do."""
    return [
        session(first + run, 15, f"run{run}", ttft_ms=ttft_ms * rng.gauss(1, noise), **SHORT) for run in range(runs)
    ]


def test_a_tenth_more_ttft_is_found_with_five_runs_a_side():
    """+10 % TTFT, p50 TTFT spreading by 2 to 3.5 % from run to run: worse in at least 27 of 30 trials."""
    rng = random.Random(4)
    found, spreads = 0, []
    for trial in range(30):
        a, b = side(rng, 1000 * trial, 120.0), side(rng, 1000 * trial + 500, 132.0)
        result = compare(a, b)
        assert result.method == "runs"
        spreads.append(stdev(log(run.levels["concurrency", 8.0].figures["ttft", "p50"]) for run in a))
        found += rows(result)["ttft", "p50"].verdict == "worse"
    assert found >= 27
    assert 0.02 < fmean(spreads) < 0.035


def test_five_equal_runs_a_side_call_no_difference():
    """30 trials without a difference but with the same noise from run to run: at most 3 call one."""
    rng = random.Random(5)
    pool = side(rng, 50_000, 120.0, runs=40)
    wrong = 0
    for _ in range(30):
        chosen = rng.sample(pool, 10)
        wrong += bool(called(compare(chosen[:5], chosen[5:])))
    assert wrong <= 3


def test_figures_are_those_of_the_summary():
    """A comparison shows what `report` shows: the same level figures to the last digit."""
    run = session(7, 30, **SHORT, told={"watts": 400.0})
    level = run.summary["levels"][0]
    sample = run.levels["concurrency", 8.0]
    for key in ("ttft", "itl", "tpot", "e2e"):
        for name in ("p50", "p95", "p99"):
            assert sample.figures[key, name] == level["latency_ms"][key][name]
    assert sample.figures["output_tokens_per_s", None] == level["throughput"]["output_tokens_per_s"]
    assert sample.figures["goodput", None] == level["goodput_requests_per_s"]
    assert sample.counts["ttft"] == level["latency_ms"]["ttft"]["count"]


def test_samples_hold_what_arrived_in_the_level():
    """The samples by second have the tokens, requests and joules of the level's whole seconds."""
    made = requests(3, seconds=20, **SHORT)
    run = sampled(events(made, seconds=20, watts=300.0))
    (stretch,) = run.levels["concurrency", 8.0].stretches
    first, last = 3, 18  # settled at 2 s; the seconds at the edges are cut
    arrived = [one["sent"] + tick * 10 for one in made for tick in one["ticks"]]
    assert stretch.cells == last - first + 1
    assert stretch.sums["tokens"] == [sum(at // 1_000_000 == s for at in arrived) for s in range(first, last + 1)]
    assert sum(stretch.sums["energy"]) == pytest.approx(300.0 * stretch.cells, rel=0.04)
    sent = [one for one in made if one["sent"] >= 2_000_000 and one["sent"] + one["ticks"][0] * 10 < 20_000_000]
    assert len(stretch.requests["ttft"][1]) == pytest.approx(len(sent), abs=4)


def test_a_short_run_is_told_to_be_too_short():
    """15 s hold 2 blocks: no verdict, and the reason."""
    found = compare([session(1, 15, **SHORT)], [session(2, 15, **SHORT)])
    assert not called(found)
    assert rows(found)["ttft", "p50"].why.startswith("too short")


def test_two_or_three_runs_a_side_widen_the_band_and_say_so(alike):
    """Runs of one side that lie 12 % apart make a difference of 8 % undecided, not worse."""
    faster = session(70, 200, **(SINGLE | {"ttft_ms": 220.0}))
    slower = [session(71 + n, 200, **(SINGLE | {"ttft_ms": 258.0})) for n in range(2)]
    found = compare([alike[0], faster], slower)
    row = rows(found)["ttft", "p50"]
    assert row.band > 0.08
    assert row.verdict == "undecided"
    assert "2 and 2 runs" in found.caveats[0]


def test_failures_take_the_verdict_from_latencies(alike):
    """With 10 % errors on one side only survivors were timed: errors are worse, latencies undecided."""
    found = compare([alike[0]], [session(60, 200, **SINGLE, failing=0.1)])
    assert found.levels[0].rows[0].key == "error_rate"
    assert found.levels[0].rows[0].verdict == "worse"
    assert rows(found)["ttft", "p50"].verdict == "undecided"
    assert "survivors" in rows(found)["ttft", "p50"].why


def made_with(**changes):
    told = {key: changes.pop(key) for key in ("concurrency", "watts", "limit", "driver") if key in changes}
    return sampled(events(requests(5, seconds=8, **SHORT), seconds=8, head=header(**changes), **told))


def changed(part, **values):
    return header().plan | {part: header().plan[part] | values}


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("model", {"target": {"url": "http://h:8000/v1", "api": "chat", "model": "n"}}),
        ("API", {"target": {"url": "http://h:8000/v1", "api": "completions", "model": "m"}}),
        ("load mode", {"plan": changed("load", mode="poisson", rate=3.0)}),
        ("max tokens", {"plan": changed("sampling", max_tokens=64)}),
        ("streaming", {"plan": changed("sampling", stream=False)}),
        ("simulated", {"simulated": True}),
        ("ignore EOS", {"negotiated": {"ignore_eos": False}}),
        ("prompts", {"prompts": {"source": "file", "tokens": 64, "sha256": "b" * 64}}),
    ],
)
def test_another_experiment_is_not_comparable(what, changes):
    """What makes the numbers another experiment blocks, by name."""
    found = compare([made_with()], [made_with(**changes)])
    assert not found.comparable
    assert what in [row.what for row in found.differences if row.effect == "blocks"]
    assert not called(found)


@pytest.mark.parametrize(
    ("what", "changes", "a", "b"),
    [
        ("power cap", {"limit": 600.0}, "700 W", "600 W"),
        ("driver", {"driver": "560.2"}, "550.1", "560.2"),
        (
            "server",
            {"negotiated": {"ignore_eos": True, "server_kind": "SGLang"}},
            "vLLM 1",
            "SGLang",
        ),
        ("change", {"tags": {"change": "fp8"}}, "not known", "fp8"),
    ],
)
def test_what_may_be_under_test_is_noted(what, changes, a, b):
    """A power cap, a driver, a server's version or a tag is told, and the comparison goes on."""
    found = compare([made_with(watts=300.0)], [made_with(**({"watts": 300.0} | changes))])
    assert found.comparable
    assert [(row.a, row.b, row.effect) for row in found.differences if row.what == what] == [(a, b, "noted")]


def test_other_objectives_withhold_goodput_alone():
    """Goodput under another SLO is another quantity; latencies are not concerned."""
    found = compare([made_with()], [made_with(slo=["ttft<100ms"])])
    assert found.comparable
    assert rows(found)["goodput", None].why == "SLO differs"
    assert rows(found)["ttft", "p50"].why != "SLO differs"


def test_what_is_meant_to_differ_does_not_block():
    """Two models on purpose."""
    other = made_with(target={"url": "http://h:8000/v1", "api": "chat", "model": "n"})
    assert compare([made_with()], [other], meant=("model",)).comparable


def test_levels_are_aligned_by_load_and_the_rest_is_named():
    """Without a common level there is nothing to compare; each side's levels are told."""
    found = compare([made_with()], [made_with(concurrency=16)])
    assert not found.comparable
    assert found.only == ((("concurrency", 8.0),), (("concurrency", 16.0),))


def test_a_watch_has_nothing_to_compare():
    """A recording without requests of its own is named as such."""
    found = compare([made_with()], [sampled([header(kind="watch")], "night.jsonl")])
    assert "night.jsonl only watched: it has no requests of its own" in found.reasons


def test_output_lengths_that_differ_block():
    """Kolmogorov-Smirnov by hand: 1 1 2 2 against 2 2 3 3 is 0.5; sessions of 4 and 6 tokens are told apart."""
    assert comparability.ks_distance([1, 1, 2, 2], [2, 2, 3, 3]) == 0.5
    longer = sampled(events(requests(5, seconds=8, **(SHORT | {"tokens": 6})), seconds=8))
    found = compare([made_with()], [longer])
    assert [row.what for row in found.differences if row.effect == "blocks"] == ["output length"]


def test_an_empty_session_is_no_crash():
    """A header alone has no level: not comparable, and no figure."""
    sampler = Sampler()
    sampler.apply(header())
    found = compare([sampler.sample("empty")], [made_with()])
    assert not found.comparable
    assert found.levels == ()
