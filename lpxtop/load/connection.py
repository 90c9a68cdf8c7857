"""One TCP (or TLS) connection that carries one exchange at a time and hands each read, stamped, to its sink.

Reading happens in the loop's reader callback: no task switch lies between the socket and the sink. Must not know
what the bytes mean beyond HTTP/1.1 framing.
"""

import asyncio
import functools
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Protocol

import httptools
import httpx
import msgspec

from lpxtop.errors import UsageError
from lpxtop.load import stamps

READ_BYTES = 1 << 16
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


class Stats(msgspec.Struct):
    """Counters of a transport since its start."""

    reads: int = 0
    user_stamps: int = 0
    new: int = 0
    reused: int = 0
    stale: int = 0
    kernel: bool = True  # the kernel stamps

    @property
    def timestamp_source(self) -> str | None:
        """`kernel` or `user`; None before the first connection."""
        return None if not self.new else "kernel" if self.kernel else "user"


class StaleConnection(httpx.RemoteProtocolError):
    """A reused connection died before the first byte of the answer: the server had closed it."""


class Connection:
    """An open socket with an HTTP/1.1 peer. `exchange` is what currently uses it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        *,
        offset: stamps.ClockOffset,
        stats: Stats,
        tls: ssl.SSLObject | None = None,
        incoming: ssl.MemoryBIO | None = None,
        outgoing: ssl.MemoryBIO | None = None,
    ) -> None:
        self._loop, self._sock, self._offset, self._stats = loop, sock, offset, stats
        self._tls, self._incoming, self._outgoing = tls, incoming, outgoing
        self._write_buffer = bytearray()
        self._last_ns = 0
        self._writing = False
        self._fd = sock.fileno()
        self._receive: Callable[[], tuple[bytes, list[Any], int, Any]] = (
            functools.partial(sock.recvmsg, READ_BYTES, stamps.ANCILLARY_BYTES)
            if hasattr(sock, "recvmsg")
            else self._receive_plain
        )
        self.exchange: Exchange | None = None
        self.open = True
        self.broken = False  # the peer takes no more bytes
        self.uses = 0
        self.idle_timer: asyncio.TimerHandle | None = None
        self.on_close: Callable[[Connection], None] = lambda _: None
        loop.add_reader(self._fd, self._readable)

    # --- reading -----------------------------------------------------------------------------------------------

    def _receive_plain(self) -> tuple[bytes, list[Any], int, Any]:
        """Where there is no `recvmsg` (Windows)."""
        return self._sock.recv(READ_BYTES), [], 0, None

    def _readable(self) -> None:
        try:
            data, ancillary, _flags, _address = self._receive()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lost(httpx.ReadError(str(error)))
            return
        now = _mono()
        kernel = now
        if data:
            self._stats.reads += 1
            if ancillary:
                seconds, nanoseconds = stamps.unpack_timespec(ancillary[0][2])
                stamp = seconds * 1_000_000_000 + nanoseconds - self._offset.offset_ns
                if self._offset.trusted and self._last_ns <= stamp <= now:
                    kernel = stamp
                else:
                    self._stats.user_stamps += 1
            else:
                self._stats.user_stamps += 1
            self._last_ns = kernel
        self._received(data, kernel, now)

    def _received(self, data: bytes, kernel: int, now: int) -> None:
        if not data:
            self._eof(now)
        elif self._tls is None:
            self._plain(data, kernel, now)
        else:
            self._encrypted(data, kernel, now)

    def _encrypted(self, data: bytes, kernel: int, now: int) -> None:
        assert self._tls is not None
        assert self._incoming is not None
        self._incoming.write(data)
        try:
            while self.open:
                plain = self._tls.read(READ_BYTES)
                if not plain:
                    self._eof(now)
                    return
                self._plain(plain, kernel, now)
        except ssl.SSLWantReadError:
            self._flush_tls()  # a key update may want an answer
        except ssl.SSLZeroReturnError:
            self._eof(now)
        except ssl.SSLError as error:
            self._lost(httpx.ReadError(str(error)))

    def _plain(self, data: bytes, kernel: int, now: int) -> None:
        exchange = self.exchange
        if exchange is None:
            self.close()  # bytes nobody asked for
            return
        exchange.kernel_ns, exchange.user_ns = kernel, now
        if not exchange.any:
            exchange.look_at_line_end(data)
        try:
            exchange.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._lost(httpx.RemoteProtocolError("the server switched protocols (101)"))
        except httptools.HttpParserCallbackError as error:
            self._lost(_cause(error))
        except httptools.HttpParserError as error:
            if exchange.complete:
                self.close()
            else:
                self._lost(httpx.RemoteProtocolError(f"not HTTP/1.1: {error}"))

    def _eof(self, now: int) -> None:
        exchange = self.exchange
        if exchange is None:
            self.close()
        elif exchange.head_done and not exchange.framed:
            exchange.user_ns = now
            exchange.finish(reusable=False)
        elif self.uses > 1 and not exchange.any:
            self._lost(StaleConnection("the server had closed the idle connection"))
        else:
            part = "in the middle of the answer" if exchange.any else "without an answer"
            self._lost(httpx.RemoteProtocolError(f"the server closed the connection {part}"))

    def _lost(self, error: Exception) -> None:
        exchange, self.exchange = self.exchange, None
        if exchange is not None and self.uses > 1 and not exchange.any and isinstance(error, httpx.ReadError):
            error = StaleConnection(str(error))
        self.close()
        if exchange is not None:
            exchange.fail(error)

    # --- writing -----------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Hand bytes to the kernel, the rest as it takes them; the reader stays armed meanwhile."""
        if self._tls is None:
            self._write_buffer += data
            self._pump()
        else:
            try:
                self._tls.write(data)
            except ssl.SSLError as error:
                self._lost(httpx.WriteError(str(error)))
            else:
                self._flush_tls()

    def _flush_tls(self) -> None:
        assert self._outgoing is not None
        if self._outgoing.pending:
            self._write_buffer += self._outgoing.read()
            self._pump()

    def _pump(self) -> None:
        if not self.open:
            return
        try:
            while self._write_buffer:
                if self.exchange is not None:
                    self._last_ns = _mono()  # no answer can have come before this
                    self.exchange.sending(self._last_ns)  # the last one before the last send() is `sent`
                sent = self._sock.send(self._write_buffer)
                del self._write_buffer[:sent]
        except (BlockingIOError, InterruptedError):
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._fd, self._pump)
            return
        except OSError:
            self.broken = True
            self._write_buffer.clear()  # do not fail yet: the answer (a 413, say) may be waiting to be read
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._fd)
        if self.exchange is not None:
            self.exchange.written()

    # --- life --------------------------------------------------------------------------------------------------

    def round_trip_us(self) -> tuple[int | None, int | None]:
        """(smoothed, least) round-trip time; (None, None) once closed."""
        return stamps.round_trip_us(self._sock) if self.open else (None, None)

    @property
    def unsent(self) -> bool:
        """Part of the request has not been taken by the kernel."""
        return bool(self._write_buffer)

    @property
    def reusable(self) -> bool:
        """Nothing of this side's stands in the way of another exchange."""
        return self.open and not self.broken and not self._write_buffer

    def abandon(self) -> None:
        """Close it under a running exchange, which hears nothing of it."""
        self.exchange = None
        self.close()

    def close(self) -> None:
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._fd)
        if self._writing:
            self._loop.remove_writer(self._fd)
        if self.idle_timer is not None:
            self.idle_timer.cancel()
        self._sock.close()
        self.on_close(self)


