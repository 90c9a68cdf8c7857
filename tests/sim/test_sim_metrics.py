"""The simulated server's /metrics: vLLM's names, labels and edges, and numbers that agree with the log and a client."""

import asyncio
import re
from collections import defaultdict
from pathlib import Path

import pytest
from sim_process import get, server, stream, truth

from lpxtop.probes.exposition import Parser

FIXTURE = Path(__file__).resolve().parents[1] / "probes" / "fixtures" / "vllm-0.32-metrics.txt"
SPECULATIVE = {"spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"}


def parsed(text: str):
    """(values by name and labels, labels by name, edges by histogram, kinds by family)."""
    parser = Parser(lambda name: True)
    values, labels, edges = {}, defaultdict(set), defaultdict(list)
    for series, value in parser.parse(text).items():
        values[series.name, tuple(sorted(series.labels.items()))] = value
        labels[series.name] |= set(series.labels)
        if "le" in series.labels:
            edges[series.name].append(series.labels["le"])
    assert parser.damaged == 0
    return values, labels, edges, dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))


def total(values, name, **labels) -> float:
    """The one value of a series; `labels` beside engine and model_name."""
    wanted = set({"engine": "0", "model_name": "sim-8b", **labels}.items())
    (found,) = [value for (series, have), value in values.items() if series == name and set(have) == wanted]
    return found


@pytest.fixture(scope="module")
def scraped():
    """The text after some requests: (text, log, streams)."""
    with server() as url:

        async def load():
            return await asyncio.gather(*(stream(url, max_tokens=n) for n in (1, 4, 9, 25)))

        streams = asyncio.run(load())
        yield get(f"{url}/metrics").decode(), truth(url), streams


def test_names_labels_kinds_and_edges_are_those_of_a_real_vllm(scraped):
    """Every family is one of vLLM 0.32's, of the same kind, with the same labels and its bucket edges."""
    _, labels, edges, kinds = parsed(scraped[0])
    _, real_labels, real_edges, real_kinds = parsed(FIXTURE.read_text())

    assert kinds.items() <= real_kinds.items()
    for name, have in labels.items():
        if name != "vllm:cache_config_info":
            assert have == real_labels[name], name
    for name, have in edges.items():
        # vLLM's token edges end at the context's length, 2,048 there and 32,768 here
        real = real_edges[name][:-1]
        assert have[: len(real)] == real, name
        assert have[-1] == "+Inf"


def test_counters_agree_with_the_log_and_with_what_the_clients_counted(scraped):
    """Tokens, requests and observations: three independent counts, one number."""
    text, log, streams = scraped
    values, *_ = parsed(text)

    tokens = sum(len(one.tokens) for one in streams)
    assert tokens == 39
    assert sum(one.usage["completion_tokens"] for one in streams) == tokens
    assert sum(record["tokens"] for record in log) == tokens
    assert total(values, "vllm:generation_tokens_total") == tokens
    assert total(values, "vllm:request_generation_tokens_sum") == tokens
    assert total(values, "vllm:inter_token_latency_seconds_count") == tokens - 4
    prompts = sum(one.usage["prompt_tokens"] for one in streams)
    assert total(values, "vllm:prompt_tokens_total") == sum(record["prompt_tokens"] for record in log) == prompts
    assert total(values, "vllm:prompt_tokens_by_source_total", source="local_compute") == prompts
    # a step computes prompts or gives tokens: all of them, once
    assert total(values, "vllm:iteration_tokens_total_sum") == prompts + tokens
    assert total(values, "vllm:request_success_total", finished_reason="length") == 4
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time",
                 "request_decode_time", "request_inference_time"):  # fmt: skip
        assert total(values, f"vllm:{name}_seconds_count") == 4
    assert total(values, "vllm:num_requests_running") == 0


def test_latencies_agree_with_the_log_and_their_parts_with_each_other(scraped):
    """TTFT is first write − received; e2e is queue + prefill + decode."""
    text, log, _ = scraped
    values, *_ = parsed(text)

    def seconds(name):
        return total(values, f"vllm:{name}_seconds_sum")

    ttft = sum(record["first_write_ns"] - record["received_ns"] for record in log) / 1e9
    e2e = sum(record["last_write_ns"] - record["received_ns"] for record in log) / 1e9
    assert seconds("time_to_first_token") == pytest.approx(ttft, abs=0.005)
    assert seconds("e2e_request_latency") == pytest.approx(e2e, abs=0.005)
    parts = seconds("request_queue_time") + seconds("request_prefill_time") + seconds("request_decode_time")
    assert parts == pytest.approx(seconds("e2e_request_latency"), abs=1e-6)
    assert seconds("request_inference_time") == pytest.approx(parts - seconds("request_queue_time"), abs=1e-6)


