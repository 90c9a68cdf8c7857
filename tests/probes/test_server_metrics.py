"""The source of server metrics against a real HTTP server: finding, scraping, restarts, keys, and bad weather."""

import asyncio
from pathlib import Path

import pytest
from metrics_server import MetricsServer, Page

from lpxtop.events import codec
from lpxtop.events.records import AnyEvent, Mark, Server, ServerChanged, Source
from lpxtop.probes import server as module
from lpxtop.probes.server import ServerMetricsSource

FIXTURES = Path(__file__).parent / "fixtures"
VLLM = (FIXTURES / "vllm-0.32-metrics.txt").read_text()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """No other ports are tried, and failures are retried soon."""
    monkeypatch.setattr("lpxtop.probes.scrape.OTHER_PORTS", ())
    monkeypatch.setattr(module, "RETRY_S", (0.02,))
    monkeypatch.setattr(module, "SEARCH_AGAIN_S", 0.02)


async def collect(source: ServerMetricsSource, scrapes: int, seconds: float = 5.0) -> list[AnyEvent]:
    """Events up to the given number of scrapes, or the end."""
    events: list[AnyEvent] = []

    async def read() -> None:
        async for event in source:
            events.append(codec.decode(codec.encode(event)))
            if sum(isinstance(event, Server) for event in events) >= scrapes:
                await source.close()

    await asyncio.wait_for(read(), seconds)
    return events


def gauges(**values: float) -> str:
    """A small vLLM text."""
    names = {"running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting",
             "tokens": "vllm:generation_tokens_total", "start": "process_start_time_seconds"}  # fmt: skip
    return "".join(f"{names[name]} {value}\n" for name, value in values.items())


async def test_vllm_from_the_apis_url():
    """From http://host/v1 to /metrics: joined with the kind, then concepts, histograms, settings and raw series."""
    async with MetricsServer({"/metrics": Page(VLLM)}) as server:
        events = await collect(ServerMetricsSource(f"{server.url}/v1", 0, hz=50), 2)
    joined, first, second = events
    assert isinstance(joined, Source)
    assert (joined.state, joined.descriptor) == ("joined", {"url": f"{server.url}/metrics", "kind": "vllm"})
    assert isinstance(first, Server)
    assert (first.ok, first.url, first.concepts["output_tokens"]) == (True, f"{server.url}/metrics", 264)
    assert first.histograms["itl"]["count"] == 260
    assert first.info["num_gpu_blocks"] == "2730"
    assert first.scrape_us > 0
    values = {first.names[number]: value for number, value in first.changed}
    assert values['vllm:generation_tokens_total{engine="0",model_name="gemma3-270m"}'] == 264
    assert not any("_bucket" in name or "_created" in name or name.startswith("python_") for name in values)
    assert (second.names, second.changed, second.info) == ({}, [], {})
    assert second.concepts == first.concepts
    assert [event.seq for event in events] == [0, 1, 2]
    assert server.requests[0][1]["accept"].startswith("text/plain;version=0.0.4")


async def test_only_changes_of_raw_series():
    """A series is named once, and told when it changes."""
    pages = [gauges(running=1, waiting=0), gauges(running=1, waiting=0), gauges(running=4, waiting=0, tokens=7)]
    async with MetricsServer({"/metrics": lambda n: Page(pages[min(n - 1, 2)])}) as server:
        events = await collect(ServerMetricsSource(server.url, 0, hz=50), 3)
    scrapes = [event for event in events if isinstance(event, Server)]
    number = {name: n for n, name in (scrapes[0].names | scrapes[1].names).items()}
    tokens = next(iter(scrapes[1].names))
    assert scrapes[1].names == {tokens: "vllm:generation_tokens_total"}
    assert dict(scrapes[1].changed) == {number["vllm:num_requests_running"]: 4, tokens: 7}
    assert scrapes[2].changed == []


@pytest.mark.parametrize(
    ("path", "text", "kind"),
    [("/v1/metrics", "nim-1.8.txt", "nim"), ("/prometheus/metrics", "trtllm-serve-1.0.txt", "tensorrt-llm")],
)
async def test_discovery_goes_on(path, text, kind):
    """What has JSON or a web page at /metrics has Prometheus text somewhere else."""
    pages = {
        "/metrics": Page('[{"iter": 1}]', content_type="application/json"),
        path: Page((FIXTURES / text).read_text()),
    }
    async with MetricsServer(pages) as server:
        events = await collect(ServerMetricsSource(f"{server.url}/v1", 0, hz=50), 1)
    assert events[0].descriptor == {"url": f"{server.url}{path}", "kind": kind}


