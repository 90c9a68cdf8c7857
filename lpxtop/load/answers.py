"""An answer as it arrives: what its bytes said so far, and how many tokens. No I/O, no clock.

Definitions are those of the design: TTFT ends at the first token-bearing chunk; a role, usage or finish chunk moves
neither the first nor the last token. How an answer is judged is in outcomes.py.
"""

import re
from collections.abc import Sequence
from urllib.parse import urlsplit, urlunsplit

import msgspec

from lpxtop.format import clean
from lpxtop.load import deltas
from lpxtop.load.sse import SseParser

ERROR_BODY_BYTES = 1 << 20
WHOLE_BODY_BYTES = 16 << 20
_HEADER_CHARS = 100
_ID_HEADERS = (b"x-request-id", b"request-id", b"x-amzn-requestid", b"apim-request-id")
_LIMIT_HEADERS = (b"retry-after", b"retry-after-ms", b"ratelimit")
_LIMIT_PARTS = (b"limit", b"remaining", b"reset")
_BOM = b"\xef\xbb\xbf"
_PAYLOAD_ID = re.compile(rb'"id"\s*:\s*"([^"\\]{1,100})"')
_EVENT_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")
_MISMATCH = 0.02
"""Usage and the sum over chunks may differ by this much before it is said."""


class Counts(msgspec.Struct, frozen=True):
    """Output tokens, those of the first chunk, where the number came from, and what was odd about it."""

    output: int | None
    first_chunk: int | None
    source: str | None
    flags: tuple[str, ...] = ()