class Exchange:
    """One request and its answer on a connection: the parser's callbacks, and how the answer ends.

    `done` resolves when the answer is complete (with `until_head`: when its head is there), or raises what came instead.
    """

    def __init__(
        self, connection: Connection, sink: Sink, timing: Timing, *, head_only: bool, until_head: bool = False
    ) -> None:
        self._connection, self._sink, self._timing = connection, sink, timing
        self._head_only, self._until_head = head_only, until_head
        self._headers: list[tuple[bytes, bytes]] = []
        self._sent_ns: int | None = None
        self._told_sent = False
        self.status = 0
        self.any = self.head_done = self.framed = self.complete = self.reusable = False
        self.kernel_ns = self.user_ns = 0
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
        if not self._told_sent and self._sent_ns is not None:
            self._told_sent = True
            self._sink.sent(self._sent_ns, self._timing)

    # the answer

    def look_at_line_end(self, data: bytes) -> None:
        """Note a status line without CR: accepted, as by curl, and said."""
        end = data.find(b"\n")
        if end > 0 and data[end - 1] != 13:  # CR
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
        if self._connection.exchange is self:
            self._connection.exchange = None
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


def require_reader(loop: asyncio.AbstractEventLoop) -> None:
    """Raise UsageError for a loop that cannot watch a socket for this module: Windows' default one."""
    proactor = getattr(asyncio, "ProactorEventLoop", None)
    if proactor is not None and isinstance(loop, proactor):
        raise UsageError(
            "this event loop cannot tell when a socket has bytes to read", "run the load on asyncio.SelectorEventLoop"
        )


def _lenient(parser: Any) -> None:
    """Accept what curl accepts: servers send bare LF line ends, and close although they said keep-alive."""
    parser.set_dangerous_leniencies(
        lenient_headers=True,
        lenient_optional_cr_before_lf=True,
        lenient_optional_crlf_after_chunk=True,
        lenient_spaces_after_chunk_size=True,
        lenient_data_after_close=True,
    )


def _cause(error: Exception) -> Exception:
    cause = error.__context__ or error
    return cause if isinstance(cause, Exception) else error
