"""GPU samples and server scrapes in the fold, by hand."""

from typing import Any

import pytest
from metrics_streams import header

from lpxtop.events.records import End, Event, Gpu, Phase, Server, Source
from lpxtop.metrics.state import RunState
from lpxtop.metrics.summary import summary

S = 1_000_000
INVENTORY = [{"index": 3, "uuid": "GPU-a", "name": "H100", "sm_clock_max_mhz": 1980, "memory_total_bytes": 80}]


def fold(*events: Event, **head: Any) -> RunState:
    state = RunState()
    for event in (header(**head), *events):
        state.apply(event)
    return state


def joined(src: str = "gpu0", **fields: Any) -> Source:
    return Source(t=0, src=src, kind="gpu", state="joined", descriptor={"gpus": INVENTORY}, **fields)


def gpu(t_s: float, src: str = "gpu0", **columns: Any) -> Gpu:
    return Gpu(t=round(t_s * S), src=src, seq=round(t_s * 10) + 1, status=["ok"], **columns)


def test_a_gpu_is_its_inventory_and_its_last_sample() -> None:
    """Names and maxima from the inventory, values from the sample; what nobody read is None, never 0."""
    state = fold(joined(host="n1"), gpu(1, utilization_percent=[50], power_watts=[None], memory_used_bytes=[20]))
    view = state.view().gpus[0]
    assert (view.index, view.name, view.host, view.sm_clock_max_mhz) == (3, "H100", "n1", 1980)
    assert (view.utilization_percent, view.power_watts, view.temperature_c) == (50, None, None)
    assert (view.memory_used_bytes, view.memory_total_bytes) == (20, 80)
    assert view.utilization_history == (50.0,)
    assert not view.simulated


def test_known_but_silent_gpu() -> None:
    """Before its first sample a GPU is listed as stale with nothing known; simulated when the source says so."""
    event = Source(t=0, src="g", kind="gpu", state="joined", descriptor={"gpus": INVENTORY, "simulated": True})
    view = fold(event).view().gpus[0]
    assert (view.status, view.utilization_percent, view.simulated) == ("stale", None, True)


def test_no_gpu_says_why() -> None:
    """The probe's sentence is what the panel shows."""
    state = fold(Source(t=0, src="gpu0", kind="gpu", state="unavailable", text="no NVIDIA driver on this host"))
    assert state.view().gpus == ()
    assert state.view().gpu_note == "no NVIDIA driver on this host"


def test_several_sources_stand_side_by_side() -> None:
    """Power adds up over hosts, utilisation is their mean."""
    state = fold(
        joined(), joined("gpu1"), gpu(1, utilization_percent=[40], power_watts=[300.0]),
        gpu(1, "gpu1", utilization_percent=[60], power_watts=[200.0]),
    )  # fmt: skip
    series = state.view().series
    assert series.gpu_power_watts[-1] == 500.0
    assert series.gpu_utilization_percent[-1] == 50.0
    assert [view.source for view in state.view().gpus] == ["gpu0", "gpu1"]


def test_throttling_begins_after_two_samples_and_ends_after_five_seconds() -> None:
    """A flash of hw slowdown is no event; a power cap from 2 s to 6 s is one that began and one that ended."""
    bits = [0, 0x8, 0x4, 0x4, 0x4 | 0x1, 0, 0x4, 0, 0, 0, 0, 0, 0x1 | 0x2 | 0x100]
    state = fold(joined(), *(gpu(n, throttle_bits=[bit]) for n, bit in enumerate(bits)))
    lines = [(line.t // S, line.level, line.text) for line in state.view().events if "GPU" in line.text]
    assert lines == [(2, "warn", "GPU 3: power cap began"), (6, "info", "GPU 3: power cap ended after 4 s")]
    assert summary(state)["alerts"] == [{"code": "throttled_power_cap", "from_s": 2.0, "to_s": 6.0, "gpu": "GPU 3"}]


def test_throttling_is_shown_in_words() -> None:
    """NVML's mask of an idle card at its cap: only the cap is throttling."""
    assert fold(joined(), gpu(1, throttle_bits=[0x1 | 0x4 | 0x40])).view().gpus[0].throttle == (
        "power cap",
        "hw thermal",
    )


def test_energy_from_the_counter() -> None:
    """Measured from 1 s on: 1000 J to 1900 J is 900 J, and mean and maximum are of the samples inside."""
    state = fold(
        Phase(t=0, name="ready", level=0), joined(), gpu(0, power_watts=[999.0], energy_j=[500.0]),
        Phase(t=S, name="measure", level=0),
        gpu(1, power_watts=[300.0], energy_j=[1000.0]), gpu(2, power_watts=[400.0], energy_j=[1350.0]),
        gpu(3, power_watts=[500.0], energy_j=[1900.0]), End(t=3_500_000, reason="done"),
    )  # fmt: skip
    found = summary(state)["gpu"][0]
    assert found["power_watts"] == {"mean": 400.0, "max": 500.0}
    assert found["temperature_c"] is None
    assert (found["energy_j"], found["energy_source"]) == (900.0, "counter")


def test_energy_by_integration_is_marked() -> None:
    """Without a counter: trapezoids of 300 to 400 W and 400 to 500 W over a second each, 800 J."""
    state = fold(
        joined(), Phase(t=0, name="measure", level=0), gpu(1, power_watts=[300.0]), gpu(2, power_watts=[400.0]),
        gpu(3, power_watts=[500.0]),
    )  # fmt: skip
    found = summary(state)["gpu"][0]
    assert (found["energy_j"], found["energy_source"]) == (800.0, "integrated")


def test_a_gap_between_samples_is_not_filled() -> None:
    """A minute without samples adds no energy and no throttled time."""
    state = fold(
        joined(), Phase(t=0, name="measure", level=0), gpu(1, power_watts=[300.0], throttle_bits=[4]),
        gpu(61, power_watts=[300.0], throttle_bits=[4]),
    )  # fmt: skip
    found = summary(state)["gpu"][0]
    assert (found["energy_j"], found["throttled"]) == (None, {})


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (({"throttle_bits": [0x4]}, {"throttle_bits": [0x4]}, {"throttle_bits": [0]}), {"power_cap": 1.0}),
        (
            ({"throttle_ns": {"thermal": [5_000]}}, {"throttle_ns": {"thermal": [200_005_000]}},
             {"throttle_ns": {"thermal": [500_005_000]}}),
            {"thermal": 0.5},
        ),
    ],
)  # fmt: skip
def test_throttled_seconds(columns: tuple[dict[str, Any], ...], expected: dict[str, float]) -> None:
    """By the counter where there is one (it catches what lies between samples), else by the bit."""
    state = fold(
        joined(), Phase(t=0, name="measure", level=0),
        *(gpu(1 + n, **column) for n, column in enumerate(columns)),
    )  # fmt: skip
    assert summary(state)["gpu"][0]["throttled"] == expected


