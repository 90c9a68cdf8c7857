"""Just enough of an HTTP/1.1 server for the simulated endpoint: requests in, whole or chunked answers out.

Must not know what is served. One request at a time per connection; a second one waits for the first answer.
"""

import asyncio
import ipaddress
import traceback
from collections import deque
from collections.abc import Callable

import httptools
import msgspec

from lpxtop import __version__

SLOW_HEAD_PIECES, SLOW_HEAD_PAUSE_S = 8, 0.05


class HttpRequest(msgspec.Struct, kw_only=True):
    """A parsed request. `local`: the peer is on this machine's loopback."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    local: bool


class Responder:
    """How a handler answers one request. After `gone` is set nothing is written."""

    def __init__(self, connection: "HttpConnection", *, keep_alive: bool, bodiless: bool = False) -> None:
        self._connection, self._keep_alive, self._bodiless = connection, keep_alive, bodiless
        self.gone = False
        self.begun = False
        self.on_gone: Callable[[], None] = _nothing
        self._held: bytearray | None = None  # what follows a head that is still being sent, piece by piece
        self._complete = False

    def whole(self, status: int, body: bytes, content_type: str = "application/json", **headers: str) -> None:
        """A complete answer."""
        head = _head(status, content_type, headers, self._keep_alive, length=len(body))
        self._put(head if self._bodiless else head + body)
        self._end()

    def json(self, status: int, value: object, **headers: str) -> None:
        """A complete answer in JSON."""
        self.whole(status, msgspec.json.encode(value), **headers)

    def begin_stream(self, *, slowly: bool = False, **headers: str) -> None:
        """The head of a chunked event stream, once; `slowly`: in pieces, the body waits for the last of them."""
        if self.begun:
            return
        self.begun = True
        head = _head(200, "text/event-stream; charset=utf-8", headers, self._keep_alive, length=None)
        if slowly:
            self._held = bytearray()
            self._send_piece(head, -(-len(head) // SLOW_HEAD_PIECES))
        else:
            self._put(head)

    def _send_piece(self, head: bytes, size: int) -> None:
        if self.gone:
            return
        self._connection.transport.write(head[:size])
        if head[size:]:
            asyncio.get_running_loop().call_later(SLOW_HEAD_PAUSE_S, self._send_piece, head[size:], size)
            return
        held, self._held = bytes(self._held or b""), None
        self._put(held)
        if self._complete:
            self._end()

    def write(self, data: bytes) -> None:
        """One HTTP chunk, in one write."""
        self._put(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self, last: bytes = b"") -> None:
        """The last chunk and the end."""
        self._put(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last) if last else b"0\r\n\r\n")
        self._end()

    def cut(self) -> None:
        """Drop the connection in the middle of the answer."""
        if not self.gone:
            self.gone = True
            self._connection.transport.close()

    def _put(self, data: bytes) -> None:
        if self._held is not None:
            self._held += data
        elif not self.gone:
            self._connection.transport.write(data)

    def _end(self) -> None:
        if self._held is not None:
            self._complete = True
        elif not self.gone:
            self.gone = True
            self._connection.finished(self._keep_alive)


def _nothing() -> None:
    """Nobody waits for the end of this answer."""


Handler = Callable[[HttpRequest, Responder], None]


class HttpConnection(asyncio.Protocol):
    """One client's connection."""

    transport: asyncio.Transport

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._waiting: deque[tuple[HttpRequest, bool]] = deque()
        self._responder: Responder | None = None
        self._reset()

    def _reset(self) -> None:
        self._url, self._headers, self._body = b"", dict[str, str](), bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._local = _is_loopback(transport.get_extra_info("peername"))
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        responder, self._responder = self._responder, None
        self._waiting.clear()
        if responder is not None and not responder.gone:
            responder.gone = True
            responder.on_gone()

    # the parser's callbacks

    def on_message_begin(self) -> None:
        self._reset()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        request = HttpRequest(
            method=self._parser.get_method().decode(), path=self._url.decode("latin-1").partition("?")[0],
            headers=self._headers, body=bytes(self._body), local=self._local,
        )  # fmt: skip
        self._waiting.append((request, bool(self._parser.should_keep_alive())))
        if self._responder is None:
            self._next()

    def _next(self) -> None:
        if not self._waiting or self.transport.is_closing():
            return
        request, keep_alive = self._waiting.popleft()
        self._responder = responder = Responder(self, keep_alive=keep_alive, bodiless=request.method == "HEAD")
        try:
            self._handler(request, responder)
        except Exception:
            # the parser would swallow it and call the request malformed
            traceback.print_exc()
            responder.json(500, {"error": {"message": "a fault of the simulated server itself", "code": 500}})

    def finished(self, keep_alive: bool) -> None:
        """An answer is complete."""
        self._responder = None
        if not keep_alive:
            self.transport.close()
        else:
            self._next()


def _is_loopback(peer: tuple[str, int] | None) -> bool:
    if not peer:
        return False
    address = ipaddress.ip_address(peer[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found",
            405: "Method Not Allowed", 429: "Too Many Requests", 500: "Internal Server Error",
            503: "Service Unavailable"}  # fmt: skip


def _head(status: int, content_type: str, headers: dict[str, str], keep_alive: bool, *, length: int | None) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}",
        f"server: lpxtop-sim/{__version__}",
        f"content-type: {content_type}",
    ]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    lines.append("transfer-encoding: chunked" if length is None else f"content-length: {length}")
    if not keep_alive:
        lines.append("connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")
