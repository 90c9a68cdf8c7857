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
from typing import Any

import aiohappyeyeballs
import httpx

from lpxtop.load import stamps
from lpxtop.load.connection import Connection, Stats, require_reader
from lpxtop.load.exchange import Exchange, StaleConnection, Timing, TlsError
from lpxtop.load.ordinary import Body, Collector

IDLE_S = 1.0
"""A kept connection is reused within this time only: servers close idle ones after 2–5 s."""
OFFSET_EVERY_S = 0.25
HAPPY_EYEBALLS_DELAY_S = 0.25
_NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
_PORTS = {"http": 80, "https": 443}
_mono = time.monotonic_ns

Key = tuple[str, str, int]


class KernelTransport(httpx.AsyncBaseTransport):
    """See the module. `stats` counts. Needs an event loop with `add_reader`.

    `extensions["timeout"]`: `connect` covers name, TCP and TLS; `read` and `write` bound a silence, not a whole; `pool`
    never applies, as there is no pool to wait for. A response's `extensions` hold `timing` and, with a sink, `rtt_us`
    (smoothed, least).
    """

    def __init__(self, ssl_context: ssl.SSLContext | None = None, *, offset: stamps.ClockOffset | None = None) -> None:
        self._ssl_context = ssl_context
        self._offset = offset or stamps.ClockOffset()
        self._idle: defaultdict[Key, list[Connection]] = defaultdict(list)
        self._all: set[Connection] = set()
        self._names: dict[tuple[str, int], list[Any]] = {}
        self._lookups: dict[tuple[str, int], asyncio.Task[int]] = {}
        self._offset_timer: asyncio.TimerHandle | None = None
        self._stamping: socket.socket | None = None
        self.stats = Stats()
        if ssl_context is not None:
            ssl_context.set_alpn_protocols(["http/1.1"])

    @property
    def clock_steps(self) -> int:
        """How often the wall clock was stepped since the start."""
        return self._offset.steps

    # --- httpx's side ------------------------------------------------------------------------------------------

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request; returns when the answer is complete (with a sink) or its head is there (without)."""
        body = b"".join([part async for part in request.stream])  # type: ignore[union-attr]
        try:
            return await self._attempt(request, body, Timing(), reuse=True)
        except StaleConnection:
            self.stats.stale += 1
            return await self._attempt(request, body, Timing(attempts=2), reuse=False)

    async def _attempt(self, request: httpx.Request, body: bytes, timing: Timing, *, reuse: bool) -> httpx.Response:
        connection = (self._take_idle(request.url) if reuse else None) or await self._connect(request, timing)
        timing.connection = "reused" if connection.uses else "new"
        connection.uses += 1
        collector = None if "sink" in request.extensions else Collector()
        sink = request.extensions["sink"] if collector is None else collector
        exchange = connection.exchange = Exchange(
            sink, timing, head_only=request.method == "HEAD", until_head=collector is not None
        )
        try:
            connection.write(_head(request) + body)
            await _moving(connection, exchange, request)
        except BaseException:
            connection.abandon()
            raise
        extensions: dict[str, Any] = {"timing": timing, "http_version": b"HTTP/1.1"}
        if collector is None:
            extensions["rtt_us"] = connection.round_trip_us()
            self._release(request.url, connection, exchange)
            return httpx.Response(exchange.status, extensions=extensions)
        stream = Body(collector, lambda: self._release(request.url, connection, exchange), _timeout(request, "read"))
        return httpx.Response(exchange.status, headers=collector.headers, stream=stream, extensions=extensions)

    async def aclose(self) -> None:
        if self._offset_timer is not None:
            self._offset_timer.cancel()
        if self._stamping is not None:
            self._stamping.close()
        for lookup in list(self._lookups.values()):
            lookup.cancel()
        for connection in list(self._all):
            connection.close()

    # --- kept connections --------------------------------------------------------------------------------------

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

    def _release(self, url: httpx.URL, connection: Connection, exchange: Exchange) -> None:
        """The exchange is over, or nobody wants the rest of it: keep the connection a while, or close it."""
        if not exchange.complete:
            connection.abandon()
        elif not exchange.reusable or not connection.reusable:
            connection.close()
        else:
            connection.idle_timer = asyncio.get_running_loop().call_later(IDLE_S, connection.close)
            self._idle[_key(url)].append(connection)

    def _forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        for waiting in self._idle.values():
            if connection in waiting:
                waiting.remove(connection)

    # --- new connections ---------------------------------------------------------------------------------------

    async def resolve_url(self, url: httpx.URL) -> int | None:
        """`resolve` for where a URL points."""
        _scheme, host, port = _key(url)
        return await self.resolve(host, port)

    async def resolve(self, host: str, port: int) -> int | None:
        """Look a name up, once per run, off the loop. Returns the µs it took; None when it was known.

        Raises httpx.ConnectError. Requests that wait for the same name share one look-up.
        """
        if self._stamping is None:  # the kernel needs a moment to begin
            self._stamping = stamps.keep_on()
        key = (host, port)
        if key in self._names:
            return None
        if key not in self._lookups:
            self._lookups[key] = asyncio.create_task(self._look_up(host, port))
            self._lookups[key].add_done_callback(lambda task: self._looked_up(key, task))
        return await asyncio.shield(self._lookups[key])

    async def _look_up(self, host: str, port: int) -> int:
        begin = _mono()
        try:
            self._names[host, port] = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError) as error:
            reason = error.strerror if isinstance(error, socket.gaierror) else str(error)
            raise httpx.ConnectError(f"the name {host} cannot be resolved: {reason}") from error
        return (_mono() - begin) // 1000

    def _looked_up(self, key: tuple[str, int], task: asyncio.Task[int]) -> None:
        self._lookups.pop(key, None)
        if not task.cancelled():
            task.exception()  # whoever waited was told; nobody may wait any more

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
        loop = asyncio.get_running_loop()
        require_reader(loop)
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
        if url.scheme != "https":
            return Connection(loop, sock, offset=self._offset, stats=self.stats)
        begin = _mono()
        tls, incoming, outgoing = await self._handshake(sock, host)
        timing.tls_us, timing.alpn = (_mono() - begin) // 1000, tls.selected_alpn_protocol()
        return Connection(
            loop, sock, offset=self._offset, stats=self.stats, tls=tls, incoming=incoming, outgoing=outgoing
        )

    async def _handshake(self, sock: socket.socket, host: str) -> tuple[ssl.SSLObject, ssl.MemoryBIO, ssl.MemoryBIO]:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        try:
            tls = self._context().wrap_bio(incoming, outgoing, server_hostname=host)
            await _shake_hands(sock, tls, incoming, outgoing)
        except ssl.SSLError as error:
            _send_alert(sock, outgoing)
            sock.close()
            raise TlsError(f"TLS: {_tls_reason(error)}") from error
        except OSError as error:
            sock.close()
            raise TlsError(f"TLS: {_plain_reason(error)} during the handshake") from error
        except BaseException:
            sock.close()
            raise
        return tls, incoming, outgoing

    def _context(self) -> ssl.SSLContext:
        if self._ssl_context is None:
            self._ssl_context = httpx.create_ssl_context(trust_env=False)
            self._ssl_context.set_alpn_protocols(["http/1.1"])
        return self._ssl_context

    def _keep_offset_fresh(self) -> None:
        """Sample the clocks' offset at 4 Hz while there are connections."""
        if self._offset_timer is not None:
            return

        def sample() -> None:
            self._offset.refresh(_mono())
            self._offset_timer = loop.call_later(OFFSET_EVERY_S, sample) if self._all else None

        loop = asyncio.get_running_loop()
        self._offset.refresh(_mono())  # nobody looked while there was no connection
        self._offset_timer = loop.call_later(OFFSET_EVERY_S, sample)