async def test_behind_a_path():
    """An API under /llm/v1 has its metrics under /llm, or at the root."""
    async with MetricsServer({"/llm/metrics": Page(VLLM)}) as server:
        events = await collect(ServerMetricsSource(f"{server.url}/llm/v1", 0, hz=50), 1)
    assert events[0].descriptor["url"] == f"{server.url}/llm/metrics"


async def test_metrics_on_another_port(monkeypatch):
    """Triton serves its metrics on a port of its own; the API's key does not go there."""
    async with (
        MetricsServer({"/metrics": Page((FIXTURES / "triton-25.06.txt").read_text())}) as metrics,
        MetricsServer() as api,
    ):
        monkeypatch.setattr("lpxtop.probes.scrape.OTHER_PORTS", (metrics.port,))
        events = await collect(ServerMetricsSource(f"{api.url}/v1", 0, api_key="sk-secret", hz=50), 1)
    assert events[0].descriptor == {"url": f"{metrics.url}/metrics", "kind": "triton"}
    assert all("authorization" not in headers for _, headers in metrics.requests)
    assert [headers["authorization"] for headers in api.asked("/metrics")] == ["Bearer sk-secret"]


async def test_the_key_does_not_follow_a_redirect_to_another_origin():
    """Redirects: followed on the same origin, not to another one; the key goes nowhere else."""
    async with MetricsServer({"/metrics": Page(VLLM)}) as other:
        pages = {
            "/metrics": Page("", 307, headers={"location": f"{other.url}/metrics"}),
            "/v1/metrics": Page("", 307, headers={"location": "/v1/metrics/"}),
            "/v1/metrics/": Page(VLLM),
        }
        async with MetricsServer(pages) as server:
            events = await collect(ServerMetricsSource(server.url, 0, api_key="sk-secret", hz=50), 1)
    assert events[0].descriptor["url"] == f"{server.url}/v1/metrics"
    assert other.requests == []


async def test_a_given_url_gets_the_key_only_on_the_apis_origin():
    """--metrics of another origin: no key; user, password and query are sent there but are in no event."""
    async with MetricsServer({"/m?model=a": Page(VLLM)}) as metrics, MetricsServer() as api:
        url = f"http://me:hidden@127.0.0.1:{metrics.port}/m?model=a"
        events = await collect(ServerMetricsSource(api.url, 0, api_key="sk-secret", metrics_url=url, hz=50), 1)
    assert api.requests == []
    assert all("sk-secret" not in str(headers) for _, headers in metrics.requests)
    assert events[0].descriptor["url"] == f"http://127.0.0.1:{metrics.port}/m"
    assert not any(word in repr(events) for word in ("hidden", "model=a", "sk-secret"))


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (Page("nope", 404), "HTTP 404"),
        (Page('{"error": "no"}', 501, "application/json"), "HTTP 501"),
        (Page("", 401), "HTTP 401: it wants a key"),
        (Page("<html></html>", content_type="text/html"), "text/html instead of Prometheus text"),
        (Page("# only a comment\n"), "no Prometheus text"),
    ],
)
async def test_no_metrics_ends_with_a_sentence(page, why):
    """The place asked first, why, and what to do; then the end."""
    async with MetricsServer(dict.fromkeys(("/metrics", "/v1/metrics", "/prometheus/metrics"), page)) as server:
        events = await collect(ServerMetricsSource(server.url, 0), 1)
    assert [(event.kind, event.state) for event in events] == [("server", "unavailable")]
    assert events[0].text.startswith(f"no server metrics at {server.url}/metrics ({why}) or the other usual places: ")


async def test_an_endpoint_that_is_not_up_yet():
    """Nobody listens: said once, asked again, and found when it comes up."""
    server = MetricsServer({"/metrics": Page(VLLM)})
    async with server:
        pass
    source = ServerMetricsSource(server.url, 0, hz=50)
    task = asyncio.create_task(collect(source, 1))
    await asyncio.sleep(0.2)
    async with server:
        events = await task
    assert [event.state for event in events if isinstance(event, Source)] == ["failed", "joined"]
    assert "no server metrics at" in events[0].text


async def test_an_endpoint_that_comes_up_between_two_questions():
    """The first path dropped, the others not found: the search goes on, and the first path is found next time."""

    def page(n: int) -> Page:
        if n == 1:
            raise ConnectionError("not up yet")
        return Page(VLLM)

    async with MetricsServer({"/metrics": page}) as server:
        events = await collect(ServerMetricsSource(server.url, 0, hz=50), 1)

    assert [event.state for event in events if isinstance(event, Source)] == ["failed", "joined"]


