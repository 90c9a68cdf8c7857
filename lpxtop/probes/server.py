"""The server's own metrics, scraped once a second: an event source. Must not judge what it reads.

Values are the server's words: counters stay counters, histograms stay buckets; windows and quantiles are made of
differences by whoever folds the events.
"""

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import httpx

from lpxtop.clock import Clock, SystemClock, session_us
from lpxtop.events.records import AnyEvent, Mark, Server, ServerChanged, Source
from lpxtop.probes import canonical, concepts, scrape
from lpxtop.probes.canonical import Reading
from lpxtop.probes.concepts import START_TIME, Keep, Table
from lpxtop.probes.exposition import Parser, Series, finite
from lpxtop.probes.scrape import NoMetrics

RETRY_S = (1.0, 2.0, 5.0)
SEARCH_AGAIN_S = 5.0
MAX_RAW_SERIES = 3000
MIXED_RESTARTS, MIXED_WINDOW_S = 4, 60.0
"""So many restarts in so short a time are several servers behind one address."""


class Scraper:
    """GETs one origin's metrics. `key` goes to the origin of `key_url` only."""

    def __init__(
        self, key: str | None = None, key_url: str | None = None, verify: ssl.SSLContext | bool = True
    ) -> None:
        self._key, self._key_origin = key, None if key_url is None else scrape.origin(key_url)
        self._client = httpx.AsyncClient(
            timeout=scrape.TIMEOUT_S, trust_env=False, follow_redirects=False, verify=verify
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, url: str) -> str:
        """The text, within 2 s and 16 MiB. Raises NoMetrics."""
        try:
            async with asyncio.timeout(scrape.TIMEOUT_S):
                return await self._get(url, redirects=2)
        except (TimeoutError, httpx.TimeoutException):
            raise NoMetrics(f"no answer within {scrape.TIMEOUT_S:g} s", there=False) from None
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, OSError) as error:
            raise NoMetrics(str(error) or type(error).__name__, there=False) from None

    async def _get(self, url: str, redirects: int) -> str:
        headers = {"accept": scrape.ACCEPT}
        if self._key and scrape.origin(url) == self._key_origin:
            headers["authorization"] = f"Bearer {self._key}"
        async with self._client.stream("GET", url, headers=headers) as answer:
            target = answer.next_request
            if target is not None and redirects and scrape.origin(str(target.url)) == scrape.origin(url):
                return await self._get(str(target.url), redirects - 1)
            scrape.check_head(answer.status_code, answer.headers.get("content-type", ""))
            body = bytearray()
            async for part in answer.aiter_bytes():
                body += part
                if len(body) > scrape.BODY_BYTES:
                    raise NoMetrics("more than 16 MiB of metrics")
        return body.decode("utf-8", "replace")


