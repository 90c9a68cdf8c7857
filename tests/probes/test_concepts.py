"""The table of concepts: each server's text gives the values one reads off it by eye, and a user can add to it."""

import math
from pathlib import Path

import pytest

from lpxtop.errors import UsageError
from lpxtop.probes import canonical, concepts
from lpxtop.probes.exposition import Parser

FIXTURES = Path(__file__).parent / "fixtures"
TABLE = concepts.load()


def read(text: str, table: concepts.Table = TABLE) -> tuple[str | None, canonical.Reading]:
    """The kind of server a text is of, and what it says."""
    parser = Parser(concepts.Keep(table))
    values = parser.parse(text)
    kind = table.detect(parser.names)
    return kind, canonical.read(values, table.servers[kind], table) if kind else canonical.EMPTY


def fixture(name: str) -> tuple[str | None, canonical.Reading]:
    return read((FIXTURES / name).read_text())


def test_vllm():
    """A real text of vLLM 0.32: one engine, four finished requests of 39 prompt and 264 output tokens."""
    kind, reading = fixture("vllm-0.32-metrics.txt")
    assert kind == "vllm"
    assert reading.concepts == {
        "running": 0, "waiting": 0, "kv_usage": 0, "prefix_cache_queries": 39, "prefix_cache_hits": 0, "preemptions": 0,
        "prompt_tokens": 39, "output_tokens": 264, "requests_ok": 4, "requests_failed": 0,
    }  # fmt: skip
    assert reading.engines == {}
    assert {name: (h["count"], len(h["le"])) for name, h in reading.histograms.items()} == {
        "ttft": (4, 23), "itl": (260, 20), "tpot": (4, 20), "e2e": (4, 22), "queue": (4, 22),
    }  # fmt: skip
    assert reading.histograms["ttft"]["sum"] == pytest.approx(0.36776947975)
    assert reading.histograms["ttft"]["le"]["0.06"] == 1
    assert reading.histograms["ttft"]["le"]["+Inf"] == 4
    assert (reading.info["num_gpu_blocks"], reading.info["block_size"]) == ("2730", "128")


def test_vllm_of_old():
    """Old names: ITL was called time per output token, the prefix cache had gpu_ in front."""
    kind, reading = fixture("vllm-0.8-old-names.txt")
    assert kind == "vllm"
    assert reading.concepts == {
        "running": 1, "kv_usage": 0.2, "prefix_cache_queries": 100, "prefix_cache_hits": 40,
    }  # fmt: skip
    assert reading.histograms["itl"] == {"le": {"0.01": 50, "+Inf": 100}, "sum": 1.0, "count": 100}
    assert "tpot" not in reading.histograms


def test_old_and_new_names_together_are_not_added():
    """Some versions expose both: the new one counts."""
    _, reading = read("vllm:kv_cache_usage_perc 0.5\nvllm:gpu_cache_usage_perc 0.4\n")
    assert reading.concepts == {"kv_usage": 0.5}


def test_a_longer_name_is_another_metric():
    """waiting is not waiting_by_reason."""
    _, reading = read('vllm:num_requests_waiting_by_reason{reason="capacity"} 7\nvllm:num_requests_running 1\n')
    assert reading.concepts == {"running": 1}


def test_sglang():
    """Tensor-parallel ranks are copies, data-parallel ones are engines: 3 + 5 running, the fuller KV cache counts."""
    kind, reading = fixture("sglang-0.5.txt")
    assert kind == "sglang"
    assert reading.concepts == {
        "running": 8, "waiting": 2, "kv_usage": 0.75, "kv_usage_mean": 0.5, "prefix_hit_rate": 0.5,
        "output_tokens_per_s": 1000, "prefix_cache_queries": 9000, "prefix_cache_hits": 3000, "preemptions": 4,
        "prompt_tokens": 9000, "output_tokens": 4120, "requests_ok": 40, "requests_failed": 1,
    }  # fmt: skip
    assert (reading.engines["0"]["running"], reading.engines["1"]["running"]) == (3, 5)
    assert reading.histograms["ttft"] == {"le": {"0.1": 10, "0.4": 38, "+Inf": 40}, "sum": 8, "count": 40}
    assert reading.histograms["itl"]["count"] == 3960
    assert reading.info == {"num_pages": "4096", "page_size": "16"}


