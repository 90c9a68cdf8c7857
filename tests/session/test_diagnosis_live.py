"""Why it is slow, for real: the situation is built in the simulated server, and the tool names it."""

import asyncio
import json
import urllib.request

import pytest
from running import lpxtop, simulated, truth

from lpxtop import report
from lpxtop.config import Environment, parse_target
from lpxtop.launch import Launch, Outputs, prepare
from lpxtop.plan import Load, Plan, Prompts, Sampling, Secrets, Step, Stop

SECONDS = 3.0


def measured(url, directory, *, load, max_tokens=32, prompt_tokens=64, seconds=SECONDS, meanwhile=None):
    """A session with the simulated GPU, as the demo has it; (summary, codes of the last view, recording)."""
    path = directory / "run.lpx.jsonl"
    plan = Plan(
        target=parse_target(url), sampling=Sampling(max_tokens=max_tokens), prompts=Prompts(tokens=prompt_tokens),
        load=load, stop=Stop(duration_s=seconds, drain_s=0.0), settle_s=0.3,
    )  # fmt: skip
    launch = Launch(
        plan=plan, secrets=Secrets(), environment=Environment(), outputs=Outputs(record=path), headless=True,
        start=True, yes=True, kind="demo", simulated=True, gpu="sim",
    )  # fmt: skip
    session, _ = prepare(launch)

    async def run():
        await asyncio.gather(session.run(), *([meanwhile(session)] if meanwhile else []))

    asyncio.run(run())
    return session.summary, [verdict.code for verdict in session.view().verdicts], path


def first(summary):
    """The weightiest verdict."""
    assert summary["verdicts"], "nothing was found"
    return summary["verdicts"][0]


def trouble(url, **what):
    request = urllib.request.Request(f"{url}/sim/trouble", json.dumps(what).encode(), method="POST")
    urllib.request.urlopen(request).close()


def test_a_batch_limit_is_queueing(tmp_path):
    """16 users for 4 places: 12 wait, as the arithmetic says; live, in the summary, and in the report of the file."""
    with simulated("--engine", json.dumps({"max_sequences": 4})) as url:
        summary, live, path = measured(url, tmp_path, load=Load(concurrency=16))

    assert live == ["queueing"]
    verdict = first(summary)
    assert verdict["code"] == "queueing"
    assert verdict["evidence"]["waiting_high_requests"] == 12
    assert verdict["evidence"]["running_requests"] <= 4
    assert "max-num-seqs" in verdict["next"]
    assert [alert["code"] for alert in summary["alerts"]] == ["queueing"]
    again = lpxtop("report", path, "--format", "json", home=tmp_path)
    assert json.loads(again.stdout) == json.loads(report.to_json(summary))
    assert "\nwhy\n" in report.text(summary)


def test_a_small_kv_cache_is_full_and_preempts(tmp_path):
    """16 answers of 256 tokens in a cache of 2000 tokens: full, with no more preemptions than the server's log has."""
    with simulated("--engine", json.dumps({"kv_tokens": 2000})) as url:
        summary, live, _ = measured(url, tmp_path, load=Load(concurrency=16), max_tokens=256)
        preempted = sum(record["preemptions"] for record in truth(url))

    assert first(summary)["code"] == "kv_full"
    assert "kv_full" in live
    assert "queueing" not in [verdict["code"] for verdict in summary["verdicts"]]
    evidence = first(summary)["evidence"]
    assert evidence["kv_usage_high_ratio"] > 0.9
    assert preempted
    assert evidence["preempted_requests"] > 0


def test_a_low_power_limit_is_a_power_wall(tmp_path):
    """A limit of 250 W under a load that wants more: at the limit, with the clocks that the cube root leaves."""
    with simulated("--gpu", json.dumps({"limit_watts": 250})) as url:
        summary, live, _ = measured(url, tmp_path, load=Load(concurrency=16))

    assert first(summary)["code"] == "power_wall"
    assert live == ["power_wall"]
    evidence = first(summary)["evidence"]
    assert evidence["power_limit_watts"] == 250
    assert evidence["power_watts"] == pytest.approx(250, rel=0.03)
    assert evidence["sm_clock_mhz"] < 0.95 * 1980


def test_bad_cooling_is_a_thermal_wall(tmp_path):
    """0.4 °C per watt: above the slow-down temperature of 87 °C, and the clocks down."""
    with simulated("--gpu", json.dumps({"degrees_per_watt": 0.4, "thermal_seconds": 1.0})) as url:
        summary, live, _ = measured(url, tmp_path, load=Load(concurrency=16))

    assert first(summary)["code"] == "thermal_wall"
    assert "thermal_wall" in live
    assert first(summary)["evidence"]["temperature_c"] > 87
    assert first(summary)["evidence"]["thermal_share_ratio"] > 0.5


