"""Reports of a summary: what a person reads at 3 a.m., and what a program reads."""

import csv
import io
import json
from typing import Any

import msgspec
import pytest

from lpxtop import report
from lpxtop.events.records import (
    Arrivals,
    End,
    Event,
    Finished,
    Gpu,
    Header,
    LoadSample,
    Phase,
    Request,
    Server,
    Source,
)
from lpxtop.metrics.state import RunState
from lpxtop.metrics.summary import summary

S = 1_000_000
PLAN = {
    "load": {"mode": "closed", "concurrency": 8}, "sampling": {"max_tokens": 64, "stream": True},
    "prompts": {"tokens": 256}, "settle_s": 0.0,
}  # fmt: skip


def header(**changes: Any) -> Header:
    fields: dict[str, Any] = {
        "t": 0, "schema": (1, 0), "session": "s1", "wall_ns": 1_800_000_000_000_000_000, "mono_ns": 0,
        "lpxtop": "0.1.0", "target": {"url": "http://gpu7:8000/v1", "model": "llama-3.1-8b"}, "plan": PLAN,
        "negotiated": {"server_kind": "vllm", "server_version": "0.32"},
    }  # fmt: skip
    return Header(**(fields | changes))


def answers(count: int, level_at: int | None = None) -> list[Event]:
    """`count` requests a second apart: TTFT 100 ms, five tokens 20 ms apart."""
    out: list[Event] = [Phase(t=0, name="measure", level=0, concurrency=8)]
    for n in range(count):
        t = n * S
        if n == level_at:
            out.append(Phase(t=t, name="measure", level=1, concurrency=64))
        out += [
            Request(t=t, src="load0", id=n, slot=0, due=t, sent=t),
            Arrivals(t=t + 250_000, src="load0", slot=[0], n=[5], gap=[10_000, 2_000, 2_000, 2_000, 2_000]),
            Finished(
                t=t + 250_000, src="load0", id=n, slot=0, due=t, sent=t, outcome="ok", first_token_us=100_000,
                first_event_us=100_000, first_content_us=100_000, last_token_us=180_000, end_us=181_000, chunks=5,
                first_chunk_tokens=1, input_tokens=256, output_tokens=5, token_source="usage", max_tokens=64,
            ),
            LoadSample(t=t + 250_000, src="load0", in_flight=1, timestamp_source="kernel", events=5, reads=5),
        ]  # fmt: skip
    return out


def made(*events: Event, **head: Any) -> dict[str, Any]:
    state = RunState()
    for event in (header(**head), *events, End(t=1000 * S, reason="done")):
        state.apply(event)
    return summary(state)


def row(text: str, name: str) -> list[str]:
    """The cells of a table row of the text report."""
    line = next(line for line in text.splitlines() if line.startswith(name))
    return line[15:].split()


def test_the_table_shows_the_figures_in_milliseconds() -> None:
    """Sixty answers of 100 ms TTFT, 20 ms gaps, 180 ms in all."""
    text = report.text(made(*answers(60)))
    assert row(text, "TTFT")[:4] == ["60", "100", "100", "100"]
    assert row(text, "ITL")[0] == "240"
    assert row(text, "E2E latency")[1] == "180"


def test_too_few_samples_are_a_dash_with_a_reason() -> None:
    """Ten answers: no p95, no p99, and a line says how many they need."""
    text = report.text(made(*answers(10)))
    assert row(text, "TTFT")[4:6] == ["–", "–"]
    assert "p95 needs 59, p99 299" in text


def test_who_and_how() -> None:
    """The head names model, target, server and the conditions of the load."""
    head = report.text(made(*answers(3))).split("\n\n")[0]
    assert head.splitlines()[:2] == ["llama-3.1-8b  http://gpu7:8000/v1", "vllm 0.32"]
    assert "concurrency 8 · prompts 256 tok · max 64 tok · measured" in head


def test_simulated_is_said_first() -> None:
    """Nobody takes a demo for a measurement."""
    assert "SIMULATED" in report.text(made(*answers(3), simulated=True)).splitlines()[0]
    assert "Simulated" in report.markdown(made(*answers(3), simulated=True))


def failed_run() -> dict[str, Any]:
    requests = [Request(t=n, src="load0", id=n, slot=n, due=n) for n in range(5)]
    ends = [
        Finished(t=S, src="load0", id=n, slot=n, due=n, outcome="connect_error", error="\x1b]0;evil\x07refused")
        for n in range(5)
    ]
    return made(Phase(t=0, name="measure", level=0, concurrency=8), *requests, *ends)


def test_a_run_of_failures() -> None:
    """No invented latency: one sentence, the outcomes with their number, and no control characters."""
    text = report.text(failed_run())
    assert "no request was answered" in text
    assert "5 failed · errors 100.0%" in text
    assert "connect_error 5" in text
    assert "\x1b" not in text
    assert "0.000" not in text


def test_an_empty_run_reads_as_unknown() -> None:
    """Nothing was sent: dashes, not zeros, in every rate."""
    text = report.text(made())
    assert "throughput – · – · –" in text
    assert "– in · – out" in text