def test_tgi():
    """No KV figure: the batch's token budget stands in; counters without _total; errors summed over reasons."""
    kind, reading = fixture("tgi-3.3.txt")
    assert kind == "tgi"
    assert reading.concepts == {
        "running": 12, "waiting": 7, "kv_usage": 0.75, "prompt_tokens": 51200, "output_tokens": 12800,
        "requests_ok": 100, "requests_failed": 3,
    }  # fmt: skip
    assert reading.histograms["e2e"] == {"le": {"1": 20, "2": 90, "+Inf": 100}, "sum": 160.5, "count": 100}
    assert reading.histograms["queue"]["sum"] == 12.25
    assert reading.histograms["tpot"]["sum"] == 1.25


def test_tensorrt_llm():
    """trtllm-serve: finished reasons are summed."""
    kind, reading = fixture("trtllm-serve-1.0.txt")
    assert kind == "tensorrt-llm"
    assert reading.concepts == {
        "running": 6, "waiting": 1, "kv_usage": 0.5, "prefix_hit_rate": 0.125, "prompt_tokens": 700,
        "output_tokens": 300, "requests_ok": 11,
    }  # fmt: skip
    assert reading.histograms["ttft"]["sum"] == 2.75


def test_nim():
    """Names without a prefix."""
    kind, reading = fixture("nim-1.8.txt")
    assert kind == "nim"
    assert reading.concepts == {
        "running": 4, "waiting": 2, "running_max": 2048, "kv_usage": 0.375, "prompt_tokens": 1200,
        "output_tokens": 3400, "requests_ok": 17, "requests_failed": 1,
    }  # fmt: skip
    assert reading.histograms.keys() == {"ttft", "tpot"}


def test_triton():
    """Kinds of one metric by label; used over max where the fraction is missing; milliseconds become seconds."""
    kind, reading = fixture("triton-25.06.txt")
    assert kind == "triton"
    assert reading.concepts == {
        "running": 11, "waiting": 3, "kv_usage": 0.25, "requests_ok": 10, "requests_failed": 1,
    }  # fmt: skip
    assert reading.histograms["ttft"] == {"le": {"0.1": 1, "0.5": 4, "+Inf": 4}, "sum": 0.9, "count": 4}


def test_llamacpp():
    """A real text of llama.cpp b10434: no histograms, decode time and tokens instead, no KV figure any more."""
    kind, reading = fixture("llama.cpp-b10434-metrics.txt")
    assert kind == "llamacpp"
    assert "kv_usage" not in reading.concepts
    assert (reading.concepts["running"], reading.concepts["waiting"]) == (0, 0)
    assert (reading.concepts["prompt_tokens"], reading.concepts["output_tokens"]) == (25, 20)
    assert (reading.concepts["decode_seconds"], reading.concepts["prefill_seconds"]) == (0.366175, 0.092891)
    assert reading.histograms == {}


def test_lmdeploy():
    """Aborted requests are no successes; the API's queue is not the engine's."""
    kind, reading = fixture("lmdeploy-0.9.txt")
    assert kind == "lmdeploy"
    assert reading.concepts == {
        "running": 2, "waiting": 0, "kv_usage": 0.1, "prompt_tokens": 64, "output_tokens": 128, "requests_ok": 3,
    }  # fmt: skip
    assert reading.histograms["itl"]["count"] == 128


def test_dynamo():
    """Outcomes by status, prompt tokens from the histogram's sum."""
    kind, reading = fixture("dynamo-frontend-0.6.txt")
    assert kind == "dynamo"
    assert reading.concepts == {
        "running": 10, "waiting": 4, "prompt_tokens": 1000, "output_tokens": 2048, "requests_ok": 20,
        "requests_failed": 2,
    }  # fmt: skip