def test_buckets_hold_what_is_at_most_their_edge(scraped):
    """Answers of 1, 4, 9 and 25 tokens, cumulative: an edge counts its own value."""
    values, *_ = parsed(scraped[0])

    edges = {"1.0": 1, "2.0": 1, "5.0": 2, "10.0": 3, "20.0": 3, "50.0": 4, "+Inf": 4}
    found = {le: total(values, "vllm:request_generation_tokens_bucket", le=le) for le in edges}
    assert found == edges


def test_it_says_that_it_is_simulated_and_when_it_began(scraped):
    """A comment in the first line; the start time tells restarts apart."""
    text = scraped[0]

    assert text.startswith("# simulated by lpxtop-sim ")
    assert parsed(text)[0]["process_start_time_seconds", ()] > 1.7e9


async def test_running_waiting_and_the_cache_are_those_of_the_engine():
    """Two places, five users: two run, three wait for capacity, and the cache holds the running prompts."""
    engine = '{"max_sequences": 2, "step_base_s": 0.05, "kv_tokens": 16000, "jitter": 0}'
    with server("--engine", engine) as url:
        prompt = [{"role": "user", "content": "x" * 4000}]
        users = [asyncio.create_task(stream(url, max_tokens=500, messages=prompt)) for _ in range(5)]
        await asyncio.sleep(0.6)
        values, *_ = parsed((await asyncio.to_thread(get, f"{url}/metrics")).decode())
        for user in users:
            user.cancel()
        await asyncio.gather(*users, return_exceptions=True)

    assert total(values, "vllm:num_requests_running") == 2
    assert total(values, "vllm:num_requests_waiting") == 3
    assert total(values, "vllm:num_requests_waiting_by_reason", reason="capacity") == 3
    # two prompts of 1,007 tokens and a few tokens each, in blocks of 16, of 1,000 blocks
    assert 0.126 <= total(values, "vllm:kv_cache_usage_perc") <= 0.132


async def test_the_prefix_cache_shows_in_metrics_usage_and_log():
    """The same prompt again: its whole blocks come from the cache, in all three places."""
    with server("--prefix-cache") as url:
        prompt = [{"role": "user", "content": "y" * 640}]
        first = await stream(url, messages=prompt)
        second = await stream(url, messages=prompt)
        values, *_ = parsed(get(f"{url}/metrics").decode())
        log = truth(url)

    assert "prompt_tokens_details" not in first.usage
    assert second.usage["prompt_tokens_details"] == {"cached_tokens": 160}
    assert [record["cached_tokens"] for record in log] == [0, 160]
    assert total(values, "vllm:prefix_cache_queries_total") == 2 * 167
    assert total(values, "vllm:prefix_cache_hits_total") == 160
    assert total(values, "vllm:prompt_tokens_cached_total") == 160
    assert total(values, "vllm:prompt_tokens_by_source_total", source="local_compute") == 2 * 167 - 160


async def test_preemptions_show_when_the_cache_is_too_small():
    """Three requests that outgrow the cache together: everybody is served, and the counters tell the price."""
    engine = '{"kv_tokens": 960, "step_base_s": 0.002, "jitter": 0}'
    with server("--engine", engine) as url:
        prompt = [{"role": "user", "content": "z" * 800}]
        got = await asyncio.gather(*(stream(url, max_tokens=200, messages=prompt) for _ in range(3)))
        values, *_ = parsed(get(f"{url}/metrics").decode())
        log = truth(url)

    assert [len(one.tokens) for one in got] == [200] * 3
    preemptions = sum(record["preemptions"] for record in log)
    assert preemptions >= 1
    assert total(values, "vllm:num_preemptions_total") == preemptions
    assert total(values, "vllm:request_num_preemptions_sum") == preemptions
    assert total(values, "vllm:generation_tokens_total") == 600


async def test_speculative_counters_appear_with_speculation():
    """Two drafts a step, never accepted: as many drafts as decode steps, no accepted token."""
    with server("--tokens-per-step", "3", "--acceptance", "0") as url:
        await stream(url, max_tokens=10)
        values, labels, *_ = parsed(get(f"{url}/metrics").decode())

    assert {f"vllm:{name}_total" for name in SPECULATIVE} <= set(labels)
    assert total(values, "vllm:spec_decode_num_drafts_total") == 9
    assert total(values, "vllm:spec_decode_num_draft_tokens_total") == 18
    assert total(values, "vllm:spec_decode_num_accepted_tokens_total") == 0
