"""Requests through a proxy: stock httpx, with the same sink as the kernel transport, and user-space stamps throughout.

Stamps are taken when bytes reach this loop's turn, so they carry its lateness; every one counts as a user stamp.
"""

import ssl
import time
from typing import Any

import httpx

from lpxtop.errors import UsageError
from lpxtop.load.connection import Stats
from lpxtop.load.exchange import Sink, Timing
from lpxtop.load.transport import IDLE_S

_mono = time.monotonic_ns


class ProxiedTransport(httpx.AsyncBaseTransport):
    """Requests need `extensions["sink"]`. Through a CONNECT tunnel `sent` is told twice; the last one holds."""

    def __init__(self, proxy: str, auth: str | None, ssl_context: ssl.SSLContext) -> None:
        user, _, password = (auth or "").partition(":")
        try:
            given = httpx.Proxy(proxy, auth=(user, password) if user else None)
        except (ValueError, httpx.InvalidURL) as error:
            raise UsageError(f"the proxy cannot be used: {error}", "--proxy http://host:port") from None
        self.stats = Stats(kernel=False)
        self._inner = httpx.AsyncHTTPTransport(
            proxy=given, verify=ssl_context, trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_S),
        )  # fmt: skip

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        sink: Sink = request.extensions["sink"]
        steps = _Steps(sink, self.stats)
        inner = httpx.Request(
            request.method, request.url, headers=request.headers, stream=request.stream,
            extensions={"trace": steps.trace, "timeout": request.extensions.get("timeout", {})},
        )  # fmt: skip
        response = await self._inner.handle_async_request(inner)
        try:
            now = _mono()
            sink.head(response.status_code, list(response.headers.raw), now, now)
            async for data in response.stream:  # type: ignore[union-attr]
                now = _mono()
                self.stats.reads += 1
                self.stats.user_stamps += 1
                sink.body(data, now, now)
            sink.end(None, _mono())
        except httpx.HTTPError as error:
            sink.end(error, _mono())
            raise
        finally:
            await response.aclose()
        return httpx.Response(response.status_code, extensions={"timing": steps.timing, "rtt_us": (None, None)})

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Steps:
    """Follows httpcore's trace of one request: when it was sent, and how its connection came about."""

    def __init__(self, sink: Sink, stats: Stats) -> None:
        self._sink, self._stats = sink, stats
        self._began = 0
        self._fresh = False
        self.timing = Timing(connection="reused")

    async def trace(self, name: str, info: dict[str, Any]) -> None:
        step = name.partition(".")[2]
        if step.endswith(".started"):
            self._began = _mono()
        elif step == "connect_tcp.complete":
            self._fresh = True
            self.timing.connection, self.timing.connect_us = "new", self._took()
        elif step == "start_tls.complete":
            self.timing.tls_us = self._took()
        elif step == "send_request_body.complete":
            self._count()
            self._sink.sent(self._began, self.timing)

    def _took(self) -> int:
        return (_mono() - self._began) // 1000

    def _count(self) -> None:
        self._stats.new += self._fresh
        self._stats.reused += not self._fresh
        self._fresh = False
