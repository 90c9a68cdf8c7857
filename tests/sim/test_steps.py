"""The running server against its own arithmetic: steps, bunching, and a power cap that slows it, over real sockets."""

import asyncio
import json
import sys
from itertools import pairwise
from statistics import mean, median

import httpx
import pytest
from sim_process import get, server, stream, truth

from lpxtop.sim.engine import capacity
from lpxtop.sim.presets import PRESETS, EngineConfig

STEADY = {"step_base_s": 0.02, "step_per_sequence_s": 0, "step_per_kv_token_s": 0, "jitter": 0, "max_sequences": 64,
          "max_batched_tokens": 1_000_000, "prefill_tokens_per_s": 1e9, "kv_tokens": 1_000_000}  # fmt: skip


async def test_64_streams_get_their_tokens_in_the_same_steps():
    """Each step is one bunch that holds every running stream exactly once, 20 ms after the one before."""
    with server("--stamp", "--engine", json.dumps(STEADY)) as url:
        streams = await asyncio.gather(*(stream(url, max_tokens=30) for _ in range(64)))
        log = truth(url)

    assert all(one.done and len(one.tokens) == 30 for one in streams)
    writes = sorted((at, record["id"]) for record in log for at in record["writes"])
    bunches = [[writes[0]]]
    for before, this in pairwise(writes):
        if this[0] - before[0] > 8e6:
            bunches.append([])
        bunches[-1].append(this)
    assert all(len({who for _, who in bunch}) == len(bunch) for bunch in bunches)
    assert sum(len(bunch) for bunch in bunches) == 64 * 30
    # late starters join a few steps later, nobody's tokens come apart from the others'
    assert len(bunches) <= 30 + 8
    assert sum(len(bunch) == 64 for bunch in bunches) >= 20
    starts = [bunch[0][0] for bunch in bunches]
    assert median(b - a for a, b in pairwise(starts)) == pytest.approx(20e6, abs=1e6)


async def test_what_a_client_sees_is_what_was_stamped():
    """Every chunk carries its write time, the same as in the log, and arrives after it; n-th to n-th."""
    with server("--stamp", "--engine", json.dumps(STEADY)) as url:
        got = await stream(url, max_tokens=20)
        (record,) = truth(url)

    stamps = [event["lpx_write_ns"] for _, event in got.tokens]
    assert stamps == record["writes"]
    assert stamps[0] == record["first_write_ns"]
    assert stamps[-1] == record["last_write_ns"]
    assert all(0 < at - stamp < 1e9 for (at, _), stamp in zip(got.tokens, stamps, strict=True))
    assert record["received_ns"] < stamps[0]


async def test_steps_do_not_drift():
    """200 steps of 5 ms take a second: late wake-ups do not add up."""
    with server("--stamp", "--engine", json.dumps(STEADY | {"step_base_s": 0.005})) as url:
        await stream(url, max_tokens=201)
        (record,) = truth(url)

    took = record["writes"][-1] - record["writes"][0]
    assert took == pytest.approx(1e9, rel=0.03)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere steps end in whole milliseconds")
async def test_a_fast_engine_has_its_own_rhythm_not_the_loops():
    """Steps of 2.5 ms are 2.5 ms each, not now 2 and then 3."""
    with server("--stamp", "--engine", json.dumps(STEADY | {"step_base_s": 0.0025})) as url:
        await stream(url, max_tokens=300)
        (record,) = truth(url)

    off = [abs(b - a - 2.5e6) for a, b in pairwise(record["writes"])]
    assert median(off) < 0.25e6


async def test_itl_is_the_formulas():
    """Eight users of the default engine without jitter: the mean gap of their streams within 10 % of `capacity`."""
    engine = {"jitter": 0, "max_sequences": 8}
    with server("--stamp", "--engine", json.dumps(engine)) as url:
        await asyncio.gather(*(stream(url, max_tokens=100) for _ in range(8)))
        log = truth(url)

    gaps = [b - a for record in log for a, b in pairwise(record["writes"])]
    formula = capacity(EngineConfig(jitter=0, max_sequences=8), 8, 10, 100)
    assert mean(gaps) / 1e9 == pytest.approx(formula.itl_s, rel=0.10)


async def test_a_power_cap_drops_the_clocks_and_slows_decoding():
    """At a limit below what the work draws: power at the limit, clocks and speed down by its cube root."""
    with server("--stamp", "--engine", '{"jitter": 0}', "--gpu", '{"limit_watts": 120}') as url:
        load = asyncio.create_task(stream(url, max_tokens=300))
        samples = []
        while not load.done():
            await asyncio.sleep(0.1)
            samples.append(json.loads(await asyncio.to_thread(get, f"{url}/sim/gpu"))["columns"])
        (record,) = truth(url)

    # the load ends while the last sample is on its way, and the first ones see the utilisation rise
    settled = samples[len(samples) // 2 : -2]
    assert {column["power_watts"][0] for column in settled} == {120.0}
    assert all(column["throttle_bits"][0] & 0x4 for column in settled)
    assert settled[-1]["throttle_ns"]["power_cap"][0] > 1e9
    # idle 75 W + 300 W of decoding + 220 W × 1/48 of a batch are 380 W wanted
    factor = (120 / 380) ** (1 / 3)
    full_mhz = PRESETS["h100-8b"].gpu.sm_clock_max_mhz
    assert median(column["sm_clock_mhz"][0] for column in settled) == pytest.approx(full_mhz * factor, rel=0.03)
    gap = median(b - a for a, b in pairwise(record["writes"][150:])) / 1e9
    assert gap == pytest.approx(capacity(EngineConfig(), 1, 10, 300, clock_factor=factor).itl_s, rel=0.05)


async def test_the_gpu_is_busy_with_the_engine_and_rests_after_it():
    """Under load it is near 100 % busy and holds the KV cache beside the weights; then it goes back to idle."""
    with server("--engine", '{"step_base_s": 0.01}') as url:
        before = json.loads(get(f"{url}/sim/gpu"))["columns"]
        load = asyncio.create_task(stream(url, max_tokens=400, messages=[{"role": "user", "content": "x" * 8000}]))
        during = before
        while during["utilization_percent"][0] < 95 and not load.done():  # it rises with half a second's inertia
            await asyncio.sleep(0.1)
            during = json.loads(await asyncio.to_thread(get, f"{url}/sim/gpu"))["columns"]
        load.cancel()
        async with httpx.AsyncClient() as client:
            for _ in range(60):
                after = (await client.get(f"{url}/sim/gpu")).json()["columns"]
                if after["utilization_percent"] == [0]:
                    break
                await asyncio.sleep(0.1)

    assert (before["utilization_percent"], before["pstate"], before["sm_clock_mhz"]) == ([0], [8], [345])
    assert during["utilization_percent"][0] >= 95
    # 2,000 prompt tokens and some of the answer, 131,072 bytes each
    assert during["memory_used_bytes"][0] - before["memory_used_bytes"][0] >= 2000 * 131_072
    assert during["energy_j"][0] > before["energy_j"][0]
    assert after["utilization_percent"] == [0]
    assert after["memory_used_bytes"] == before["memory_used_bytes"]
