"""One request at a time to one `finished` record: sends it, follows its answer as it arrives, says how it ended.

A fault of the server is a record, never an exception. Must not decide when requests are due or write events.
"""

import asyncio
import contextlib
import ssl
import time

import httpx
import msgspec

from lpxtop.clock import session_us
from lpxtop.errors import UsageError
from lpxtop.events.records import Finished
from lpxtop.load.connection import require_reader
from lpxtop.load.exchange import Timing
from lpxtop.load.outcomes import judge
from lpxtop.load.proxied import ProxiedTransport
from lpxtop.load.scrub import scrubbed
from lpxtop.load.stream import ArrivalsFrame, Health, RequestSpec, Stream
from lpxtop.load.transport import KernelTransport
from lpxtop.plan import Negotiated, Network, Plan, Secrets

__all__ = ["ArrivalsFrame", "Client", "Health", "RequestSpec", "Stream"]

WATCH_EVERY_S = 0.25
_UNTIMED = Timing()
_mono = time.monotonic_ns


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
        self._transport: KernelTransport | ProxiedTransport | None = None
        self._open: set[Stream] = set()
        self._watchdog: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Build the TLS context, look the name up (a failure shows in each request's own record), arm the watchdog.

        Raises UsageError for an unreadable certificate file, an unusable proxy or an unusable event loop.
        """
        network = self._plan.network
        tls = self._url.scheme == "https"
        context = _ssl_context(network) if tls or network.proxy else None
        if network.proxy and context is not None:
            self._transport = ProxiedTransport(network.proxy, self._secrets.proxy_auth, context)
        else:
            require_reader(asyncio.get_running_loop())
            transport = self._transport = KernelTransport(context)
            with contextlib.suppress(httpx.ConnectError, TimeoutError):
                async with asyncio.timeout(self._plan.limits.connect_s):
                    self.dns_us = await transport.resolve_url(self._url)
        self._watchdog = asyncio.create_task(self._watch())

    async def aclose(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._transport is not None:
            await self._transport.aclose()

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
        return self._transport.stats.timestamp_source if self._transport else None

    @property
    def stale_connections(self) -> int:
        """How often a kept connection turned out to be dead, and the request went out again on a fresh one."""
        return self._transport.stats.stale if self._transport else 0

    async def send(self, stream: Stream) -> Finished:
        """Send it and follow it to its end. Never raises for what a server or a network does."""
        if stream.forced is not None:
            return self._finished(stream, None, (None, None))
        task = stream.task = asyncio.current_task()
        self._open.add(stream)
        error: Exception | None = None
        rtt: tuple[int | None, int | None] = (None, None)
        try:
            rtt = await self._exchange(stream)
        except asyncio.CancelledError:
            if stream.forced is None or task is None or task.uncancel() > 0:
                raise  # somebody else wants this task to end
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
        assert self._transport is not None
        limits = self._plan.limits
        request = httpx.Request(
            "POST", self._url, headers=[*self._headers, (b"x-request-id", stream.spec.request_id.encode())],
            content=stream.spec.body,
            extensions={
                "sink": stream,
                # silence while reading is the watchdog's business: it knows tokens from comments
                "timeout": {"connect": limits.connect_s, "read": None, "write": limits.first_token_s, "pool": None},
            },
        )  # fmt: skip
        response = await self._transport.handle_async_request(request)
        rtt: tuple[int | None, int | None] = response.extensions["rtt_us"]
        return rtt

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
        spec, answer, timing = stream.spec, stream.answer, stream.timing or _UNTIMED
        end_ns = answer.ended_ns if answer.ended_ns is not None else _mono()
        verdict = judge(answer, error, stream.forced)
        counts = answer.counts(spec.max_tokens)
        dns_us, self.dns_us = self.dns_us, None  # the look-up belongs to the first request
        sent_ns = stream.sent_ns
        return Finished(
            t=session_us(end_ns, self.origin_ns), src=self.src, id=spec.id, slot=spec.slot,
            due=session_us(spec.due_ns, self.origin_ns),
            sent=None if sent_ns is None else session_us(sent_ns, self.origin_ns),
            outcome=verdict.outcome, warmup=spec.warmup, status=answer.status or None,
            finish_reason=answer.finish_reason,
            first_byte_us=_since(sent_ns, answer.first_byte_ns),
            first_event_us=_since(sent_ns, answer.first_event_ns),
            first_token_us=_since(sent_ns, answer.first_token_ns),
            first_reasoning_us=_since(sent_ns, answer.first_reasoning_ns),
            first_content_us=_since(sent_ns, answer.first_content_ns),
            last_token_us=_since(sent_ns, answer.last_token_ns),
            end_us=_since(sent_ns, end_ns),
            chunks=answer.chunks, first_chunk_tokens=counts.first_chunk,
            input_tokens=answer.input_tokens, output_tokens=counts.output,
            reasoning_tokens=answer.reasoning_tokens, cached_tokens=answer.cached_tokens,
            token_source=counts.source,
            connection=timing.connection if stream.timing else None,
            dns_us=timing.dns_us if timing.dns_us is not None else dns_us,
            connect_us=timing.connect_us, tls_us=timing.tls_us,
            rtt_us=rtt[0], rtt_min_us=rtt[1], max_tokens=spec.max_tokens,
            coalesced=answer.coalesced, user_stamps=answer.user_stamps, attempts=timing.attempts,
            request_id=spec.request_id, server_request_id=answer.server_request_id,
            rate_limit=answer.rate_limit, server_timings=answer.timings,
            flags=[*answer.flags, *counts.flags, *_flags_of(timing)],
            error_type=None if verdict.error_type is None else scrubbed(verdict.error_type, self._secrets, 60),
            error=None if verdict.error is None else scrubbed(verdict.error, self._secrets),
        )  # fmt: skip


def _since(sent_ns: int | None, at_ns: int | None) -> int | None:
    return None if sent_ns is None or at_ns is None else (at_ns - sent_ns) // 1000


def _flags_of(timing: Timing) -> list[str]:
    return ["stale_connection"] * (timing.attempts > 1) + ["lenient_http"] * timing.lenient


def _request_headers(secrets: Secrets) -> list[tuple[bytes, bytes]]:
    """Ours, then the user's, which win; a key from a file may end with a line break. Raises UsageError."""
    headers = {
        "accept": "*/*",
        "accept-encoding": "identity",
        "content-type": "application/json",
        "user-agent": "lpxtop",
    }
    if secrets.api_key and secrets.api_key.strip():
        headers["authorization"] = f"Bearer {secrets.api_key.strip()}"
    headers |= {name.lower().strip(): value.strip() for name, value in secrets.headers.items()}
    headers.pop("x-request-id", None)  # each request has its own
    for name, value in headers.items():
        if not name or any(character in name + value for character in "\r\n\0"):
            raise UsageError(f"the header {name!r} cannot be sent: line breaks are not allowed in it")
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _ssl_context(network: Network) -> ssl.SSLContext:
    if network.insecure:
        return httpx.create_ssl_context(verify=False, trust_env=False)
    if network.cacert is None:
        return httpx.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=network.cacert)
    except OSError as error:
        what = "holds no certificate" if isinstance(error, ssl.SSLError) else error.strerror
        raise UsageError(f"--cacert {network.cacert}: {what}", "it wants a PEM file of certificates") from None
