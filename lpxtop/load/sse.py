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

    __slots__ = ("_begun", "_clean", "_data", "_dropping", "_event", "_partial", "_partial_bytes", "_size", "_skip_lf",
                 "comments", "event_names", "oversize", "torn_end")  # fmt: skip

    def __init__(self) -> None:
        self._partial: list[bytes] = []  # pieces of an unfinished line
        self._partial_bytes = 0
        self._data: list[bytes] = []  # data lines of the unfinished event
        self._size = 0
        self._event: bytes | None = None
        self._skip_lf = False  # the last read ended with CR: an LF that follows belongs to it
        self._dropping = False
        self._begun = False  # past a byte order mark
        self._clean = False  # between two events, nothing held back
        self.event_names: dict[int, bytes] = {}
        self.comments = 0
        self.oversize = 0
        self.torn_end = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The payloads that these bytes complete, in order."""
        if self._clean and chunk[-1:] == b"\n":
            # nearly every read: one whole event, its two line ends the only ones
            if chunk.find(b"\n") == len(chunk) - 2 and chunk[:6] == b"data: " and b"\r" not in chunk:
                return [chunk[6:-2]]
            payloads = _plain_events(chunk)
            if payloads is not None:
                return payloads
        return self._feed_lines(chunk)

    def _feed_lines(self, chunk: bytes) -> list[bytes]:
        self.event_names = {}
        chunk = self._without_mark(chunk)
        if self._skip_lf and chunk:
            chunk = chunk[1:] if chunk[0] == 10 else chunk  # LF
            self._skip_lf = False
        if not chunk:
            return []
        if b"\r" in chunk:
            self._skip_lf = chunk[-1] == 13  # CR
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = chunk.split(b"\n")
        unfinished = lines.pop()
        if lines and self._partial:
            lines[0] = b"".join([*self._partial, lines[0]])
            self._partial, self._partial_bytes = [], 0
        payloads: list[bytes] = []
        for line in lines:
            self._line(line, payloads)
        self._hold_back(unfinished)
        self._clean = not (self._partial or self._data or self._event or self._skip_lf or self._dropping)
        if self._clean and self.event_names:
            self._clean = False  # the short way leaves the names as they are
        return payloads

    def _without_mark(self, chunk: bytes) -> bytes:
        """Strip one byte order mark at the start of the stream, however it is cut."""
        if self._begun:
            return chunk
        start = b"".join([*self._partial, chunk])
        if len(start) < 3 and _BOM.startswith(start):
            self._partial = [start]
            return b""
        self._begun, self._partial = True, []
        return start.removeprefix(_BOM)

    def _hold_back(self, unfinished: bytes) -> None:
        """Keep the start of a line. An event beyond the cap is dropped; its rest is swallowed as it comes."""
        if unfinished and not self._dropping:
            self._partial.append(unfinished)
            self._partial_bytes += len(unfinished)
        elif unfinished:
            self._partial = [b":"]
        if self._size + self._partial_bytes > MAX_EVENT_BYTES and not self._dropping:
            self._dropping = True
            self.oversize += 1
            self._partial = [b":"] if self._partial else []  # what is left of the line counts as a comment
            self._data, self._size, self._partial_bytes = [], 0, 0

    def _line(self, line: bytes, payloads: list[bytes]) -> None:
        if not line:
            self._dispatch(payloads)
            return
        field, colon, value = line.partition(b":")
        if not field:
            if colon and not self._dropping:
                self.comments += 1
            return
        if field == b"data":
            if not self._dropping:
                self._data.append(value[1:] if value[:1] == b" " else value)
                self._size += len(value) + 1
        elif field == b"event":
            self._event = value[1:] if value[:1] == b" " else value

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
        if self._partial and not self._dropping:
            self._line(b"".join(self._partial), payloads)
        self._partial = []
        if self._data:
            self.torn_end = True
            self._dispatch(payloads)
        return payloads


def _plain_events(chunk: bytes) -> list[bytes] | None:
    """Payloads of a read made of whole single-line `data: ` events only; None when it holds anything else."""
    if b"\r" in chunk:  # one event with CRLF
        one = chunk[:6] == b"data: " and chunk[-4:] == b"\r\n\r\n" and chunk.count(b"\n") == chunk.count(b"\r") == 2
        return [chunk[6:-4]] if one else None
    if chunk[-2:] != b"\n\n":
        return None
    payloads = []
    for event in chunk[:-2].split(b"\n\n"):
        if event[:6] != b"data: " or b"\n" in event:
            return None
        payloads.append(event[6:])
    return payloads
