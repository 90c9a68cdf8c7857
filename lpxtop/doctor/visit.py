"""One visit to an endpoint: the facts the endpoint checks judge, each asked once. Must not judge.

Two short prompts are sent, no load. Whatever goes wrong becomes a fact; nothing is raised but UsageError.
"""

import asyncio
import contextlib
import email.utils
import re
import socket
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from lpxtop.doctor.prompting import ANSWER_S, ANSWER_TOKENS, COUNT, QUESTION, STREAM_TOKENS, Asked, Reply, keyed, send
from lpxtop.errors import LpxtopError, TargetError, UsageError
from lpxtop.load import refusals
from lpxtop.load.deltas import error_text
from lpxtop.load.negotiate import preflight
from lpxtop.load.scrub import scrubbed
from lpxtop.plan import Limits, Negotiated, Plan, Secrets
from lpxtop.probes import concepts, scrape
from lpxtop.probes.concepts import Keep
from lpxtop.probes.exposition import Parser
from lpxtop.probes.server import Scraper

STEP_S = 3.0
DIALS = 3
_ABOUT_KEYS = re.compile(r"HTTP 40[13]\b")


@dataclass
class Metrics:
    """The server's own metrics: where, of which kind of server, or why there are none."""

    url: str | None = None
    kind: str | None = None
    problem: str = ""