class ServerMetricsSource:
    """Scrapes one endpoint's server: `source` joined, then a `server` event per scrape; or `source` unavailable, whose
    text says what to do, and the end.

    `base_url` is the API's; `metrics_url` is asked instead of the usual places. `table` is a user's TOML text for
    concepts.load. An endpoint that does not answer at all is asked again until it does. Raises UsageError.
    """

    def __init__(
        self,
        base_url: str,
        origin_ns: int,
        *,
        name: str = "server0",
        metrics_url: str | None = None,
        api_key: str | None = None,
        hz: float = 1.0,
        verify: ssl.SSLContext | bool = True,
        table: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self._base, self._given = base_url, metrics_url
        self._key, self._verify = api_key, verify
        self._period_ns = round(1e9 / hz)
        self._origin_ns = origin_ns
        self._clock: Clock = clock or SystemClock()
        self._table: Table = concepts.load(table)
        self._parser = Parser(Keep(self._table))
        self._kind: str | None = None
        self._epochs = Epochs()
        self._raw = RawSeries()
        self._info: dict[str, str] = {}
        self._failures = 0
        self._closed = asyncio.Event()
        self._seq = 0

    async def close(self) -> None:
        self._closed.set()

    async def __aiter__(self) -> AsyncIterator[AnyEvent]:
        scraper = Scraper(self._key, self._base, self._verify)
        try:
            told = False
            while True:
                url, why, final = await self._discover(scraper)
                if url is not None or self._closed.is_set():
                    break
                if final or not told:
                    yield self._source("unavailable" if final else "failed", why)
                if final:
                    return
                told = True
                await self._pause(SEARCH_AGAIN_S)
            if url is None:
                return
            yield self._source("joined", why, {"url": scrape.shown(url), "kind": self._kind})
            due = self._clock.monotonic_ns()
            while not self._closed.is_set():
                for event in await self._scrape(scraper, url):
                    yield event
                due = await self._until_due(due)
        finally:
            await scraper.close()

    async def _until_due(self, due: int) -> int:
        """Wait for the next deadline; those that passed meanwhile are skipped. Longer after failures in a row."""
        now = self._clock.monotonic_ns()
        if self._failures:
            wait_s = RETRY_S[min(self._failures, len(RETRY_S)) - 1]
            due = now
        else:
            due = due + self._period_ns if due + self._period_ns > now else now + self._period_ns
            wait_s = (due - now) / 1e9
        await self._pause(wait_s)
        return due

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)

    # --- finding -----------------------------------------------------------------------------------------------

    async def _discover(self, scraper: Scraper) -> tuple[str | None, str, bool]:
        """(URL, a sentence, True); or (None, why not, whether asking again is of no use)."""
        own, others = ([self._given], []) if self._given else scrape.candidates(self._base)
        problems: list[NoMetrics] = []
        unknown: str | None = None
        for url in [*own, *others]:
            if url in others and not any(problem.there for problem in problems) and unknown is None:
                break  # the host does not answer at all
            try:
                text = await scraper.get(url)
                if self._recognises(text):
                    return url, f"server metrics at {scrape.shown(url)}", True
                unknown = url if unknown is None and url in own else unknown
            except NoMetrics as problem:
                problems.append(problem)
        if unknown is not None:
            return unknown, f"metrics of a server that is not in the table, at {scrape.shown(unknown)}", True
        # an origin that came up between two of the questions may well have what the first one asked for
        return None, self._why_none(own[0], str(problems[0])), all(problem.there for problem in problems[: len(own)])

    def _recognises(self, text: str) -> bool:
        """Whether these are metrics of a server in the table. Raises NoMetrics for no metrics at all."""
        self._parser = Parser(Keep(self._table))
        self._parser.parse(text)
        if not self._parser.names:
            raise NoMetrics("no Prometheus text")
        self._kind = self._table.detect(self._parser.names)
        return self._kind is not None

    def _why_none(self, url: str, why: str) -> str:
        where = scrape.shown(url)
        if self._given:
            return f"no server metrics at {where}: {why}"
        return (
            f"no server metrics at {where} ({why}) or the other usual places: llama.cpp needs --metrics, SGLang "
            "--enable-metrics; --metrics URL names another place"
        )

    # --- scraping ----------------------------------------------------------------------------------------------

    async def _scrape(self, scraper: Scraper, url: str) -> list[AnyEvent]:
        begin = self._clock.monotonic_ns()
        try:
            text = await scraper.get(url)
        except NoMetrics as problem:
            self._failures += 1
            return [Server(**self._stamp(), url=scrape.shown(url), ok=False, error=str(problem))]
        self._failures = 0
        scrape_us = (self._clock.monotonic_ns() - begin) // 1000
        values = await asyncio.to_thread(self._parser.parse, text)
        return self._events(scrape.shown(url), values, begin, scrape_us)

    def _events(self, url: str, values: dict[Series, float], begin: int, scrape_us: int) -> list[AnyEvent]:
        if self._kind is None:
            self._kind = self._table.detect(self._parser.names)
        reading = canonical.EMPTY
        if self._kind is not None:
            reading = canonical.read(values, self._table.servers[self._kind], self._table)
        news = self._epochs.look(self._counters(reading), _start_time(values), begin)
        events: list[AnyEvent] = []
        if news is not None:
            events.append(Mark(**self._stamp(begin), text=news[1], level="warn", code=news[0]))
            self._raw.forget()
        changes, info = self._info_changes(reading.info)
        events += [ServerChanged(**self._stamp(begin), what=what, before=a, after=b) for what, a, b in changes]
        names, changed = self._raw.changed(values)
        events.append(
            Server(
                **self._stamp(begin), url=url, scrape_us=scrape_us, concepts=reading.concepts, engines=reading.engines,
                histograms=reading.histograms, names=names, changed=changed, info=info,
            )
        )  # fmt: skip
        return events

    def _counters(self, reading: Reading) -> dict[str, float]:
        counters = {
            name: value
            for name, value in reading.concepts.items()
            if name in self._table.concepts and self._table.concepts[name].kind == "counter"
        }
        return counters | {name: histogram["count"] for name, histogram in reading.histograms.items()}

    def _info_changes(self, info: dict[str, str]) -> tuple[list[tuple[str, str | None, str | None]], dict[str, str]]:
        """Settings that differ from the last known ones, and the settings to tell: only when they are news."""
        if not info or info == self._info:
            return [], {}
        before, self._info = self._info, info
        names = sorted(before.keys() | info.keys()) if before else []
        return [(n, before.get(n), info.get(n)) for n in names if before.get(n) != info.get(n)], info

    def _stamp(self, at_ns: int | None = None) -> dict[str, Any]:
        self._seq += 1
        at_ns = self._clock.monotonic_ns() if at_ns is None else at_ns
        return {"t": session_us(at_ns, self._origin_ns), "src": self.name, "seq": self._seq - 1}

    def _source(self, state: str, text: str, descriptor: dict[str, Any] | None = None) -> Source:
        return Source(**self._stamp(), kind="server", state=state, text=text, descriptor=descriptor or {})


