"""An httpx transport that owns its sockets: httpx builds the request, this reads the answer with kernel stamps.

A request whose `extensions["sink"]` is set has its answer handed to that sink as it arrives; without one it behaves
as any transport. HTTP/1.1 only, one exchange per connection at a time, no hidden cap on connections, no retries
except one after a stale reused connection. Must not know what an answer means.
"""

import asyncio
import os
import socket
import ssl
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import aiohappyeyeballs
import httpx

from lpxtop.load import stamps
from lpxtop.load.connection import Connection, Exchange, StaleConnection, Stats, Timing

IDLE_S = 1.0
"""A kept connection is reused within this time only: servers close idle ones after 2–5 s."""
OFFSET_EVERY_S = 0.25
HAPPY_EYEBALLS_DELAY_S = 0.25
_PORTS = {"http": 80, "https": 443}
_mono = time.monotonic_ns

Key = tuple[str, str, int]


class KernelTransport(httpx.AsyncBaseTransport):
    """See the module. `stats` counts; `close` is `aclose`. Needs an event loop with `add_reader`."""

    def __init__(self, ssl_context: ssl.SSLContext | None = None, *, offset: stamps.ClockOffset | None = None) -> None:
        self._ssl_context = ssl_context
        if ssl_context is not None:
            ssl_context.set_alpn_protocols(["http/1.1"])
        self._offset = offset or stamps.ClockOffset()
        self._idle: defaultdict[Key, list[Connection]] = defaultdict(list)
        self._all: set[Connection] = set()
        self._names: dict[tuple[str, int], list[Any]] = {}
        self._offset_timer: asyncio.TimerHandle | None = None
        self.stats = Stats()

    @property
    def clock_steps(self) -> int:
        """How often the wall clock was stepped since the start."""
        return self._offset.steps

    # --- httpx's side ------------------------------------------------------------------------------------------

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request; returns when the answer's head is there (with a sink: when the answer is complete)."""
        body = b"".join([part async for part in request.stream])  # type: ignore[union-attr]
        timing = Timing()
        try:
            return await self._attempt(request, body, timing)
        except StaleConnection:
            self.stats.stale += 1
            fresh = Timing(attempts=2)
            return await self._attempt(request, body, fresh, reuse=False)

    async def _attempt(
        self, request: httpx.Request, body: bytes, timing: Timing, *, reuse: bool = True
    ) -> httpx.Response:
        connection = (self._take_idle(request.url) if reuse else None) or await self._connect(request, timing)
        timing.connection = "reused" if connection.uses else "new"
        connection.uses += 1
        given = request.extensions.get("sink")
        sink = given if given is not None else _Collector()
        exchange = Exchange(connection, sink, timing, head_only=request.method == "HEAD")
        connection.exchange = exchange
        try:
            connection.write(_head(request) + body)
            await _bounded(exchange.done, _timeout(request, "read") if given is None else None, httpx.ReadTimeout)
        except BaseException:
            connection.exchange = None
            connection.close()
            raise
        extensions: dict[str, Any] = {"timing": timing, "http_version": b"HTTP/1.1"}
        extensions["rtt_us"] = connection.round_trip_us()
        self._release(request.url, connection, reusable=exchange.reusable)
        if isinstance(sink, _Collector):
            return httpx.Response(
                exchange.status, headers=sink.headers, stream=_Whole(sink.parts), extensions=extensions
            )
        return httpx.Response(exchange.status, extensions=extensions)

    async def aclose(self) -> None:
        if self._offset_timer is not None:
            self._offset_timer.cancel()
        for connection in list(self._all):
            connection.close()

    # --- connections -------------------------------------------------------------------------------------------

    async def resolve(self, host: str, port: int) -> int | None:
        """Look a name up, once per run, off the loop. Returns the µs it took; None when it was known."""
        if (host, port) in self._names:
            return None
        begin = _mono()
        loop = asyncio.get_running_loop()
        try:
            self._names[host, port] = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError) as error:
            raise httpx.ConnectError(f"the name {host} cannot be resolved: {error}") from error
        return (_mono() - begin) // 1000

    def _take_idle(self, url: httpx.URL) -> Connection | None:
        waiting = self._idle[_key(url)]
        while waiting:
            connection = waiting.pop()
            if connection.idle_timer is not None:
                connection.idle_timer.cancel()
            if connection.open:
                self.stats.reused += 1
                return connection
        return None

    def _release(self, url: httpx.URL, connection: Connection, *, reusable: bool) -> None:
        if not connection.open:
            return
        if not reusable or connection.unsent:
            connection.close()
            return
        loop = asyncio.get_running_loop()
        connection.idle_timer = loop.call_later(IDLE_S, connection.close)
        self._idle[_key(url)].append(connection)

    def _forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        for waiting in self._idle.values():
            if connection in waiting:
                waiting.remove(connection)

    async def _connect(self, request: httpx.Request, timing: Timing) -> Connection:
        limit = _timeout(request, "connect")
        try:
            async with asyncio.timeout(limit):
                connection = await self._dial(request.url, timing)
        except TimeoutError:
            raise httpx.ConnectTimeout(f"no connection within {limit:g} s") from None
        self.stats.new += 1
        self._all.add(connection)
        connection.on_close = self._forget
        return connection

    async def _dial(self, url: httpx.URL, timing: Timing) -> Connection:
        _scheme, host, port = _key(url)
        timing.dns_us = await self.resolve(host, port)
        begin = _mono()
        try:
            sock = await aiohappyeyeballs.start_connection(
                self._names[host, port], happy_eyeballs_delay=HAPPY_EYEBALLS_DELAY_S
            )
        except OSError as error:
            raise httpx.ConnectError(_plain_reason(error)) from error
        timing.connect_us = (_mono() - begin) // 1000
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not stamps.enable(sock):
            self.stats.kernel = False
        self._keep_offset_fresh()
        loop = asyncio.get_running_loop()
        if url.scheme != "https":
            return Connection(loop, sock, offset=self._offset, stats=self.stats)
        begin = _mono()
        tls, incoming, outgoing = await self._handshake(sock, host)
        timing.tls_us, timing.alpn = (_mono() - begin) // 1000, tls.selected_alpn_protocol()
        return Connection(
            loop, sock, offset=self._offset, stats=self.stats, tls=tls, incoming=incoming, outgoing=outgoing
        )

    async def _handshake(self, sock: socket.socket, host: str) -> tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
        loop = asyncio.get_running_loop()
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = self._ssl_context or httpx.create_ssl_context()
        tls = context.wrap_bio(incoming, outgoing, server_hostname=host)
        try:
            while True:
                try:
                    tls.do_handshake()
                except ssl.SSLWantReadError:
                    await _send_pending(loop, sock, outgoing)
                    data = await loop.sock_recv(sock, 1 << 16)
                    if not data:
                        raise httpx.ConnectError("the server closed the connection in the TLS handshake") from None
                    incoming.write(data)
                else:
                    break
            await _send_pending(loop, sock, outgoing)
        except ssl.SSLError as error:
            _send_alert(sock, outgoing)
            sock.close()
            raise httpx.ConnectError(f"TLS: {_tls_reason(error)}") from error
        except OSError as error:
            sock.close()
            raise httpx.ConnectError(_plain_reason(error)) from error
        except BaseException:
            sock.close()
            raise
        return tls, incoming, outgoing

    def _keep_offset_fresh(self) -> None:
        """Sample the clocks' offset at 4 Hz while there are connections."""
        if self._offset_timer is not None:
            return

        def sample() -> None:
            self._offset.refresh(_mono())
            self._offset_timer = loop.call_later(OFFSET_EVERY_S, sample) if self._all else None

        loop = asyncio.get_running_loop()
        self._offset_timer = loop.call_later(OFFSET_EVERY_S, sample)