@dataclass
class Visit:
    """Everything one visit found. None and empty: not asked, or not told."""

    plan: Plan
    secrets: Secrets = field(repr=False)
    addresses: list[str] = field(default_factory=list)
    name_problem: str = ""
    dials: dict[str, list[float]] = field(default_factory=dict)
    dial_problems: dict[str, str] = field(default_factory=dict)
    tls: dict[str, Any] = field(default_factory=dict)
    tls_problem: str = ""
    models: list[dict[str, Any]] = field(default_factory=list)
    models_status: int | None = None
    keyless_status: int | None = None
    models_problem: str = ""
    server_date_s: float | None = None
    local_date_s: float | None = None
    date_error_s: float = 0.0
    negotiated: Negotiated | None = None
    model: str | None = None
    notes: tuple[str, ...] = ()
    refusal: tuple[str, str] | None = None
    answer: Reply | None = None
    stream: Reply | None = None
    health: dict[str, int | None] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def host(self) -> str:
        return urlsplit(self.plan.target.url).hostname or ""

    @property
    def port(self) -> int:
        parts = urlsplit(self.plan.target.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def is_tls(self) -> bool:
        return self.plan.target.url.startswith("https:")

    @property
    def via_proxy(self) -> bool:
        return self.plan.network.proxy is not None

    def lacks(self, need: str) -> str | None:
        """Why a check cannot be made; None when it can. Each need includes those before it: `direct` (no proxy in
        between), `connection`, `reach`, `http`, `key`, `answer`; `stream` is like `answer`."""
        if need in ("direct", "connection") and self.via_proxy:
            return "the connection goes through a proxy"
        if need != "direct" and not self.via_proxy and not self.dials:
            return "the endpoint cannot be reached (see endpoint.dns, endpoint.tcp)"
        if need in ("direct", "connection"):
            return None
        if self.tls_problem:
            return "no TLS connection (see endpoint.tls)"
        return None if need == "reach" else self._lacks_answers(need)

    def _lacks_answers(self, need: str) -> str | None:
        if self.models_status is None:
            return "the endpoint does not speak HTTP here (see endpoint.models)"
        if need != "http" and (self.models_status == 401 or (self.refusal and _ABOUT_KEYS.search(self.refusal[0]))):
            return "the key decides (see endpoint.auth)"
        reply = {"answer": self.answer, "stream": self.stream}.get(need)
        if need in ("answer", "stream") and (reply is None or not reply.ok):
            return "no such answer (see endpoint.answer)" if need == "answer" else self._no_stream(reply)
        return None

    def _no_stream(self, reply: Reply | None) -> str:
        if reply is None:
            return "no streamed answer (see endpoint.answer)"
        return f"the streamed prompt failed: {reply.problem}"


async def visit(plan: Plan, secrets: Secrets) -> Visit:
    """Ask everything once, in the order in which one thing needs another. Raises UsageError for a bad --cacert."""
    found = Visit(plan, secrets)
    context = _context(plan)
    if not found.via_proxy:
        await _dial(found, context)
        if not found.dials:
            return found
    async with _http(found, context) as http:
        await _list(found, http)
        if found.models_status is None:
            return found
        await asyncio.gather(_ask_health(found, http), _scrape(found, context))
        await _negotiate(found)
        if found.negotiated is not None:
            asked = Asked(plan, secrets, found.negotiated, found.model or "")
            found.answer = await send(asked, http, QUESTION, ANSWER_TOKENS, stream=False)
            found.stream = await send(asked, http, COUNT, STREAM_TOKENS, stream=True)
    return found


def _context(plan: Plan) -> ssl.SSLContext:
    network = plan.network
    try:
        if network.cacert is not None and not network.insecure:
            return ssl.create_default_context(cafile=network.cacert)
        return httpx.create_ssl_context(verify=not network.insecure, trust_env=False)
    except OSError as error:
        raise UsageError(f"--cacert {network.cacert}: {error.strerror or error}", "certificates in PEM form") from None


# --- names, connections, certificates ------------------------------------------------------------------------------


async def _dial(found: Visit, context: ssl.SSLContext) -> None:
    loop = asyncio.get_running_loop()
    try:
        answers = await asyncio.wait_for(loop.getaddrinfo(found.host, found.port, type=socket.SOCK_STREAM), STEP_S)
    except TimeoutError:
        found.name_problem = f"no answer within {STEP_S:g} s"
        return
    except OSError as error:
        found.name_problem = error.strerror or str(error)
        return
    found.addresses = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
    await asyncio.gather(*(_connect(found, address) for address in found.addresses[:8]))
    if found.is_tls and found.dials:
        await _handshake(found, context)


async def _connect(found: Visit, address: str) -> None:
    """A few connections, one after another: the quickest is the round trip."""
    times: list[float] = []
    for _ in range(DIALS):
        begin = time.monotonic()
        try:
            async with asyncio.timeout(STEP_S):
                _, writer = await asyncio.open_connection(address, found.port)
        except TimeoutError:
            found.dial_problems[address] = f"no connection within {STEP_S:g} s"
            return
        except OSError as error:
            found.dial_problems[address] = "refused" if isinstance(error, ConnectionRefusedError) else str(error)
            return
        times.append(time.monotonic() - begin)
        await _close(writer)
    found.dials[address] = times


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), 1.0)


async def _handshake(found: Visit, context: ssl.SSLContext) -> None:
    address = next(iter(found.dials))
    try:
        async with asyncio.timeout(STEP_S):
            _, writer = await asyncio.open_connection(address, found.port, ssl=context, server_hostname=found.host)
    except TimeoutError:
        found.tls_problem = f"no TLS handshake within {STEP_S:g} s: does the port speak http rather than https?"
    except (ssl.SSLError, OSError) as error:
        found.tls_problem = str(refusals.unreachable(found.plan.target.url, error))
    else:
        session = writer.get_extra_info("ssl_object")
        certificate = session.getpeercert() or {}
        expires = certificate.get("notAfter")
        found.tls = {
            "version": session.version(),
            "expires_s": ssl.cert_time_to_seconds(expires) if expires else None,
            "seen_s": time.time(),
        }
        await _close(writer)


# --- HTTP ----------------------------------------------------------------------------------------------------------


def _http(found: Visit, context: ssl.SSLContext) -> httpx.AsyncClient:
    network, secrets = found.plan.network, found.secrets
    user, _, password = (secrets.proxy_auth or "").partition(":")
    proxy = httpx.Proxy(network.proxy, auth=(user, password) if user else None) if network.proxy else None
    return httpx.AsyncClient(
        headers={"accept-encoding": "identity", "user-agent": "lpxtop"}, verify=context, proxy=proxy, trust_env=False,
        follow_redirects=False, timeout=httpx.Timeout(STEP_S),
    )  # fmt: skip