class Epochs:
    """Notices when a server's counters began again, and when they are several servers' taken in turn."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._starts: deque[float] = deque(maxlen=10)
        self._restarts: deque[int] = deque(maxlen=MIXED_RESTARTS)
        self._mixed = False

    def look(self, counters: dict[str, float], start: float | None, at_ns: int) -> tuple[str, str] | None:
        """(code, sentence) of what is new at this scrape."""
        back = any(value < self._counters.get(name, 0.0) for name, value in counters.items())
        known = start is not None and start in self._starts
        other = start is not None and bool(self._starts) and start != self._starts[-1]
        self._counters = counters
        if start is not None and other and known:
            self._starts.remove(start)
        if start is not None and (other or not self._starts):
            self._starts.append(start)
        if not back and not other:
            return None
        self._restarts.append(at_ns)
        often = len(self._restarts) == MIXED_RESTARTS and at_ns - self._restarts[0] < MIXED_WINDOW_S * 1e9
        if (other and known) or often:
            return self._tell_mixed()
        return None if self._mixed else ("server_restart", "the server's counters began again: it restarted")

    def _tell_mixed(self) -> tuple[str, str] | None:
        if self._mixed:
            return None
        self._mixed = True
        return "server_metrics_mixed", (
            "the metrics are several servers' in turn (a load balancer?): rates from counters mean nothing; "
            "scrape one server with --metrics URL"
        )


class RawSeries:
    """Which of the server's own series changed, under short numbers; buckets are in the histograms already."""

    def __init__(self) -> None:
        self._last: dict[int, float] = {}
        self._named: set[int] = set()

    def forget(self) -> None:
        """After a restart every value is told again."""
        self._last.clear()

    def changed(self, values: dict[Series, float]) -> tuple[dict[int, str], list[tuple[int, float]]]:
        """Names of series told for the first time, and (number, value) of those that changed."""
        names: dict[int, str] = {}
        changed: list[tuple[int, float]] = []
        for series, value in values.items():
            number = series.number
            if self._last.get(number) == value or "le" in series.labels or finite(value) is None:
                continue
            if number not in self._named:
                if len(self._named) >= MAX_RAW_SERIES:
                    continue
                self._named.add(number)
                names[number] = series.text
            self._last[number] = value
            changed.append((number, value))
        return names, changed


def _start_time(values: dict[Series, float]) -> float | None:
    """When the server's process started; the newest where there are several."""
    return max((value for series, value in values.items() if series.name == START_TIME), default=None)