def test_every_third_refused_is_rate_limited(tmp_path):
    """One in three gets 429: told first, with exactly the number of the summary's own count."""
    with simulated("--trouble", json.dumps({"rate_limit_every": 3})) as url:
        summary, live, _ = measured(url, tmp_path, load=Load(concurrency=2), seconds=2.0)

    assert first(summary)["code"] == "rate_limited"
    assert live[0] == "rate_limited"
    evidence = first(summary)["evidence"]
    assert evidence["rate_limited_requests"] == summary["requests"]["by_outcome"]["rate_limited"]
    assert evidence["share_ratio"] == pytest.approx(1 / 3, abs=0.1)


def test_half_failing_is_errors_dominate(tmp_path):
    """Every second answer is a 500: an error, and no talk of room in the server."""
    with simulated() as url:

        async def soon(session):
            await asyncio.sleep(0.5)
            await asyncio.to_thread(trouble, url, server_error_every=2)

        summary, live, _ = measured(url, tmp_path, load=Load(concurrency=2), seconds=2.5, meanwhile=soon)

    assert (first(summary)["code"], first(summary)["level"]) == ("errors_dominate", "error")
    assert first(summary)["evidence"]["http_5xx_requests"] == summary["requests"]["by_outcome"]["http_5xx"]
    assert live[0] == "errors_dominate"
    assert "under_fed" not in [verdict["code"] for verdict in summary["verdicts"]]


def test_one_user_on_a_big_engine_is_under_fed(tmp_path):
    """One request in flight in a cache of 120 000 tokens: room, said as information and with nothing else."""
    with simulated() as url:
        summary, live, _ = measured(url, tmp_path, load=Load(concurrency=1), max_tokens=64)

    assert [verdict["code"] for verdict in summary["verdicts"] if "next" in verdict] == ["under_fed"]
    assert first(summary)["level"] == "info"
    assert first(summary)["evidence"]["in_flight_requests"] == pytest.approx(1, abs=0.1)
    assert live == ["under_fed"]


def test_a_buffering_proxy_is_named(tmp_path):
    """Everything comes at the end: told first, and nothing that would rest on TTFT."""
    with simulated("--trouble", json.dumps({"buffered": True})) as url:
        summary, live, _ = measured(url, tmp_path, load=Load(concurrency=4), seconds=2.0)

    assert first(summary)["code"] == "buffered"
    assert first(summary)["evidence"]["buffered"] == first(summary)["evidence"]["ok"] > 0
    assert live[0] == "buffered"
    assert not {"network", "prefill_bound"} & {verdict["code"] for verdict in summary["verdicts"]}


def test_four_times_the_load_for_nothing_is_over_the_knee(tmp_path):
    """4 places, 4 then 16 users: throughput stays, a request takes four times as long, and the queue says why."""
    with simulated("--engine", json.dumps({"max_sequences": 4})) as url:
        load = Load(concurrency=4, profile=(Step(duration_s=1.5, concurrency=4), Step(duration_s=2.2, concurrency=16)))
        summary, live, _ = measured(url, tmp_path, load=load, seconds=None, max_tokens=16)

    found = {verdict["code"]: verdict for verdict in summary["verdicts"]}
    assert {"over_knee", "queueing"} <= found.keys()
    assert found["over_knee"]["evidence"]["level_label"] == "16 in flight"
    evidence = found["over_knee"]["evidence"]
    assert (evidence["load_before"], evidence["load_now"]) == (4, 16)
    assert evidence["now_tokens_per_s"] == pytest.approx(evidence["before_tokens_per_s"], rel=0.1)
    assert evidence["now_e2e_p50_ms"] / evidence["before_e2e_p50_ms"] == pytest.approx(4, rel=0.3)
    assert "over_knee" in live


def test_shared_prompts_are_the_prefix_cache(tmp_path):
    """A prompt file of one long line, with the cache on: TTFT is flattered, and the tool says so."""
    prompts = tmp_path / "one.txt"
    prompts.write_text("tell me about the " + "very " * 200 + "old sea\n")
    out = tmp_path / "out.json"
    with simulated("--prefix-cache") as url:
        done = lpxtop(
            "run", url, "--headless", "--gpu", "off", "--json", out, "--no-record", "-c", "4", "-d", "2s",
            "--max-tokens", "16", "--prompts", prompts, home=tmp_path,
        )  # fmt: skip

    assert done.returncode == 0, done.stderr
    found = {verdict["code"]: verdict for verdict in json.loads(out.read_text())["verdicts"]}
    assert found["prefix_cache"]["evidence"]["prefix_hit_ratio"] > 0.8


def test_a_balanced_load_is_left_alone(tmp_path):
    """16 users on the default engine: nothing is wrong, and no cause is made up."""
    with simulated() as url:
        summary, live, _ = measured(url, tmp_path, load=Load(concurrency=16), seconds=2.5)

    assert [verdict["code"] for verdict in summary["verdicts"] if "next" in verdict] == []
    assert live == []
