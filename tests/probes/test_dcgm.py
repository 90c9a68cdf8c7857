"""A dcgm-exporter as the source of another host's GPUs."""

import asyncio
from pathlib import Path

import pytest
from metrics_server import MetricsServer, Page

from lpxtop.events import codec
from lpxtop.events.records import AnyEvent, Gpu, Mark, Source
from lpxtop.probes import dcgm
from lpxtop.probes.dcgm import DcgmSource

TEXT = (Path(__file__).parent / "fixtures" / "dcgm-exporter-4.txt").read_text()
MIB = 1 << 20


async def collect(source: DcgmSource, samples: int) -> list[AnyEvent]:
    """Events up to the given number of samples, or the end."""
    events: list[AnyEvent] = []

    async def read() -> None:
        async for event in source:
            events.append(codec.decode(codec.encode(event)))
            if sum(isinstance(event, Gpu) for event in events) >= samples:
                await source.close()

    await asyncio.wait_for(read(), 5)
    return events


async def test_columns_and_inventory():
    """DCGM's fields in our units; blank values and missing fields are None; the host is named."""
    async with MetricsServer({"/metrics": Page(TEXT)}) as server:
        joined, sample = await collect(DcgmSource(f"{server.url}/metrics", 0, hz=50), 1)
    assert (joined.kind, joined.state, joined.host) == ("gpu", "joined", "node7")
    assert joined.descriptor["driver"] == "570.86.15"
    assert joined.descriptor["gpus"][0] == {
        "index": 0, "uuid": "GPU-aaaa", "name": "NVIDIA H100 80GB HBM3", "host": "node7", "pci": "0000:3b:00.0",
        "memory_total_bytes": (61000 + 20000 + 559) * MIB,
    }  # fmt: skip
    assert sample.status == ["ok", "ok"]
    assert (sample.utilization_percent, sample.memory_utilization_percent) == ([98, 0], [55, None])
    assert sample.memory_used_bytes == [61000 * MIB, 500 * MIB]
    assert (sample.power_watts, sample.energy_j) == ([612.345, 70.12], [123456.789, None])
    assert (sample.sm_clock_mhz, sample.memory_clock_mhz) == ([1980, 345], [2619, 2619])
    assert (sample.temperature_c, sample.memory_temperature_c) == ([63, 31], [])
    assert (sample.throttle_bits, sample.throttle_ns) == ([4, None], {"power_cap": [5_000_000_000, None]})
    assert sample.health == [{"rows_remapped_uncorrected": 1, "pcie_replays": 3}, {}]


async def test_an_xid_is_told_when_it_is_new():
    """What stood there at the start is old news; a change is a mark."""
    now = TEXT.replace('err_msg="No Error"} 0', 'err_msg="x"} 79')
    async with MetricsServer({"/metrics": lambda n: Page(TEXT if n < 3 else now)}) as server:
        events = await collect(DcgmSource(f"{server.url}/metrics", 0, hz=50), 5)
    marks = [event for event in events if isinstance(event, Mark)]
    assert [(mark.text, mark.level, mark.code) for mark in marks] == [
        ("GPU 0: XID 79 (fell off the bus: reboot)", "error", "xid")
    ]
    async with MetricsServer({"/metrics": Page(now)}) as server:
        assert not any(isinstance(e, Mark) for e in await collect(DcgmSource(f"{server.url}/metrics", 0, hz=50), 2))


async def test_a_gpu_that_disappears():
    """Its row stays, stale; the other one is read."""
    gone = "".join(line + "\n" for line in TEXT.splitlines() if 'gpu="1"' not in line)
    async with MetricsServer({"/metrics": lambda n: Page(TEXT if n == 1 else gone)}) as server:
        events = await collect(DcgmSource(f"{server.url}/metrics", 0, hz=50), 2)
    assert events[-1].status == ["ok", "stale"]
    assert events[-1].utilization_percent == [98, None]


async def test_an_exporter_that_goes_away(monkeypatch):
    """Said once; the GPUs are stale with nothing known; and joined again when it is back."""
    monkeypatch.setattr(dcgm, "RETRY_S", 0.02)
    async with MetricsServer({"/metrics": lambda n: Page(TEXT) if n not in {2, 3} else Page("", 503)}) as server:
        events = await collect(DcgmSource(f"{server.url}/metrics", 0, hz=50), 4)
    assert [event.state for event in events if isinstance(event, Source)] == ["joined", "failed", "joined"]
    samples = [event for event in events if isinstance(event, Gpu)]
    assert [sample.status for sample in samples] == [["ok", "ok"], ["stale", "stale"], ["stale", "stale"], ["ok", "ok"]]
    assert samples[1].utilization_percent == []
    assert samples[1].notes["status"].endswith("HTTP 503")


async def test_values_that_seldom_change(monkeypatch):
    """The exporter's own interval is slower than the scrapes: the note says how slow."""
    monkeypatch.setattr(dcgm, "SLOW_REFRESH_S", 0.15)
    busy = TEXT.replace("} 98", "} 97")
    async with MetricsServer({"/metrics": lambda n: Page(TEXT if n % 20 < 10 else busy)}) as server:
        events = await collect(DcgmSource(f"{server.url}/metrics", 0, hz=50), 35)
    assert events[1].notes == {}
    assert events[-1].notes["period"].startswith("the exporter has new values only every ")


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (Page("", 404), "HTTP 404"),
        (Page("node_load1 0.5\n"), "no DCGM metrics there; dcgm-exporter's are at http://NODE:9400/metrics"),
    ],
)
async def test_no_exporter_there(page, why):
    """One sentence, and the end."""
    async with MetricsServer({"/metrics": page}) as server:
        events = await collect(DcgmSource(f"{server.url}/metrics", 0), 1)
    assert [(event.state, event.text) for event in events] == [
        ("unavailable", f"no GPU readings from {server.url}/metrics: {why}")
    ]