@pytest.mark.parametrize("count", [0, 1, 70])
def test_eighty_columns(count: int) -> None:
    """Every line fits the narrowest terminal, also with long names."""
    long = {"url": "https://inference.example.internal:8443/tenants/a-very-long-tenant/v1", "model": "org/" + "m" * 90}
    node = [
        Source(t=0, src="g", kind="gpu", state="joined", descriptor={"gpus": [{"index": 0, "name": "NVIDIA " * 9}]}),
        Gpu(t=S, src="g", status=["ok"], utilization_percent=[97], power_watts=[699.5], memory_used_bytes=[79 << 30],
            temperature_c=[81], throttle_bits=[4]),
        Gpu(t=2 * S, src="g", seq=1, status=["ok"], utilization_percent=[97], power_watts=[699.5], throttle_bits=[4]),
    ]  # fmt: skip
    text = report.text(made(*answers(count, level_at=count // 2), *node, target=long))
    assert max(map(len, text.splitlines())) <= 80


def test_gpus_and_verdicts_are_in_words() -> None:
    """A GPU's line has its power and heat, and what spoils the figures is a sentence."""
    node = [
        Source(t=0, src="g", kind="gpu", state="joined", descriptor={"gpus": [{"index": 2, "name": "H100"}]}),
        *(
            Gpu(t=n * S + S // 2, src="g", seq=n + 1, status=["ok"], utilization_percent=[90], power_watts=[500.0],
                temperature_c=[70], memory_used_bytes=[64 << 30], throttle_bits=[0x20])
            for n in range(3)
        ),
    ]  # fmt: skip
    events = answers(3)
    busy = LoadSample(t=2 * S, src="load0", seq=50, cpu_us=900_000, wall_us=1_000_000, timestamp_source="kernel")
    text = report.text(made(events[0], *node, *events[1:], busy))
    assert "GPU 2 H100: 90% busy · 64.0G · 500 W (max 500) · 70 °C · ~1.00 kJ" in text
    assert "throttled: thermal 2.0 s" in text
    assert "!! client-limited: the load process used 90% of a core" in text


def test_levels_have_a_line_each() -> None:
    """Two levels, two lines, with their load."""
    text = report.text(made(*answers(20, level_at=10)))
    lines = [line for line in text.splitlines() if "in flight" in line]
    assert [line.split(" in flight")[0] for line in lines] == ["8", "64"]
    assert "concurrency 8–64" in text


def test_slo_is_told_as_attainment_and_goodput() -> None:
    """Ten of ten within 200 ms."""
    text = report.text(made(*answers(10), Phase(t=10 * S, name="drain", level=0), slo=["ttft<200ms"]))
    assert "SLO        ttft<200ms" in text
    assert "met by 100.0% of requests due · goodput 1.00 req/s" in text


def test_unknown_tokens_per_chunk_are_labelled() -> None:
    """Where tokens per chunk are not known the row is called ICL and a line says why."""
    events = answers(3)
    ends = [
        msgspec.structs.replace(event, output_tokens=20) if isinstance(event, Finished) else event for event in events
    ]
    text = report.text(made(*ends))
    assert row(text, "ICL")[0] == "12"
    assert "there is no ITL" in text
    assert "tokens of finished requests" in text


def test_json_is_the_summary() -> None:
    """What a program reads equals what was computed; no NaN, and a final newline."""
    found = made(*answers(5))
    written = report.to_json(found)
    assert json.loads(written) == json.loads(json.dumps(found))
    assert written.endswith(b"}\n")
    assert b"NaN" not in written
    assert b"Infinity" not in written


def test_csv_has_a_line_per_level_with_full_numbers() -> None:
    """Unknown is an empty field; numbers are not rounded."""
    lines = list(csv.DictReader(io.StringIO(report.csv(made(*answers(20, level_at=10))))))
    assert [line["concurrency"] for line in lines] == ["8", "64"]
    assert float(lines[0]["ttft_p50_ms"]) == 100.0
    assert lines[0]["ttft_p99_ms"] == ""
    assert lines[0]["steady"] == ""
    assert float(lines[0]["output_tokens_per_s"]) == 5.0


def test_markdown_tables_are_well_formed() -> None:
    """Every row has as many cells as its head, whatever the model is called."""
    text = report.markdown(made(*answers(20, level_at=10), target={"url": "http://h", "model": "a|b"}))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) >= 8
    assert {line.count("|") for line in rows} == {9}
    assert text.startswith("### a|b at http://h")


def test_a_watch_reports_what_the_server_and_the_gpu_said():
    """Without requests of our own there are no empty latency tables, but queues, counters and a duration."""
    state = RunState(exact=True)
    state.apply(Header(t=0, schema=(1, 0), session="s", wall_ns=0, mono_ns=0, lpxtop="0", kind="watch",
                       target={"url": "http://gpu01:8000/v1"}))  # fmt: skip
    for t, running, tokens in ((1_000_000, 2.0, 1000.0), (61_000_000, 4.0, 7000.0)):
        state.apply(Server(t=t, src="server0", url="http://gpu01:8000/metrics",
                           concepts={"running": running, "kv_usage": 0.5, "output_tokens": tokens}))  # fmt: skip
    text = report.text(summary(state))

    assert text.splitlines() == [
        "watched http://gpu01:8000/v1, 61 s, no load sent",
        "",
        "server     running 3.00 (max 4.00) · KV 50% (max 50%) · output tokens +6 000",
    ]