async def _list(found: Visit, http: httpx.AsyncClient) -> None:
    """/models with the key, and without where there is one: is the key needed at all?"""
    url = f"{found.plan.target.url}/models"
    begin, sent = time.time(), time.monotonic()
    try:
        response = await http.get(url, headers=keyed(found.secrets))
    except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as error:
        found.models_problem = str(refusals.unreachable(found.plan.target.url, error))
        return
    half = (time.monotonic() - sent) / 2
    _read_date(found, response, begin + half, half)
    found.models_status = response.status_code
    found.models = _models(response.content) if response.status_code == 200 else []
    if not found.models:
        found.models_problem = scrubbed(error_text(response.content)[1], found.secrets, 120)
    if keyed(found.secrets):
        with contextlib.suppress(httpx.HTTPError):
            found.keyless_status = (await http.get(url)).status_code


def _models(body: bytes) -> list[dict[str, Any]]:
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    rows = data.get("data") if isinstance(data, dict) else data
    return (
        [row for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)]
        if isinstance(rows, list)
        else []
    )


def _read_date(found: Visit, response: httpx.Response, at_s: float, half_s: float) -> None:
    """The server's clock by its Date header, which has whole seconds; a cache's old answer says nothing."""
    date = email.utils.parsedate_tz(response.headers.get("date", ""))
    if date is not None and "age" not in response.headers:
        found.server_date_s = email.utils.mktime_tz(date) + 0.5
        found.local_date_s, found.date_error_s = at_s, half_s + 0.5


async def _ask_health(found: Visit, http: httpx.AsyncClient) -> None:
    """What liveness probes ask."""
    root = found.plan.target.url.removesuffix("/v1")
    for path in ("/health", "/v1/health/live", "/v1/health/ready"):
        found.health[path] = None
        with contextlib.suppress(httpx.HTTPError):
            found.health[path] = (await http.get(root + path, headers=keyed(found.secrets))).status_code


async def _scrape(found: Visit, context: ssl.SSLContext) -> None:
    table = concepts.load(None)
    scraper = Scraper(found.secrets.api_key, found.plan.target.url, context)
    own, _ = scrape.candidates(found.plan.target.url)
    try:
        for url in own:
            try:
                parser = Parser(Keep(table))
                parser.parse(await scraper.get(url))
            except scrape.NoMetrics as problem:
                found.metrics.problem = found.metrics.problem or str(problem)
                continue
            if parser.names:
                found.metrics = Metrics(scrape.shown(url), table.detect(parser.names))
                return
    finally:
        await scraper.close()


async def _negotiate(found: Visit) -> None:
    """Model and request shape, by the same pre-flight as a run's; a server that loads is not waited for."""
    plan = msgspec.structs.replace(
        found.plan,
        limits=Limits(connect_s=STEP_S, first_token_s=ANSWER_S),
        sampling=msgspec.structs.replace(found.plan.sampling, ignore_eos=False, stream=True),
        prompts=msgspec.structs.replace(found.plan.prompts, tokens=64, path=None),
    )
    try:
        async with asyncio.timeout(2 * ANSWER_S):
            done = await preflight(plan, found.secrets, wait_s=0)
    except TimeoutError:
        found.refusal = (f"no answer to a short prompt within {2 * ANSWER_S:g} s", "is the engine stuck or overloaded?")
    except TargetError as error:
        # the pre-flight's patience was set to none: its "after 0 s" means nothing here
        found.refusal = (str(error).replace("still not ready after 0 s", "not ready"), error.hint)
    except LpxtopError as error:
        found.refusal = (str(error), error.hint)
    else:
        found.negotiated, found.model, found.notes = done.negotiated, done.model, done.notes