def _key(url: httpx.URL) -> Key:
    return url.scheme, url.raw_host.decode("ascii").strip("[]"), url.port or _PORTS[url.scheme]


def _head(request: httpx.Request) -> bytes:
    lines = [b"%s %s HTTP/1.1\r\n" % (request.method.encode(), request.url.raw_path)]
    lines += [b"%s: %s\r\n" % header for header in request.headers.raw]
    return b"".join(lines) + b"\r\n"


def _timeout(request: httpx.Request, part: str) -> float | None:
    value: float | None = (request.extensions.get("timeout") or {}).get(part)
    return value


async def _moving(connection: Connection, exchange: Exchange, request: httpx.Request) -> None:
    """Wait for the exchange; raise WriteTimeout or ReadTimeout when no byte moved for as long as the request allows."""
    read_s, write_s = _timeout(request, "read"), _timeout(request, "write")
    while read_s is not None or (write_s is not None and connection.unsent):
        unsent = connection.unsent
        limit = write_s if unsent and write_s is not None else read_s
        left = None if limit is None else limit - (_mono() - exchange.progress_ns) / 1e9
        if left is not None and left <= 0:
            if unsent:
                raise httpx.WriteTimeout(f"the server took no byte of the request for {limit:g} s")
            raise httpx.ReadTimeout(f"no byte came for {limit:g} s")
        done, _ = await asyncio.wait({exchange.done}, timeout=left)
        if done:
            break
    await exchange.done


async def _shake_hands(
    sock: socket.socket, tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO
) -> None:
    loop = asyncio.get_running_loop()
    shaken = False
    while not shaken:
        try:
            tls.do_handshake()
            shaken = True
        except ssl.SSLWantReadError:
            pass
        if outgoing.pending:
            await loop.sock_sendall(sock, outgoing.read())
        if not shaken:
            data = await loop.sock_recv(sock, 1 << 16)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            incoming.write(data)


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
    if error.reason in _NO_TLS:
        return "the server does not speak it (http rather than https?)"
    return error.reason or str(error)
