"""The server's own metrics, scraped once a second: an event source. Must not judge what it reads.

Values are the server's words: counters stay counters, histograms stay buckets; windows and quantiles are made of
differences by whoever folds the events. The API key goes to the API's own origin only.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx

from lpxtop.clock import Clock, SystemClock, session_us
from lpxtop.events.records import AnyEvent, Mark, Server, Source
from lpxtop.probes import concepts, exposition
from lpxtop.probes.exposition import Sample

TIMEOUT_S = 2.0
BODY_BYTES = 16 << 20
RETRY_S = 5.0
ACCEPT = "text/plain;version=0.0.4, application/openmetrics-text;q=0.5"
PATHS = ("/metrics", "/v1/metrics", "/prometheus/metrics")
OTHER_PORTS = (8002, 8081)


class ServerMetricsSource:
    """Scrapes one endpoint. Yields `source` (joined or unavailable), then a `server` event per scrape."""

    def __init__(
        self,
        base_url: str,
        origin_ns: int,
        *,
        name: str = "server0",
        metrics_url: str | None = None,
        api_key: str | None = None,
        hz: float = 1.0,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self._base, self._given, self._key = base_url, metrics_url, api_key
        self._period_s = 1.0 / hz
        self._origin_ns = origin_ns
        self._clock: Clock = clock or SystemClock()
        self._closed = asyncio.Event()
        self._seq = 0
        self._previous: dict[str, float] = {}

    async def close(self) -> None:
        self._closed.set()

    async def __aiter__(self) -> AsyncIterator[AnyEvent]:
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False, follow_redirects=False) as client:
            url, text = await self._discover(client)
            if url is None:
                yield self._source("unavailable", text)
                return
            yield self._source("joined", f"server metrics at {url}", {"url": url, "kind": _kind(text)})
            failed = False
            while not self._closed.is_set():
                begin = self._clock.monotonic_ns()
                try:
                    text = await self._get(client, url)
                except (httpx.HTTPError, ValueError) as error:
                    yield self._server(url, ok=False, error=_reason(error))
                    if not failed:
                        yield self._source("failed", f"server metrics: {_reason(error)}")
                    failed = True
                    await self._pause(RETRY_S)
                    continue
                if failed:
                    failed = False
                    yield self._source("joined", f"server metrics at {url} again")
                for event in self._events(url, text, begin):
                    yield event
                spent = (self._clock.monotonic_ns() - begin) / 1e9
                await self._pause(max(0.05, self._period_s - spent))

    # --- finding and reading -----------------------------------------------------------------------------------

    async def _discover(self, client: httpx.AsyncClient) -> tuple[str | None, str]:
        """(url, its first text); (None, a sentence) when there is none."""
        for url in [self._given] if self._given else _candidates(self._base):
            with contextlib.suppress(httpx.HTTPError, ValueError):
                text = await self._get(client, url)
                if self._given or exposition.families(text) & concepts.WANTED:
                    return url, text
        where = self._given or "the usual places"
        return None, f"no server metrics at {where} (vLLM has them on; llama.cpp and SGLang need a flag; --metrics URL)"

    async def _get(self, client: httpx.AsyncClient, url: str) -> str:
        headers = {"accept": ACCEPT}
        if self._key and _origin(url) == _origin(self._base):
            headers["authorization"] = f"Bearer {self._key}"
        async with client.stream("GET", url, headers=headers) as answer:
            if (
                answer.status_code in (307, 308)
                and answer.next_request
                and _origin(str(answer.next_request.url)) == _origin(url)
            ):
                return await self._get(client, str(answer.next_request.url))
            if answer.status_code != 200:
                raise ValueError(f"HTTP {answer.status_code}")
            if "json" in answer.headers.get("content-type", ""):
                raise ValueError("JSON, not Prometheus text")
            body = bytearray()
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > BODY_BYTES:
                    raise ValueError("more than 16 MiB of metrics")
        return body.decode("utf-8", "replace")

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)

    # --- events ------------------------------------------------------------------------------------------------

    def _stamp(self) -> dict[str, Any]:
        self._seq += 1
        now = session_us(self._clock.monotonic_ns(), self._origin_ns)
        return {"t": now, "src": self.name, "seq": self._seq - 1}

    def _source(self, state: str, text: str, descriptor: dict[str, Any] | None = None) -> Source:
        return Source(**self._stamp(), kind="server", state=state, text=text, descriptor=descriptor or {})

    def _server(self, url: str, **fields: Any) -> Server:
        return Server(**self._stamp(), url=url, **fields)

    def _events(self, url: str, text: str, begin_ns: int) -> list[AnyEvent]:
        samples = list(exposition.parse(text, concepts.WANTED))
        values, histograms = canonical(samples)
        events: list[AnyEvent] = []
        if self._restarted(values):
            events.append(Mark(**self._stamp(), text="the server's counters went back: it restarted", level="warn",
                               code="server_restart"))  # fmt: skip
        scrape_us = (self._clock.monotonic_ns() - begin_ns) // 1000
        events.append(
            self._server(url, scrape_us=scrape_us, concepts=values, histograms=histograms, info=_info(samples))
        )
        return events

    def _restarted(self, values: dict[str, float]) -> bool:
        counters = {c.name: values[c.name] for c in concepts.CONCEPTS if c.kind == "counter" and c.name in values}
        back = any(value < self._previous.get(name, 0.0) for name, value in counters.items())
        self._previous = counters
        return back


def canonical(samples: list[Sample]) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """Concepts and histograms of a scrape, engines joined: counters and queues summed, usage the highest.

    A histogram is {"le": {edge: cumulative count}, "sum", "count"}. NaN and infinite values are left out.
    """
    by_family: dict[str, list[Sample]] = {}
    for sample in samples:
        by_family.setdefault(exposition.family(sample.name), []).append(sample)
        if sample.name not in by_family:
            by_family.setdefault(sample.name, by_family[exposition.family(sample.name)])
    values: dict[str, float] = {}
    histograms: dict[str, dict[str, Any]] = {}
    for concept in concepts.CONCEPTS:
        found = next((by_family[name] for name in concept.families if name in by_family), None)
        if found is None:
            continue
        if concept.kind == "histogram":
            histogram = _histogram(found)
            if histogram:
                histograms[concept.name] = histogram
            continue
        numbers = [value for value in (exposition.finite(s.value) for s in found if _counts(s)) if value is not None]
        if numbers:
            values[concept.name] = (max(numbers) if concept.join == "max" else sum(numbers)) * concept.scale
    return values, histograms


def _counts(sample: Sample) -> bool:
    """Leave out tensor- and pipeline-parallel copies of one engine's figures."""
    return sample.labels.get("tp_rank", "0") == "0" and sample.labels.get("pp_rank", "0") == "0"


