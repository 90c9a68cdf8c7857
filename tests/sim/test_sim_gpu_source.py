"""The event source of the simulated GPU: against a real simulated server, and against servers in bad shape."""

import asyncio
import json
import time
from itertools import pairwise

import pytest
from sim_process import server

from lpxtop.events.codec import decode, encode
from lpxtop.events.records import Gpu, Source
from lpxtop.sim import gpu as sim_gpu
from lpxtop.sim.gpu import SimGpuSource, SimulatedGpu
from lpxtop.sim.presets import GpuConfig


async def collect(source, count, seconds=10.0):
    got = []
    async with asyncio.timeout(seconds):
        async for event in source:
            got.append(event)
            if len(got) == count:
                await source.close()
    return got


async def test_it_joins_with_its_inventory_and_samples_at_2_hz():
    """First `source` with the GPU marked simulated, then `gpu` events every 0.5 s in session time, numbered."""
    with server() as url:
        origin = time.monotonic_ns()
        joined, *samples = await collect(SimGpuSource(url, origin), 5)

    assert (joined.kind, joined.state, joined.src) == ("gpu", "joined", "gpu0")
    assert joined.descriptor["simulated"] is True
    assert joined.descriptor["driver"] == "sim"
    (row,) = joined.descriptor["gpus"]
    assert row["name"].startswith("SIM ")
    assert row["uuid"].startswith("GPU-SIM-")
    assert {"memory_total_bytes", "power_limit_watts", "sm_clock_max_mhz", "memory_clock_max_mhz"} <= set(row)
    assert [event.seq for event in (joined, *samples)] == [0, 1, 2, 3, 4]
    steps = [(b.t - a.t) / 1e6 for a, b in pairwise(samples)]
    assert steps == pytest.approx([0.5] * 3, abs=0.08)
    assert 0 <= joined.t <= samples[0].t < 1_000_000
    assert samples[0].memory_used_bytes == [16 << 30]
    assert samples[-1].energy_j[0] > samples[0].energy_j[0]
    assert all(decode(encode(event)) == event for event in (joined, *samples))


class Scripted:
    """A server on a free port that answers its n-th request with the n-th script line, and counts connections."""

    def __init__(self, *script: bytes | None):
        self._script = list(script)
        self.connections = self.requests = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _serve(self, reader, writer):
        self.connections += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                answer = self._script[min(self.requests, len(self._script) - 1)]
                self.requests += 1
                if answer is None:
                    return
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


def http(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


GOOD = http(json.dumps(SimulatedGpu(GpuConfig()).answer()).encode())


@pytest.fixture
def quick(monkeypatch):
    """Polls and retries without the waits between them."""
    monkeypatch.setattr(sim_gpu, "POLL_S", 0.01)
    monkeypatch.setattr(sim_gpu, "RETRY_S", 0.01)
    monkeypatch.setattr(sim_gpu, "ANSWER_S", 0.2)


async def test_one_connection_is_kept(quick):
    """Twenty samples come over one connection."""
    async with Scripted(GOOD) as server:
        await collect(SimGpuSource(server.url, 0), 21)

    assert (server.connections, server.requests) == (1, 20)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        pytest.param(None, "bytes read", id="closed without an answer"),
        pytest.param(http(b"{}", "500 Internal Server Error"), "500", id="a server error"),
        pytest.param(http(b"not json"), "malformed", id="not JSON"),
        pytest.param(http(b"{}"), "driver", id="JSON of something else"),
        pytest.param(http(b'{"driver":"x","gpus":[],"columns":{"wat":[1]}}'), "wat", id="an unknown column"),
        pytest.param(http(b'{"driver":"x","gpus":[],"columns":{"status":5}}'), "status", id="a column of a wrong type"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", "invalid literal", id="a length that is none"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", "TimeoutError", id="half an answer"),
        pytest.param(b"x" * 100_000, "not HTTP", id="a flood without a head"),
    ],
)
async def test_it_survives_a_server_in_bad_shape(quick, bad, says):
    """Sample, failure (said once, whatever its number), then joined again and samples; never an exception."""
    async with Scripted(GOOD, bad, bad, bad, GOOD) as server:
        events = await collect(SimGpuSource(server.url, 0), 5)

    assert [event.state if isinstance(event, Source) else "gpu" for event in events] == [
        "joined", "gpu", "failed", "joined", "gpu",
    ]  # fmt: skip
    assert says in events[2].text
    assert [event.seq for event in events] == [0, 1, 2, 3, 4]
    assert isinstance(events[4], Gpu)


async def test_an_unreachable_server_is_asked_until_it_is_there(quick):
    """Failed first, joined when the server comes up on the very port."""
    async with Scripted(GOOD) as server:
        url = server.url
    source = SimGpuSource(url, 0)
    events = []

    async def follow():
        async for event in source:
            events.append(event)

    task = asyncio.create_task(follow())
    await asyncio.sleep(0.1)
    listener = await asyncio.start_server(Scripted(GOOD)._serve, "127.0.0.1", int(url.rsplit(":", 1)[1]))
    async with asyncio.timeout(5):
        while not any(isinstance(event, Gpu) for event in events):
            await asyncio.sleep(0.01)
        await source.close()
        await task
    listener.close()

    assert [event.state for event in events[:2]] == ["failed", "joined"]


async def test_closing_ends_a_long_wait_at_once():
    """close() between two polls, or during a retry, ends the iteration within a moment."""
    async with Scripted(None) as server:
        source = SimGpuSource(server.url, 0)
        task = asyncio.create_task(collect(source, 99))
        await asyncio.sleep(0.1)
        begin = time.monotonic()
        await source.close()
        await task

    assert time.monotonic() - begin < 0.2


@pytest.mark.parametrize(
    ("url", "place"),
    [("http://127.0.0.1:81/v1", ("127.0.0.1", 81)), ("http://host", ("host", 80)), ("http://[::1]:9", ("::1", 9))],
)
def test_the_place_is_read_from_the_url(url, place):
    """With and without a port, a path, IPv6."""
    link = SimGpuSource(url, 0)._link

    assert (link._host, link._port) == place