def test_relabelled_names():
    """KServe puts its name in front."""
    kind, reading = read("kserve_vllm:num_requests_running 4\n")
    assert (kind, reading.concepts) == ("vllm", {"running": 4})


def test_engines_of_vllm():
    """Data-parallel engines: queues and counters are summed, the KV cache is the fullest one's."""
    text = "".join(
        f'vllm:num_requests_running{{engine="{n}"}} {n + 1}\nvllm:kv_cache_usage_perc{{engine="{n}"}} 0.{n}\n'
        f'vllm:generation_tokens_total{{engine="{n}"}} {10**n}\n'
        f'vllm:time_to_first_token_seconds_bucket{{engine="{n}",le="1.0"}} {n}\n'
        f'vllm:time_to_first_token_seconds_bucket{{engine="{n}",le="+Inf"}} {2 * n}\n'
        f'vllm:time_to_first_token_seconds_sum{{engine="{n}"}} {n}.5\n'
        f'vllm:time_to_first_token_seconds_count{{engine="{n}"}} {2 * n}\n'
        for n in range(3)
    )
    _, reading = read(text)
    assert reading.concepts == {
        "running": 6, "kv_usage": 0.2, "kv_usage_mean": pytest.approx(0.1), "output_tokens": 111,
    }  # fmt: skip
    assert reading.engines["2"] == {"running": 3, "kv_usage": 0.2, "output_tokens": 100}
    assert reading.histograms["ttft"] == {"le": {"1.0": 3, "+Inf": 6}, "sum": 4.5, "count": 6}


def test_different_buckets_are_not_summed():
    """Two versions behind one text: the mean is still right, quantiles there are none."""
    name = "vllm:time_to_first_token_seconds"
    _, reading = read(
        "".join(
            f'{name}_bucket{{engine="{n}",le="{n}"}} 1\n{name}_bucket{{engine="{n}",le="+Inf"}} 1\n'
            f'{name}_sum{{engine="{n}"}} {n}\n{name}_count{{engine="{n}"}} 1\n'
            for n in (1, 2)
        )
    )
    assert reading.histograms["ttft"] == {"le": {}, "sum": 3.0, "count": 2.0}


def test_nan_is_absent():
    """A gauge that is not a number is not 0 and not in the sum."""
    _, reading = read('vllm:num_requests_running{engine="0"} NaN\nvllm:num_requests_waiting{engine="0"} 2\n')
    assert reading.concepts == {"waiting": 2}
    assert not any(math.isnan(value) for value in reading.concepts.values())


def test_another_server_and_names_by_the_user():
    """A user's table adds a server and a candidate in front of ours."""
    table = concepts.load(
        '[servers.mine]\nname = "Mine"\nprefix = "mine_"\n[servers.mine.concepts]\nrunning = ["mine_active"]\n'
        'kv_usage = [{ name = "mine_kv_percent", scale = 0.01 }]\n'
        '[servers.vllm.concepts]\nwaiting = ["vllm:my_queue"]\n'
    )
    assert read("mine_active 3\nmine_kv_percent 40\n", table)[1].concepts == {"running": 3, "kv_usage": 0.4}
    assert read("vllm:my_queue 9\nvllm:num_requests_waiting 1\n", table)[1].concepts == {"waiting": 9}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[servers.x\n", "line 1"),
        ('[servers.x]\nname = "X"\nprefix = "x"\n[servers.x.concepts]\nspeed = ["a"]\n', "no concept speed"),
        ('[servers.x]\nname = "X"\n', "needs a prefix"),
        ('[servers.x]\nname = "X"\nprefix = 3\n', "prefix"),
        ('[concepts]\nspeed = { kind = "dial" }\n', "kind dial"),
    ],
)
def test_mistakes_in_a_users_table(text, complaint):
    """The message names the file and what is wrong with it."""
    with pytest.raises(UsageError, match=complaint) as caught:
        concepts.load(text, "metrics.toml")
    assert str(caught.value).startswith("metrics.toml: ")
