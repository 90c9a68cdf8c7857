"""One request and its answer on a connection: HTTP/1.1 framing by httptools, handed on to a sink as it is read.

Must not touch the socket, nor know what the bytes of a body mean.
"""

import asyncio
import time
from typing import Any, Protocol

import httptools
import httpx
import msgspec

_mono = time.monotonic_ns


class Timing(msgspec.Struct):
    """How the connection of an exchange came about. Parts that did not happen are None.

    `lenient` turns True when the answer's head broke a rule that curl overlooks too (bare LF line ends).
    """

    connection: str = "new"  # new, reused
    dns_us: int | None = None
    connect_us: int | None = None
    tls_us: int | None = None
    alpn: str | None = None
    attempts: int = 1
    lenient: bool = False


class Sink(Protocol):
    """Receives an exchange as it happens. All stamps are CLOCK_MONOTONIC ns; `kernel_ns` equals `user_ns` when the
    kernel gave none, and a read that completes several pieces of body gives all of them the same two.

    `sent` comes again when a stale connection made a second attempt necessary. `end` comes once, except when there
    was no connection at all or the caller cancelled.
    """

    def sent(self, sent_ns: int, timing: Timing) -> None: ...

    def head(self, status: int, headers: list[tuple[bytes, bytes]], kernel_ns: int, user_ns: int) -> None: ...

    def body(self, data: bytes, kernel_ns: int, user_ns: int) -> None: ...

    def end(self, error: Exception | None, user_ns: int) -> None: ...


class StaleConnection(httpx.RemoteProtocolError):
    """A reused connection died before the first byte of the answer: the server had closed it."""


class TlsError(httpx.ConnectError):
    """The TCP connection stands, but TLS does not."""


class Exchange:
    """One request and its answer on a connection: the parser's callbacks, and how the answer ends.

    `done` resolves when the answer is complete (with `until_head`: when its head is there), or raises what came
    instead.
    """

    def __init__(self, sink: Sink, timing: Timing, *, head_only: bool, until_head: bool = False) -> None:
        self._sink, self._timing = sink, timing
        self._head_only, self._until_head = head_only, until_head
        self._headers: list[tuple[bytes, bytes]] = []
        self._sent_ns: int | None = None
        self.told_sent = False
        self.status = 0
        self.any = self.head_done = self.framed = self.complete = self.reusable = False
        self.kernel_ns = self.user_ns = 0
        self._after_cr = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parser = httptools.HttpResponseParser(self)  # it looks the callbacks up here, once
        _lenient(self.parser)

    # sending

    def sending(self, now_ns: int) -> None:
        self._sent_ns = now_ns

    @property
    def progress_ns(self) -> int:
        """When bytes last moved, in either direction."""
        return max(self._sent_ns or 0, self.user_ns)

    def written(self) -> None:
        """Everything is with the kernel: tell the sink when the last `send()` began."""
        if not self.told_sent and self._sent_ns is not None:
            self.told_sent = True
            self._sink.sent(self._sent_ns, self._timing)

    # the answer

    def feed(self, data: bytes, kernel_ns: int, user_ns: int) -> None:
        """Bytes of the answer; raises httptools' errors."""
        self.kernel_ns, self.user_ns = kernel_ns, user_ns
        if not self.head_done:
            self._look_at_line_ends(data)
        self.parser.feed_data(data)

    def _look_at_line_ends(self, data: bytes) -> None:
        """Note a line of the head without CR: accepted, as by curl, and said."""
        head = (b"\r" if self._after_cr else b"") + data.partition(b"\r\n\r\n")[0]
        self._after_cr = data[-1:] == b"\r"
        if head.count(b"\n") > head.count(b"\r\n"):
            self._timing.lenient = True

    # the parser's callbacks

    def on_message_begin(self) -> None:
        if self.complete:
            raise httpx.RemoteProtocolError("a second answer to one request")
        self.any = True
        self._headers = []
        self.written()  # an answer before the whole request was sent (413)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()
        if 100 <= self.status < 200:
            return
        names = {name.lower() for name, _ in self._headers}
        bodiless = self._head_only or self.status in (204, 304)
        self.framed = bodiless or bool({b"content-length", b"transfer-encoding"} & names)
        self.head_done = True
        self._sink.head(self.status, self._headers, self.kernel_ns, self.user_ns)
        if self._until_head:
            self._settle(None)
        if self._head_only:
            self.finish(reusable=False)

    def on_body(self, data: bytes) -> None:
        self._sink.body(data, self.kernel_ns, self.user_ns)

    def on_message_complete(self) -> None:
        if not 100 <= self.status < 200:
            self.finish(reusable=bool(self.parser.should_keep_alive()))

    # the end

    def finish(self, *, reusable: bool) -> None:
        if self.complete:
            return
        self.complete, self.reusable = True, reusable
        try:
            self._sink.end(None, self.user_ns)
        except Exception as fault:
            self._settle(fault)
        else:
            self._settle(None)

    def fail(self, error: Exception) -> None:
        if self.complete:
            return
        self.complete = True
        if not isinstance(error, StaleConnection):  # that one is tried again
            self._sink.end(error, _mono())
        self._settle(error)

    def _settle(self, error: Exception | None) -> None:
        if self.done.done():  # the caller gave up
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


def _lenient(parser: Any) -> None:
    """Accept what curl accepts: servers send bare LF line ends, and close although they said keep-alive."""
    parser.set_dangerous_leniencies(
        lenient_headers=True,
        lenient_optional_cr_before_lf=True,
        lenient_optional_crlf_after_chunk=True,
        lenient_spaces_after_chunk_size=True,
        lenient_data_after_close=True,
    )