def scrape(t_s: int, ok: bool = True, **concepts: float) -> Server:
    return Server(t=t_s * S, src="server0", seq=t_s, url="http://h/metrics", ok=ok, concepts=concepts)


def test_counters_become_rates_of_the_window() -> None:
    """100 to 700 tokens in 10 s is 60/s; 30 of 40 queried prompt tokens hit the prefix cache."""
    state = fold(
        scrape(1, output_tokens=100, prefix_cache_hits=10, prefix_cache_queries=20, running=3),
        scrape(
            11, output_tokens=700, prefix_cache_hits=40, prefix_cache_queries=60, running=5, waiting=2, kv_usage=0.5
        ),
    )  # fmt: skip
    server = state.view().servers[0]
    assert (server.output_tokens_per_s, server.prefix_hit_rate) == (60.0, 0.75)
    assert (server.running, server.waiting, server.kv_usage) == (5, 2, 0.5)
    assert server.preemptions_per_s is None
    assert state.view().series.waiting[-1] == 2.0


def test_a_restarted_server_counts_from_zero() -> None:
    """1000 → 50 is 50 more, and nothing goes negative."""
    state = fold(scrape(1, output_tokens=900), scrape(6, output_tokens=1000), scrape(11, output_tokens=50))
    assert state.view().servers[0].output_tokens_per_s == 15.0


def test_an_unreachable_server_keeps_its_last_figures() -> None:
    """One line when it is lost and one when it is back; the age tells how old the figures are."""
    down = Server(t=5 * S, src="server0", seq=5, url="u", ok=False, error="connection refused")
    state = fold(scrape(1, running=3), down, Server(t=6 * S, src="server0", seq=6, url="u", ok=False, error="x"))
    server = state.view().servers[0]
    assert (server.ok, server.running, server.error) == (False, 3, "x")
    assert [line.text for line in state.view().events] == ["server metrics unreachable: connection refused"]
    state.apply(scrape(9, running=1))
    assert state.view().events[-1].text == "server metrics are back"


def test_decode_time_stands_in_for_a_histogram_of_gaps() -> None:
    """llama.cpp: 5 s of decoding for 200 tokens are 25 ms each."""
    state = fold(scrape(1, decode_seconds=10, output_tokens=100), scrape(11, decode_seconds=15, output_tokens=300))
    assert state.view().servers[0].itl_mean_ms == 25.0


def test_one_lost_gpu_does_not_hide_the_others() -> None:
    """Its source says it failed and goes on: GPU 0 is lost, GPU 1 shows its figures."""
    inventory = {"gpus": [{"index": 0}, {"index": 1}]}
    state = fold(
        Source(t=0, src="gpu0", kind="gpu", state="joined", descriptor=inventory),
        Source(t=S, src="gpu0", seq=1, kind="gpu", state="failed", text="GPU 0: fallen off the bus"),
        Gpu(t=S, src="gpu0", seq=2, status=["lost", "ok"], utilization_percent=[None, 80]),
    )  # fmt: skip
    assert [(gpu.status, gpu.utilization_percent) for gpu in state.view().gpus] == [("lost", None), ("ok", 80)]
    assert "fallen off the bus" in state.view().events[-1].text


def histogram(t_s: int, total: float, count: float, buckets: dict[str, float]) -> Server:
    return Server(
        t=t_s * S, src="server0", seq=t_s, url="u",
        histograms={"ttft": {"sum": total, "count": count, "le": buckets}},
    )  # fmt: skip


def test_server_latency_is_exact_in_its_mean_and_honest_in_its_buckets() -> None:
    """(30 − 10) s over 40 requests is 500 ms; the median is only known to lie between 0.1 and 0.5 s."""
    state = fold(
        histogram(1, 10.0, 20, {"0.1": 20, "0.5": 20, "+Inf": 20}),
        histogram(11, 30.0, 60, {"0.1": 20, "0.5": 58, "+Inf": 60}),
    )  # fmt: skip
    assert state.view().servers[0].ttft_mean_ms == pytest.approx(500.0)
    found = summary(state)["server_latency_ms"]["ttft"]
    assert found["p50"] == {"low": 100.0, "high": 500.0}
    assert found["p99"] == {"low": 500.0, "high": None}


def test_server_concepts_in_the_summary() -> None:
    """First, last, mean and highest of what was scraped."""
    state = fold(scrape(1, waiting=0), scrape(2, waiting=9), scrape(3, waiting=3))
    assert summary(state)["server"]["waiting"] == {"first": 0, "last": 3, "mean": 4.0, "max": 9}
