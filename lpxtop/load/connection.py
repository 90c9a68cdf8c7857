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
from typing import Any

import httptools
import httpx
import msgspec

from lpxtop.errors import UsageError
from lpxtop.load import stamps
from lpxtop.load.exchange import Exchange, StaleConnection

READ_BYTES = 1 << 16
_mono = time.monotonic_ns


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
        self._take = self._plain if tls is None else self._encrypted
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
            self._take(data, kernel, now)
        else:
            self._eof(now)

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
        try:
            exchange.feed(data, kernel, now)
        except httptools.HttpParserUpgrade:
            self._lost(httpx.RemoteProtocolError("the server switched protocols (101)"))
        except httptools.HttpParserCallbackError as error:
            self._lost(_cause(error))
        except httptools.HttpParserError as error:
            self._lost(httpx.RemoteProtocolError(f"not HTTP/1.1: {error}"))
        if exchange.complete:
            self.exchange = None

    def _eof(self, now: int) -> None:
        exchange = self.exchange
        if exchange is None:
            self.close()
        elif exchange.head_done and not exchange.framed:
            self.exchange = None
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
                if self.exchange is not None and not self.exchange.told_sent:
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


def require_reader(loop: asyncio.AbstractEventLoop) -> None:
    """Raise UsageError for a loop that cannot watch a socket for this module: Windows' default one."""
    proactor = getattr(asyncio, "ProactorEventLoop", None)
    if proactor is not None and isinstance(loop, proactor):
        raise UsageError(
            "this event loop cannot tell when a socket has bytes to read", "run the load on asyncio.SelectorEventLoop"
        )


def _cause(error: Exception) -> Exception:
    cause = error.__context__ or error
    return cause if isinstance(cause, Exception) else error