class Answer:
    """Follows one answer. Feed it reads; it returns the token counts of the token-bearing chunks they complete."""

    def __init__(self, *, streamed: bool) -> None:
        self.streamed = streamed
        self.status = 0
        self.first_byte_ns: int | None = None
        self.first_event_ns: int | None = None
        self.first_token_ns: int | None = None
        self.first_reasoning_ns: int | None = None
        self.first_content_ns: int | None = None
        self.last_token_ns: int | None = None
        self.last_read_ns: int | None = None
        self.ended_ns: int | None = None
        self.chunks = self.coalesced = self.user_stamps = self.unreadable = 0
        self.unreadable_start = b""
        self.input_tokens: int | None = None
        self.usage_output: int | None = None
        self.reasoning_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.done = False  # [DONE] came
        self.error: tuple[str, str] | None = None
        self.location: str | None = None  # of a redirect, without user info and query
        self.server_request_id: str | None = None
        self.rate_limit: dict[str, str] = {}
        self.timings: dict[str, float] = {}
        self.flags: list[str] = []
        self.whole: bytearray | None = None  # body of an answer that is no event stream
        self.in_reasoning = False
        self._sse: SseParser | None = None
        self._says_stream = False  # its content type
        self._start = b""
        self._cumulative: dict[int, int] = {}  # continuous usage, by choice
        self._silent = 0  # tokens counted by chunks that bear none, as an end-of-sequence token
        self._counted = {"continuous_usage": 0, "token_ids": 0, "logprobs": 0}
        self._counted_chunks = dict.fromkeys(self._counted, 0)
        self._first_chunk: int | None = None

    @property
    def is_stream(self) -> bool:
        return self._sse is not None

    @property
    def succeeded(self) -> bool:
        """The status says so; what the body says is another matter."""
        return 200 <= self.status < 300

    def flag(self, name: str) -> None:
        """Note a quirk, once."""
        if name not in self.flags:
            self.flags.append(name)

    # --- the head ----------------------------------------------------------------------------------------------

    def head(self, status: int, headers: list[tuple[bytes, bytes]], kernel_ns: int) -> None:
        self.status, self.first_byte_ns = status, kernel_ns
        for name, value in headers:
            self._header(name.lower(), value.decode("latin-1"))
        if self.succeeded and self.streamed and not self._says_stream:
            self.flag("content_type")

    def _header(self, name: bytes, value: str) -> None:
        if name == b"content-type":
            self._says_stream = "event-stream" in value.lower()
        elif name == b"location":
            parts = urlsplit(value)
            self.location = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
        elif name in _ID_HEADERS:
            self.server_request_id = self.server_request_id or clean(value, _HEADER_CHARS)
        elif _tells_a_limit(name):
            self.rate_limit[name.decode("latin-1")[:_HEADER_CHARS]] = clean(value, _HEADER_CHARS)

    # --- the body ----------------------------------------------------------------------------------------------

    def feed(self, data: bytes, kernel_ns: int) -> Sequence[int]:
        """Tokens of each token-bearing chunk that this read completes: 1 when it does not say, 0 when not known."""
        self.last_read_ns = kernel_ns
        sse = self._sse
        if sse is None:
            data = self._begin(data)
            sse = self._sse
            if sse is None:
                return ()
        payloads = sse.feed(data)
        if len(payloads) == 1 and not sse.event_names:
            tokens = self._payload(payloads[0], None, kernel_ns)
            return () if tokens is None else (tokens,)
        return self._payloads(payloads, sse, kernel_ns)

    def end(self) -> Sequence[int]:
        """The body ended cleanly: what was held back counts."""
        if self._sse is None:
            if self._start:
                self.whole = bytearray(self._start)
            if self.whole is not None and self.succeeded:
                self._read_whole(bytes(self.whole))
            return ()
        tokens = self._payloads(self._sse.flush(), self._sse, self.last_read_ns or 0)
        if self._sse.torn_end:
            self.flag("no_final_blank")
        if self._sse.oversize:
            self.flag("oversize_event")
        return tokens

    def _payloads(self, payloads: list[bytes], sse: SseParser, kernel_ns: int) -> list[int]:
        names = sse.event_names
        tokens = [self._payload(payload, names.get(at), kernel_ns) for at, payload in enumerate(payloads)]
        return [n for n in tokens if n is not None]

    def _begin(self, data: bytes) -> bytes:
        """Decide by the body's first bytes whether it is an event stream, as content types lie; returns those bytes."""
        if self.whole is not None:
            self._gather(data)
            return b""
        start = (self._start + data).removeprefix(_BOM).lstrip(b" \t\r\n")
        if self.succeeded and self.streamed:
            streams = _is_event_stream(start)
            if streams is None:
                self._start = start
                return b""
            self._start = b""
            if streams or (self._says_stream and start[:1] not in (b"{", b"[", b"<")):
                self._sse = SseParser()
                return start
        self.whole = bytearray()
        self._gather(start)
        return b""

    def _gather(self, data: bytes) -> None:
        """Part of a whole answer; beyond a bound it is only swallowed."""
        assert self.whole is not None
        if len(self.whole) < (WHOLE_BODY_BYTES if self.succeeded else ERROR_BODY_BYTES):
            self.whole += data
        else:
            self.flag("oversize_body")

    def _read_whole(self, body: bytes) -> None:
        """A JSON answer: its usage and finish count; it has no first token. Some proxies append `data: [DONE]`."""
        facts = deltas.read(body.partition(b"\ndata:")[0])
        if not facts.is_event and facts.error is None:
            kind, text = deltas.error_text(body)
            facts.error = (kind or "not_an_answer", text or "an empty answer")
        if facts.cumulative is not None:
            self.usage_output = facts.cumulative
        self._read_id(body[:1000])
        self._take(facts)
        if facts.error is None:
            self.last_token_ns = self.last_read_ns

    # --- payloads ----------------------------------------------------------------------------------------------

    def _payload(self, payload: bytes, name: bytes | None, kernel_ns: int) -> int | None:
        """Take one event's facts in; its tokens when it bears any."""
        facts = deltas.read(payload)
        if facts is deltas.CONTENT and self.first_content_ns is not None:
            self.chunks += 1
            self.last_token_ns = kernel_ns
            self.in_reasoning = False
            return 1
        if facts is deltas.REASONING and self.first_reasoning_ns is not None:
            self.chunks += 1
            self.last_token_ns = kernel_ns
            self.in_reasoning = True
            return 1
        if facts.is_event and self.first_event_ns is None:
            self.first_event_ns = kernel_ns
            self._read_id(payload[:1000])
        if not facts.common:
            if payload.strip() == b"[DONE]":
                self.done = True
                return None
            self._unusual(facts, payload, name)
        elif facts.input_tokens is not None:
            self.input_tokens = facts.input_tokens
        return self._bearing(facts, kernel_ns)

    def _unusual(self, facts: deltas.Facts, payload: bytes, name: bytes | None) -> None:
        if name == b"error" and facts.error is None:
            kind, text = deltas.error_text(payload)
            facts.error = (kind or "error", text)
        if "bad_json" in facts.flags:
            self.unreadable += 1
            if not self.chunks and not self.unreadable_start:
                self.unreadable_start = payload[:200]  # nothing was generated yet: words of a proxy, perhaps
        self._take(facts)

    def _read_id(self, payload: bytes) -> None:
        """The answer's own id (chatcmpl-…): what the server's log names it by, where no header does."""
        if self.server_request_id is None:
            found = _PAYLOAD_ID.search(payload)
            self.server_request_id = clean(found[1].decode("utf-8", "replace"), _HEADER_CHARS) if found else None

    def _bearing(self, facts: deltas.Facts, kernel_ns: int) -> int | None:
        """The chunk's tokens; None when it bears none. Growth of continuous usage bears, text or not (held-back bytes
        of a character, special tokens), but not in the finish chunk."""
        grown = self._grown(facts)
        source = "continuous_usage" if grown is not None else facts.token_source
        tokens = grown if grown is not None else facts.tokens
        if not (facts.bears or (grown and facts.finish_reason is None)):
            self._silent += tokens or 0
            return None
        if source is None or tokens is None:
            source, tokens = None, 1
        else:
            self._counted[source] += tokens
            self._counted_chunks[source] += 1
        self.chunks += 1
        self.last_token_ns = kernel_ns
        self.in_reasoning = facts.reasoning and not facts.content
        self._first(facts, tokens if source else None, kernel_ns)
        return tokens

    def _grown(self, facts: deltas.Facts) -> int | None:
        """Tokens since the last payload by continuous usage. None when there is none: usage that comes only with the
        last chunk is final usage."""
        total = facts.cumulative
        if total is None:
            return None
        if facts.finish_reason is not None or self.chunks != self._counted_chunks["continuous_usage"]:
            others = sum(count for index, count in self._cumulative.items() if index != facts.index)
            self.usage_output = total + others
        if self.chunks != self._counted_chunks["continuous_usage"]:
            return None
        grown = total - self._cumulative.get(facts.index, 0)
        self._cumulative[facts.index] = total
        if grown < 0:
            self.flag("usage_shrank")
        return max(grown, 0)

    def _first(self, facts: deltas.Facts, tokens: int | None, kernel_ns: int) -> None:
        if self.first_token_ns is None:
            self.first_token_ns = kernel_ns
            self._first_chunk = tokens or None
        if facts.reasoning and self.first_reasoning_ns is None:
            self.first_reasoning_ns = kernel_ns
        if (facts.content or not facts.reasoning) and self.first_content_ns is None:
            self.first_content_ns = kernel_ns

    def _take(self, facts: deltas.Facts) -> None:
        """Usage, finish, errors and timings from any payload."""
        for name in ("input_tokens", "reasoning_tokens", "cached_tokens"):
            value = getattr(facts, name)
            if value is not None:
                setattr(self, name, value)
        if facts.output_tokens is not None:
            self.usage_output = facts.output_tokens
        if facts.finish_reason is not None:
            self.finish_reason = clean(facts.finish_reason, 40)
        self.error = self.error or facts.error
        if facts.timings:
            self.timings |= facts.timings
        for flag in facts.flags:
            self.flag(flag)

    # --- counting ----------------------------------------------------------------------------------------------

    def counts(self, max_tokens: int | None) -> Counts:
        """Output tokens from the best source there is; see `finished.token_source`."""
        flags: list[str] = []
        source, output = self._best_source()
        usage = self.usage_output
        if usage is not None and output is not None and source != "usage":
            if abs(usage - output) > _MISMATCH * max(usage, 1):
                flags.append("usage_mismatch")
            output = usage
        first = self._first_chunk
        if first is None and self.chunks and output == self.chunks:
            first = 1  # as many tokens as chunks: one each
        if max_tokens is not None and output is not None and output > max_tokens:
            flags.append("limit_ignored")
        return Counts(output, first, source, tuple(flags))

    def _best_source(self) -> tuple[str | None, int | None]:
        for source in ("continuous_usage", "token_ids", "logprobs"):
            if self._counted_chunks[source] and self._counted_chunks[source] == self.chunks:
                return source, self._counted[source] + self._silent
        if self.usage_output is not None:
            return "usage", self.usage_output
        return ("chunks", self.chunks) if self.chunks else (None, None)


def _tells_a_limit(name: bytes) -> bool:
    """Whether a header says how much is allowed, is left, or when it comes back, in any vendor's spelling."""
    before, rate_limit, after = name.replace(b"-", b"").partition(b"ratelimit")
    return name in _LIMIT_HEADERS or (bool(rate_limit) and any(part in before + after for part in _LIMIT_PARTS))


def _is_event_stream(start: bytes) -> bool | None:
    """Whether a body that starts so is made of server-sent events; None while it may still become one."""
    if _BOM.startswith(start):
        return None
    for field in _EVENT_FIELDS:
        if start.startswith(field):
            return True
        if field.startswith(start):
            return None
    return False