async def test_dynamo_before_its_first_request():
    """A page with metrics nobody knows is kept: the server's own appear with the first request."""
    pages = [
        "process_cpu_seconds_total 1\n",
        "process_cpu_seconds_total 2\n",
        (FIXTURES / "dynamo-frontend-0.6.txt").read_text(),
    ]
    async with MetricsServer({"/metrics": lambda n: Page(pages[min(n - 1, 2)])}) as server:
        events = await collect(ServerMetricsSource(server.url, 0, hz=50), 3)
    scrapes = [event for event in events if isinstance(event, Server)]
    assert events[0].descriptor["kind"] is None
    assert scrapes[0].concepts == {}
    assert scrapes[-1].concepts["running"] == 10


async def test_a_server_that_goes_and_comes_back():
    """Failing scrapes are events with the reason; the first good one after a restart has a mark."""

    def page(n: int) -> Page:
        if n in (4, 5):
            return Page("", 503)
        return Page(gauges(running=1, tokens=1000 if n < 4 else 20))

    async with MetricsServer({"/metrics": page}) as server:
        events = await collect(ServerMetricsSource(server.url, 0, hz=50), 6)
    kinds = [type(event).__name__ for event in events]
    assert kinds == ["Source", "Server", "Server", "Server", "Server", "Mark", "Server", "Server"]
    assert [(e.ok, e.error) for e in events if isinstance(e, Server)] == [
        (True, None), (True, None), (False, "HTTP 503"), (False, "HTTP 503"), (True, None), (True, None)
    ]  # fmt: skip
    mark = events[5]
    assert (mark.code, mark.level, mark.text) == (
        "server_restart", "warn", "the server's counters began again: it restarted"
    )  # fmt: skip
    assert len(events[6].changed) == 2


async def test_a_restart_of_an_idle_server_shows_in_its_start_time():
    """Counters at 0 before and after: the start time tells; settings that differ are told one by one."""
    info = 'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{}"}} 1\n'
    pages = [gauges(tokens=0, start=100) + info.format(10)] * 2 + [gauges(tokens=0, start=200) + info.format(12)]
    async with MetricsServer({"/metrics": lambda n: Page(pages[min(n - 1, 2)])}) as server:
        events = await collect(ServerMetricsSource(server.url, 0, hz=50), 3)
    assert [event.code for event in events if isinstance(event, Mark)] == ["server_restart"]
    changes = [(e.what, e.before, e.after) for e in events if isinstance(e, ServerChanged)]
    assert changes == [("num_gpu_blocks", "10", "12")]


async def test_replicas_behind_one_address():
    """A load balancer in front of two servers: one mark that says so, not a restart at every scrape."""
    pages = [gauges(tokens=1000, start=100), gauges(tokens=20, start=200)]
    async with MetricsServer({"/metrics": lambda n: Page(pages[n % 2])}) as server:
        events = await collect(ServerMetricsSource(server.url, 0, hz=50), 10)
    assert [event.code for event in events if isinstance(event, Mark)] == ["server_restart", "server_metrics_mixed"]


async def test_a_slow_page_is_not_asked_twice():
    """A scrape that takes longer than the period: the next begins when it is over, never beside it."""
    running = 0
    most = 0

    class Counting(MetricsServer):
        async def _serve(self, reader, writer):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await super()._serve(reader, writer)
            running -= 1

    async with Counting({"/metrics": Page(VLLM, delay_s=0.08)}) as server:
        events = await collect(ServerMetricsSource(server.url, 0, hz=50), 3)
    assert most == 1
    assert all(event.scrape_us >= 80_000 for event in events if isinstance(event, Server))


async def test_a_page_that_never_ends(monkeypatch):
    """2 s are enough (here 0.1 s): the scrape fails and says so."""
    monkeypatch.setattr("lpxtop.probes.scrape.TIMEOUT_S", 0.1)
    async with MetricsServer({"/metrics": lambda n: Page(VLLM, delay_s=0.0 if n == 1 else 0.4)}) as server:
        events = await collect(ServerMetricsSource(server.url, 0, hz=50), 1)
    assert (events[1].ok, events[1].error) == (False, "no answer within 0.1 s")


async def test_a_page_of_endless_size(monkeypatch):
    """More than the cap is not read."""
    monkeypatch.setattr("lpxtop.probes.scrape.BODY_BYTES", 10_000)
    async with MetricsServer({"/metrics": Page(VLLM)}) as server:
        events = await collect(ServerMetricsSource(server.url, 0, metrics_url=f"{server.url}/metrics"), 1)
    assert events[0].text == f"no server metrics at {server.url}/metrics: more than 16 MiB of metrics"


async def test_closing_while_waiting_is_at_once():
    """At 1 Hz the end comes within milliseconds, not at the next scrape."""
    async with MetricsServer({"/metrics": Page(VLLM)}) as server:
        source = ServerMetricsSource(server.url, 0)
        task = asyncio.create_task(collect(source, 99))
        while len(server.requests) < 2:
            await asyncio.sleep(0.01)
        await source.close()
        await asyncio.wait_for(task, 0.5)