class _Collector:
    """The sink of a request that has none: keeps the whole answer."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []

    def sent(self, sent_ns: int, timing: Timing) -> None: ...

    def head(self, status: int, headers: list[tuple[bytes, bytes]], kernel_ns: int, user_ns: int) -> None:
        self.headers = headers

    def body(self, data: bytes, kernel_ns: int, user_ns: int) -> None:
        self.parts.append(data)

    def end(self, error: Exception | None, user_ns: int) -> None: ...


class _Whole(httpx.AsyncByteStream):
    """A body that is already here."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part


def _key(url: httpx.URL) -> Key:
    return url.scheme, url.raw_host.decode("ascii").strip("[]"), url.port or _PORTS[url.scheme]


def _head(request: httpx.Request) -> bytes:
    lines = [b"%s %s HTTP/1.1\r\n" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%s: %s\r\n" % header for header in request.headers.raw]
    return b"".join(lines) + b"\r\n"


def _timeout(request: httpx.Request, part: str) -> float | None:
    value: float | None = (request.extensions.get("timeout") or {}).get(part)
    return value


async def _bounded(done: asyncio.Future[None], limit: float | None, error: type[httpx.TimeoutException]) -> None:
    if limit is None:
        await done
        return
    try:
        async with asyncio.timeout(limit):
            await done
    except TimeoutError:
        raise error(f"no answer within {limit:g} s") from None


async def _send_pending(loop: asyncio.AbstractEventLoop, sock: socket.socket, outgoing: ssl.MemoryBIO) -> None:
    if outgoing.pending:
        await loop.sock_sendall(sock, outgoing.read())


def _send_alert(sock: socket.socket, outgoing: ssl.MemoryBIO) -> None:
    """Tell the peer why; whether it arrives does not matter."""
    if outgoing.pending:
        try:
            sock.send(outgoing.read())
        except OSError:
            return


def _plain_reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error) or type(error).__name__


def _tls_reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not accepted: {error.verify_message}"
    return error.reason or str(error)
