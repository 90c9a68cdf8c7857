"""Just enough of an HTTP/1.1 server for the simulated endpoint: requests in, whole or chunked answers out.

Must not know what is served. One request at a time per connection; a second one waits for the first answer.
"""

import asyncio
from collections import deque
from collections.abc import Callable

import httptools
import msgspec


class HttpRequest(msgspec.Struct, kw_only=True):
    """A parsed request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Responder:
    """How a handler answers one request. After `gone` is set nothing is written."""

    def __init__(self, connection: "HttpConnection", *, keep_alive: bool) -> None:
        self._connection, self._keep_alive = connection, keep_alive
        self.gone = False
        self.on_gone: Callable[[], None] = lambda: None

    def whole(self, status: int, body: bytes, content_type: str = "application/json", **headers: str) -> None:
        """A complete answer."""
        if self.gone:
            return
        self._connection.transport.write(
            _head(status, content_type, headers, self._keep_alive, length=len(body)) + body
        )
        self._finish()

    def json(self, status: int, value: object, **headers: str) -> None:
        self.whole(status, msgspec.json.encode(value), **headers)

    def begin_stream(self, **headers: str) -> None:
        """The head of a chunked event stream."""
        if not self.gone:
            self._connection.transport.write(
                _head(200, "text/event-stream; charset=utf-8", headers, self._keep_alive, length=None)
            )

    def write(self, data: bytes) -> None:
        """One HTTP chunk, in one write."""
        if not self.gone:
            self._connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self, last: bytes = b"") -> None:
        """The last chunk and the end."""
        if self.gone:
            return
        tail = b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last) if last else b"0\r\n\r\n"
        self._connection.transport.write(tail)
        self._finish()

    def cut(self) -> None:
        """Drop the connection in the middle of the answer."""
        if not self.gone:
            self.gone = True
            self._connection.transport.close()

    def _finish(self) -> None:
        self.gone = True
        self._connection.finished(self._keep_alive)


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
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        responder, self._responder = self._responder, None
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
            headers=self._headers, body=bytes(self._body),
        )  # fmt: skip
        self._waiting.append((request, bool(self._parser.should_keep_alive())))
        if self._responder is None:
            self._next()

    def _next(self) -> None:
        if self._waiting:
            request, keep_alive = self._waiting.popleft()
            self._responder = Responder(self, keep_alive=keep_alive)
            self._handler(request, self._responder)

    def finished(self, keep_alive: bool) -> None:
        """An answer is complete."""
        self._responder = None
        if not keep_alive:
            self.transport.close()
        else:
            self._next()


_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed",
            429: "Too Many Requests", 500: "Internal Server Error", 503: "Service Unavailable"}  # fmt: skip


def _head(status: int, content_type: str, headers: dict[str, str], keep_alive: bool, *, length: int | None) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}",
        "server: lpxtop-sim",
        f"content-type: {content_type}",
    ]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    lines.append("transfer-encoding: chunked" if length is None else f"content-length: {length}")
    if not keep_alive:
        lines.append("connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")