def _histogram(samples: list[Sample]) -> dict[str, Any]:
    edges: dict[str, float] = {}
    total = count = 0.0
    for sample in filter(_counts, samples):
        if sample.name.endswith("_bucket") and "le" in sample.labels:
            edges[sample.labels["le"]] = edges.get(sample.labels["le"], 0.0) + sample.value
        elif sample.name.endswith("_sum"):
            total += sample.value
        elif sample.name.endswith("_count"):
            count += sample.value
    return {"le": edges, "sum": total, "count": count} if edges else {}


def _info(samples: list[Sample]) -> dict[str, str]:
    for sample in samples:
        if sample.name in concepts.INFO_FAMILIES:
            return {key: value for key, value in sample.labels.items() if len(value) < 100}
    return {}


def _kind(text: str) -> str | None:
    """The server by its family prefix."""
    prefixes = {"vllm:": "vllm", "sglang:": "sglang", "trtllm_": "tensorrt-llm", "tgi_": "tgi",
                "llamacpp:": "llama.cpp",
                "lmdeploy:": "lmdeploy", "dynamo_": "dynamo"}  # fmt: skip
    for name in sorted(exposition.families(text)):
        for prefix, kind in prefixes.items():
            if name.startswith(prefix):
                return kind
    return None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _candidates(base: str) -> list[str]:
    parts = urlsplit(base)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    root = f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}"
    prefix = parts.path.removesuffix("/v1").rstrip("/")
    same = [f"{root}{prefix}{path}" for path in PATHS]
    return same + [f"{parts.scheme}://{host}:{port}/metrics" for port in OTHER_PORTS]


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
