"""Server-sent events from bytes, without I/O: feed reads, get payloads. Must not decode text or JSON.

Lines end with LF, CRLF or CR (WHATWG). Bytes are split, never text: Unicode line separators inside JSON are data.
"""

MAX_EVENT_BYTES = 16 * 1024 * 1024

_BOM = b"\xef\xbb\xbf"


class SseParser:
    """Splits a byte stream into events. `feed` returns the `data` payloads completed by these bytes.

    `event_names` holds the `event:` field for payloads that had one, by the payload's position in the last result.
    `comments` counts comment lines, `oversize` events beyond 16 MiB (dropped), `torn_end` says that the stream ended
    without the last blank line.
    """

    __slots__ = ("_data", "_dropping", "_event", "_rest", "_size", "_skip_lf", "_started", "comments", "event_names",
                 "oversize", "torn_end")  # fmt: skip

    def __init__(self) -> None:
        self._rest = b""  # an unfinished line
        self._data: list[bytes] = []  # data lines of the unfinished event
        self._size = 0
        self._event: bytes | None = None
        self._skip_lf = False  # the last read ended with CR: an LF that follows belongs to it
        self._dropping = False
        self._started = False
        self.event_names: dict[int, bytes] = {}
        self.comments = 0
        self.oversize = 0
        self.torn_end = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The payloads that these bytes complete, in order."""
        # The common read: one or more whole `data: …\n\n` events, nothing pending.
        if not self._rest and not self._data and self._started and not self._skip_lf and chunk[-2:] == b"\n\n":
            payloads = _plain_events(chunk)
            if payloads is not None:
                if self.event_names:
                    self.event_names = {}
                return payloads
        return self._feed_lines(chunk)

    def _feed_lines(self, chunk: bytes) -> list[bytes]:
        self.event_names = {}
        if self._skip_lf and chunk:
            self._skip_lf = False
            if chunk[:1] == b"\n":
                chunk = chunk[1:]
        buffer = self._rest + chunk if self._rest else chunk
        if not self._started:
            if len(buffer) < 3 and _BOM.startswith(buffer):
                self._rest = buffer
                return []
            buffer = buffer.removeprefix(_BOM)
            self._started = True
        self._skip_lf = buffer[-1:] == b"\r"
        lines = buffer.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n") if b"\r" in buffer else (
            buffer.split(b"\n")
        )  # fmt: skip
        self._rest = self._bounded(lines.pop())
        payloads: list[bytes] = []
        for line in lines:
            self._line(line, payloads)
        return payloads

    def _bounded(self, rest: bytes) -> bytes:
        """An unfinished line beyond the cap is dropped with its event; its tail is swallowed as it comes."""
        if len(rest) + self._size <= MAX_EVENT_BYTES:
            return rest
        if not self._dropping:
            self._dropping = True
            self.oversize += 1
        self._data, self._size = [], 0
        return b":"

    def _line(self, line: bytes, payloads: list[bytes]) -> None:
        if not line:
            self._dispatch(payloads)
            return
        field, colon, value = line.partition(b":")
        if not field:
            if colon and not self._dropping:
                self.comments += 1
            return
        if value[:1] == b" ":
            value = value[1:]
        if field == b"data":
            self._size += len(value) + 1
            if not self._dropping:
                self._data.append(value)
        elif field == b"event":
            self._event = value

    def _dispatch(self, payloads: list[bytes]) -> None:
        if self._data and not self._dropping:
            if self._event:
                self.event_names[len(payloads)] = self._event
            payloads.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
        self._data, self._size, self._event, self._dropping = [], 0, None, False

    def flush(self) -> list[bytes]:
        """At the end of the stream: an event without its blank line is an event all the same, and is flagged."""
        payloads: list[bytes] = []
        self.event_names = {}
        if self._rest and not self._dropping:
            self._line(self._rest, payloads)
        self._rest = b""
        if self._data:
            self.torn_end = True
            self._dispatch(payloads)
        return payloads


def _plain_events(chunk: bytes) -> list[bytes] | None:
    """Payloads of a read made of whole single-line `data: ` events only; None when it holds anything else."""
    if b"\r" in chunk:
        return None
    if chunk.count(b"\n") == 2:
        return [chunk[6:-2]] if chunk[:6] == b"data: " else None
    payloads = []
    for event in chunk[:-2].split(b"\n\n"):
        if event[:6] != b"data: " or b"\n" in event:
            return None
        payloads.append(event[6:])
    return payloads
