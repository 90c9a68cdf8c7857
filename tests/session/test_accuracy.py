"""The promise itself: stamps against the simulated server's own write times, through the whole tool."""

import json
import time
from itertools import pairwise

import pytest
from running import OnScreen, lpxtop, simulated, truth, wait_for
from stamps_against_truth import quantile, stamp_errors

ENGINE = {"step_base_s": 0.02, "step_per_sequence_s": 0, "step_per_kv_token_s": 0, "jitter": 0, "max_sequences": 64,
          "max_batched_tokens": 1_000_000, "prefill_tokens_per_s": 1e9, "kv_tokens": 10_000_000}  # fmt: skip


def measured(tmp_path, *flags, sim=()):
    """A run against a stamping server: (summary, recording, the server's log of measured requests)."""
    record, out = tmp_path / "r.jsonl", tmp_path / "o.json"
    with simulated("--stamp", "--engine", json.dumps(ENGINE), *sim) as url:
        done = lpxtop("run", url, "--headless", "--gpu", "off", "--metrics", "off", "--record", record, "--json", out,
                      *flags, home=tmp_path)  # fmt: skip
        assert done.returncode == 0, done.stderr
        log = [r for r in truth(url) if (r["request_id"] or "").startswith("lpx-")]
    return json.loads(out.read_text()), record, log


def test_64_streams_of_50_tokens_per_second_are_stamped_to_the_tenth_of_a_millisecond(tmp_path):
    """Error of the stamps against the write times, last-of-read tokens: p99 ≤ 0.2 ms, and never before the write."""
    summary, record, log = measured(tmp_path, "-c", "64", "-n", "64", "--max-tokens", "100")
    if summary["quality"]["timestamp_source"] != "kernel":
        pytest.skip("this kernel does not stamp received packets")

    alone, earlier = stamp_errors(record, log)

    assert len(alone) + len(earlier) == 6400
    assert len(earlier) < 64
    assert quantile(alone, 0.99) <= 200_000
    assert min(alone) >= -10_000  # a tick


def test_the_screen_does_not_disturb_the_stamps(tmp_path):
    """The same with the live screen running beside, at 120×40 and 4 Hz: p99 ≤ 0.2 ms over last-of-read tokens."""
    record = tmp_path / "r.jsonl"
    with simulated("--stamp", "--engine", json.dumps(ENGINE)) as url:
        screen = OnScreen("run", url, "--start", "-c", "64", "-d", "5s", "--max-tokens", "100", "--gpu", "off",
                          "--record", record, home=tmp_path)  # fmt: skip
        try:
            wait_for(lambda: record.exists() and b'"k":"end"' in record.read_bytes()[-20_000:])
            time.sleep(1.0)  # a frame or two, until the screen knows that the run has ended
            screen.keys("q")
            assert screen.process.wait(10) == 0
        finally:
            screen.close()
        log = [r for r in truth(url) if (r["request_id"] or "").startswith("lpx-")]
    if b'"timestamp_source":"kernel"' not in record.read_bytes():
        pytest.skip("this kernel does not stamp received packets")

    alone, earlier = stamp_errors(record, log)

    assert screen.bytes > 50_000
    assert len(alone) > 10_000
    assert len(earlier) < 0.01 * len(alone)
    assert quantile(alone, 0.99) <= 200_000


def test_latencies_are_those_of_the_servers_write_times(tmp_path):
    """TTFT, ITL, TPOT and e2e from the client's `sent` to the server's writes: means within 0.2 ms, counts exact."""
    summary, record, log = measured(tmp_path, "-c", "8", "-n", "24", "--max-tokens", "30")

    events = [json.loads(line) for line in record.read_bytes().splitlines()]
    origin = events[0]["mono_ns"]
    finished = [event for event in events if event["k"] == "finished"]
    writes = {r["request_id"]: r["writes"] for r in log if r["writes"]}
    ttft, e2e, gaps, tpot = [], [], [], []
    for event in finished:
        sent, mine = origin + event["sent"] * 1000, writes[event["request_id"]]
        ttft.append((mine[0] - sent) / 1e6)
        e2e.append((mine[-1] - sent) / 1e6)
        gaps += [(b - a) / 1e6 for a, b in pairwise(mine)]
        tpot.append((mine[-1] - mine[0]) / 1e6 / (len(mine) - 1))

    latency = summary["latency_ms"]
    for key, true in (("ttft", ttft), ("itl", gaps), ("tpot", tpot), ("e2e", e2e)):
        assert latency[key]["count"] == len(true), key
        assert abs(latency[key]["mean"] - sum(true) / len(true)) < 0.2, key
    assert summary["tokens"]["output"] == 24 * 30


def test_speculative_chunks_are_counted_by_tokens(tmp_path):
    """Four tokens per chunk: ITL is a quarter of ICL, throughput counts tokens, and the headline says so."""
    summary, _, log = measured(
        tmp_path, "-c", "4", "-n", "8", "--max-tokens", "61", sim=("--tokens-per-step", "4", "--acceptance", "1")
    )

    latency = summary["latency_ms"]
    assert summary["tokens"]["output"] == sum(r["tokens"] for r in log if r["writes"] and r["tokens"] == 61)
    assert latency["icl"]["count"] == 8 * 15
    assert latency["itl"]["count"] == 8 * 60
    assert abs(latency["icl"]["mean"] / latency["itl"]["mean"] - 4) < 0.05
    assert summary["tokens"]["per_chunk"] > 3


def test_an_open_loop_into_a_slow_server_shows_the_queue(tmp_path):
    """5 requests/s into a server that does about 3: ttft_due grows beyond ttft's own wait, nothing is dropped."""
    slow = json.dumps(ENGINE | {"max_sequences": 1, "step_base_s": 0.02})
    with simulated("--engine", slow) as url:
        done = lpxtop("run", url, "--headless", "--gpu", "off", "--rate", "5", "--arrival", "constant", "-n", "20",
                      "--max-tokens", "16", "--no-record", "--json", "-", home=tmp_path)  # fmt: skip
    summary = json.loads(done.stdout)

    assert summary["requests"]["ok"] == 20
    # request i is due at i / 5 s and served after the i before it, 16 steps of 20 ms each: it waits i · 0.12 s
    expected = sum(i * 0.12 for i in range(20)) / 20 * 1000
    due = summary["latency_ms"]["ttft_due"]["mean"]
    assert expected * 0.8 < due < expected * 1.3 + 100
