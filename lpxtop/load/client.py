"""One request at a time to one `finished` record: sends it, follows its answer as it arrives, says how it ended.

A fault of the server is a record, never an exception. Must not decide when requests are due or write events.
"""

import asyncio
import contextlib
import itertools
import re
import ssl
import statistics
import time
from urllib.parse import urlsplit

import httpx
import msgspec

from lpxtop.clock import session_us
from lpxtop.events.buckets import bucket
from lpxtop.events.records import TICK_US, Arrivals, Finished, Request
from lpxtop.format import clean
from lpxtop.load import answers
from lpxtop.load.connection import Timing
from lpxtop.load.transport import KernelTransport
from lpxtop.plan import Limits, Negotiated, Plan, Secrets

WATCH_EVERY_S = 0.25
STALL_LEAST_S = 30.0
STALL_GAPS = 20
_TICK_NS = TICK_US * 1000
_HALF_TICK_NS = _TICK_NS // 2
_DELAY_BUCKETS = tuple(bucket(delay) for delay in range(4096))
_SECRETS = re.compile(r"(?i)\b(bearer\s+)\S+|\bsk-[A-Za-z0-9_-]{8,}")
_mono = time.monotonic_ns


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is due. `slot` is its short number in `arrivals`, `request_id` goes out as X-Request-Id."""

    id: int
    slot: int
    due_ns: int
    body: bytes
    request_id: str
    warmup: bool = False
    prompt_tokens: int | None = None
    max_tokens: int | None = None


class Health(msgspec.Struct):
    """What reading cost in one frame. `read_delay_us` are log buckets of kernel stamp to reader, of stamped reads."""

    reads: int = 0
    events: int = 0
    coalesced: int = 0
    user_stamps: int = 0
    read_delay_us: dict[int, int] = {}
    timestamp_source: str | None = None


class ArrivalsFrame:
    """Gathers the columns of one `arrivals` event from the streams."""

    def __init__(self) -> None:
        self.slot: list[int] = []
        self.n: list[int] = []
        self.gap: list[int] = []
        self.tokens: list[tuple[int, int]] = []
        self.same: list[int] = []
        self.reasoning: list[int] = []

    def event(self, t: int, src: str, seq: int) -> Arrivals:
        return Arrivals(
            t=t, src=src, seq=seq, slot=self.slot, n=self.n, gap=self.gap,
            tokens=self.tokens, same=self.same, reasoning=self.reasoning,
        )  # fmt: skip


class Stream:
    """The live facts of one request: the sink of its exchange, and what the runner reads at each frame."""

    def __init__(self, spec: RequestSpec, client: "Client") -> None:
        self.spec = spec
        self.sent_ns: int | None = None
        self.timing: Timing | None = None
        self.forced: str | None = None  # cut, cancelled, stall, timeout: we ended it
        self.answer = answers.Answer(streamed=client.streamed)
        self._client, self._health = client, client.health
        self.task: asyncio.Task[object] | None = None
        self._read_ns = 0  # user stamp of the read that brought the last chunk
        self._tick = 0
        self._gaps: list[int] = []
        self._tokens: list[tuple[int, int]] = []
        self._same: list[int] = []
        self._reasoning = False
        self._recent_ns: list[int] = []  # gaps of the first chunks, for the stall limit

    # --- the sink ----------------------------------------------------------------------------------------------

    def sent(self, sent_ns: int, timing: Timing) -> None:
        self.sent_ns, self.timing = sent_ns, timing

    def head(self, status: int, headers: list[tuple[bytes, bytes]], kernel_ns: int, user_ns: int) -> None:
        self.answer.head(status, headers, kernel_ns)

    def body(self, data: bytes, kernel_ns: int, user_ns: int) -> None:
        health = self._health
        health.reads += 1
        if kernel_ns == user_ns:
            health.user_stamps += 1
            self.answer.user_stamps += 1
        else:
            delay = (user_ns - kernel_ns) // 1000
            index = _DELAY_BUCKETS[delay] if delay < 4096 else bucket(delay)
            health.read_delay_us[index] = health.read_delay_us.get(index, 0) + 1
        for tokens in self.answer.feed(data, kernel_ns):
            self._arrived(tokens, kernel_ns, user_ns)

    def end(self, error: Exception | None, user_ns: int) -> None:
        """The rest of the stream was held back until now: an event without its last blank line still counts."""
        if error is None:
            for tokens in self.answer.end():
                self._arrived(tokens, self.answer.last_read_ns or user_ns, user_ns)
        self.answer.ended_ns = user_ns

    def _arrived(self, tokens: int, kernel_ns: int, user_ns: int) -> None:
        """A token-bearing chunk is complete. `tokens` is what the payload itself said, 1 when it said nothing."""
        answer = self.answer
        if self.sent_ns is None:
            return
        tick = (kernel_ns - self.sent_ns + _HALF_TICK_NS) // _TICK_NS
        if answer.chunks > 1 and user_ns == self._read_ns:
            self._same.append(len(self._gaps))
            self._health.coalesced += 1
            answer.coalesced += 1
        elif len(self._recent_ns) < 16:
            self._recent_ns.append(kernel_ns)
        if tokens != 1:
            self._tokens.append((len(self._gaps), tokens))
        self._gaps.append(tick - self._tick)
        self._tick = tick
        self._read_ns = user_ns
        self._reasoning = answer.in_reasoning
        self._health.events += 1

    # --- the runner's side -------------------------------------------------------------------------------------

    def request_event(self) -> Request:
        """The request's line, timed when it was sent (now, while it is not); to be repeated once it is sent."""
        spec, timing, client = self.spec, self.timing, self._client
        return Request(
            t=session_us(self.sent_ns or _mono(), client.origin_ns),
            src=client.src, id=spec.id, slot=spec.slot,
            due=session_us(spec.due_ns, client.origin_ns),
            sent=None if self.sent_ns is None else session_us(self.sent_ns, client.origin_ns),
            warmup=spec.warmup,
            connection=timing.connection if timing else None,
            connect_us=timing.connect_us if timing else None,
            tls_us=timing.tls_us if timing else None,
            prompt_tokens=spec.prompt_tokens, max_tokens=spec.max_tokens,
        )  # fmt: skip

    def take_arrivals(self, frame: ArrivalsFrame) -> None:
        """Move the chunks since the last call into the frame."""
        if not self._gaps:
            return
        base = len(frame.gap)
        frame.slot.append(self.spec.slot)
        frame.n.append(len(self._gaps))
        frame.gap += self._gaps
        self._gaps = []
        if self._tokens:
            frame.tokens += [(base + index, tokens) for index, tokens in self._tokens]
            self._tokens = []
        if self._same:
            frame.same += [base + index for index in self._same]
            self._same = []
        if self._reasoning:
            frame.reasoning.append(self.spec.slot)

    def cut(self, outcome: str) -> None:
        """End it now, from our side: `cut` (the window ended) or `cancelled`."""
        if self.forced is None and self.answer.ended_ns is None:
            self.forced = outcome
            if self.task is not None:
                self.task.cancel()

    # --- time-outs ---------------------------------------------------------------------------------------------

    def overdue(self, now_ns: int, limits: Limits) -> str | None:
        """`timeout` or `stall` when a limit has passed. Comments and empty deltas do not count as progress."""
        if self.sent_ns is None:
            return None
        if limits.total_s is not None and now_ns - self.sent_ns > limits.total_s * 1e9:
            return "timeout"
        last = self.answer.last_token_ns
        if last is None:
            return "timeout" if now_ns - self.sent_ns > limits.first_token_s * 1e9 else None
        return "stall" if now_ns - last > self._stall_ns(limits) else None

    def _stall_ns(self, limits: Limits) -> float:
        if limits.stall_s is not None:
            return limits.stall_s * 1e9
        times = self._recent_ns
        median = statistics.median(b - a for a, b in itertools.pairwise(times)) if len(times) > 2 else 0
        return max(STALL_LEAST_S * 1e9, STALL_GAPS * median)


class Client:
    """Sends requests to one endpoint. `health` gathers the current frame; `take_health` hands it over."""

    def __init__(self, *, plan: Plan, negotiated: Negotiated, secrets: Secrets, origin_ns: int, src: str) -> None:
        self.src, self.origin_ns = src, origin_ns
        self.streamed = plan.sampling.stream
        self.health = Health()
        self.dns_us: int | None = None
        self._plan, self._secrets = plan, secrets
        path = "completions" if plan.target.api == "completions" else "chat/completions"
        self._url = httpx.URL(f"{plan.target.url}/{path}")
        self._headers = _request_headers(secrets)
        self._transport: KernelTransport | None = None
        self._proxied: httpx.AsyncClient | None = None
        self._open: set[Stream] = set()
        self._watchdog: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Build the TLS context, look the name up (a failure shows in each request's own record), arm the watchdog."""
        network = self._plan.network
        tls = self._url.scheme == "https"
        context = _ssl_context(network.cacert, insecure=network.insecure) if tls or network.proxy else None
        if network.proxy:
            self._proxied = httpx.AsyncClient(  # noqa: S113 - the watchdog holds the limits
                proxy=network.proxy, trust_env=False, verify=context or True, timeout=None,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=1.0),
            )  # fmt: skip
        else:
            self._transport = KernelTransport(context)
            parts = urlsplit(str(self._url))
            port = parts.port or (443 if tls else 80)
            with contextlib.suppress(httpx.ConnectError):
                self.dns_us = await self._transport.resolve(parts.hostname or "", port)
        self._watchdog = asyncio.create_task(self._watch())

    async def aclose(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._transport is not None:
            await self._transport.aclose()
        if self._proxied is not None:
            await self._proxied.aclose()

    def take_health(self) -> Health:
        """The frame's figures; the next frame starts from nothing."""
        health = self.health
        taken = msgspec.structs.replace(health)
        taken.timestamp_source = self.timestamp_source
        health.reads = health.events = health.coalesced = health.user_stamps = 0
        health.read_delay_us = {}
        return taken

    @property
    def timestamp_source(self) -> str | None:
        """`kernel` or `user`; None before the first connection."""
        if self._transport is None:
            return "user"
        stats = self._transport.stats
        return None if not stats.new else "kernel" if stats.kernel else "user"

    @property
    def stale_connections(self) -> int:
        return self._transport.stats.stale if self._transport else 0

    async def send(self, stream: Stream) -> Finished:
        """Send it and follow it to its end. Never raises for what a server or a network does."""
        if stream.forced is not None:
            return self._finished(stream, None, (None, None))
        stream.task = asyncio.current_task()
        self._open.add(stream)
        error: Exception | None = None
        rtt: tuple[int | None, int | None] = (None, None)
        try:
            rtt = await self._exchange(stream)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if stream.forced is None or task is None:
                raise
            task.uncancel()
        except (httpx.HTTPError, OSError, ssl.SSLError) as caught:
            error = caught
        except Exception as caught:  # a fault of ours in one answer must not end the run
            error = caught
            stream.answer.flag("client_fault")
        finally:
            stream.task = None
            self._open.discard(stream)
        return self._finished(stream, error, rtt)

    async def _exchange(self, stream: Stream) -> tuple[int | None, int | None]:
        headers = [*self._headers, (b"x-request-id", stream.spec.request_id.encode())]
        timeout = {"connect": self._plan.limits.connect_s, "read": None, "write": None, "pool": None}
        request = httpx.Request(
            "POST", self._url, headers=headers, content=stream.spec.body,
            extensions={"sink": stream, "timeout": timeout},
        )  # fmt: skip
        if self._transport is not None:
            response = await self._transport.handle_async_request(request)
            rtt: tuple[int | None, int | None] = response.extensions["rtt_us"]
            return rtt
        await self._through_proxy(request, stream)
        return None, None

    async def _through_proxy(self, request: httpx.Request, stream: Stream) -> None:
        """Stock httpx: stamps are taken when the bytes reach this loop, and are counted as user-space ones."""
        assert self._proxied is not None
        stream.sent(_mono(), Timing())
        response = await self._proxied.send(request, stream=True, follow_redirects=False)
        try:
            now = _mono()
            stream.head(response.status_code, list(response.headers.raw), now, now)
            async for data in response.aiter_raw():
                now = _mono()
                stream.body(data, now, now)
            stream.end(None, _mono())
        finally:
            await response.aclose()

    async def _watch(self) -> None:
        """One timer for all streams: a limit that passed ends the stream with its outcome."""
        limits = self._plan.limits
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            now = _mono()
            for stream in list(self._open):
                outcome = stream.overdue(now, limits)
                if outcome is not None:
                    stream.cut(outcome)

    # --- the record --------------------------------------------------------------------------------------------

    def _finished(self, stream: Stream, error: Exception | None, rtt: tuple[int | None, int | None]) -> Finished:
        spec, answer, timing = stream.spec, stream.answer, stream.timing
        end_ns = answer.ended_ns if answer.ended_ns is not None else _mono()
        verdict = answers.judge(answer, error, stream.forced)
        counts = answer.counts(spec.max_tokens)
        dns_us, self.dns_us = self.dns_us, None  # the look-up belongs to the first request
        return Finished(
            t=session_us(end_ns, self.origin_ns), src=self.src, id=spec.id, slot=spec.slot,
            due=session_us(spec.due_ns, self.origin_ns),
            sent=None if stream.sent_ns is None else session_us(stream.sent_ns, self.origin_ns),
            outcome=verdict.outcome, warmup=spec.warmup, status=answer.status or None,
            finish_reason=answer.finish_reason,
            first_byte_us=_since(stream.sent_ns, answer.first_byte_ns),
            first_event_us=_since(stream.sent_ns, answer.first_event_ns),
            first_token_us=_since(stream.sent_ns, answer.first_token_ns),
            first_reasoning_us=_since(stream.sent_ns, answer.first_reasoning_ns),
            first_content_us=_since(stream.sent_ns, answer.first_content_ns),
            last_token_us=_since(stream.sent_ns, answer.last_token_ns),
            end_us=_since(stream.sent_ns, end_ns),
            chunks=answer.chunks, first_chunk_tokens=counts.first_chunk,
            input_tokens=answer.input_tokens, output_tokens=counts.output,
            reasoning_tokens=answer.reasoning_tokens, cached_tokens=answer.cached_tokens,
            token_source=counts.source,
            connection=timing.connection if timing else None,
            dns_us=timing.dns_us if timing and timing.dns_us is not None else dns_us,
            connect_us=timing.connect_us if timing else None, tls_us=timing.tls_us if timing else None,
            rtt_us=rtt[0], rtt_min_us=rtt[1], max_tokens=spec.max_tokens,
            coalesced=answer.coalesced, user_stamps=answer.user_stamps,
            attempts=timing.attempts if timing else 1,
            request_id=spec.request_id, server_request_id=answer.server_request_id,
            rate_limit=answer.rate_limit, server_timings=answer.timings,
            flags=[*answer.flags, *counts.flags, *(["stale_connection"] if timing and timing.attempts > 1 else [])],
            error_type=verdict.error_type, error=self._scrubbed(verdict.error),
        )  # fmt: skip

    def _scrubbed(self, text: str | None) -> str | None:
        """A server's words without anything secret it may have echoed."""
        if text is None:
            return None
        for secret in (self._secrets.api_key, *self._secrets.headers.values()):
            if secret:
                text = text.replace(secret, "…")
        return clean(_SECRETS.sub(lambda match: (match.group(1) or "") + "…", text))


def _since(sent_ns: int | None, at_ns: int | None) -> int | None:
    return None if sent_ns is None or at_ns is None else (at_ns - sent_ns) // 1000


def _request_headers(secrets: Secrets) -> list[tuple[bytes, bytes]]:
    headers = {
        "accept": "*/*",
        "accept-encoding": "identity",
        "content-type": "application/json",
        "user-agent": "lpxtop",
    }
    if secrets.api_key:
        headers["authorization"] = f"Bearer {secrets.api_key}"
    headers |= {name.lower(): value for name, value in secrets.headers.items()}
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _ssl_context(cacert: str | None, *, insecure: bool) -> ssl.SSLContext:
    if insecure:
        return httpx.create_ssl_context(verify=False, trust_env=False)
    if cacert is not None:
        return ssl.create_default_context(cafile=cacert)
    return httpx.create_ssl_context(trust_env=False)
