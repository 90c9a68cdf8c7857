"""An answer as it arrives: what its bytes said so far, how many tokens, and how it ended. No I/O, no clock.

Definitions are those of the design: TTFT ends at the first token-bearing chunk; a role, usage or finish chunk moves
neither the first nor the last token.
"""

from collections.abc import Iterator

import httpx
import msgspec

from lpxtop.load import deltas
from lpxtop.load.sse import SseParser

ERROR_BODY_BYTES = 1 << 20
_ID_HEADERS = (b"x-request-id", b"request-id", b"x-amzn-requestid", b"apim-request-id")
_RATE_PARTS = (b"limit", b"remaining", b"reset")
_KNOWN_FINISH = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter", "eos_token",
                           "stop_sequence", "end_turn"})  # fmt: skip
_MISMATCH = 0.02
"""Usage and the sum over chunks may differ by this much before it is said."""


class Counts(msgspec.Struct, frozen=True):
    """Output tokens, those of the first chunk, where the number came from, and what was odd about it."""

    output: int | None
    first_chunk: int | None
    source: str | None
    flags: tuple[str, ...] = ()


class Judgement(msgspec.Struct, frozen=True):
    """How a request ended."""

    outcome: str
    error_type: str | None = None
    error: str | None = None


class Answer:
    """Follows one answer. Feed it reads; it yields the token counts of the token-bearing chunks they complete."""

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
        self.chunks = self.coalesced = self.user_stamps = 0
        self.input_tokens: int | None = None
        self.reasoning_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.done = False  # [DONE] came
        self.error: tuple[str, str] | None = None
        self.server_request_id: str | None = None
        self.rate_limit: dict[str, str] = {}
        self.timings: dict[str, float] = {}
        self.flags: list[str] = []
        self.whole: bytes | None = None  # body of an answer that is no event stream
        self.in_reasoning = False
        self._sse: SseParser | None = None
        self._start = b""
        self.usage_output: int | None = None
        self._cumulative = 0
        self._counted = {"continuous_usage": 0, "token_ids": 0, "logprobs": 0}
        self._counted_chunks = dict.fromkeys(self._counted, 0)
        self._first_chunk: int | None = None

    # --- reading -----------------------------------------------------------------------------------------------

    def head(self, status: int, headers: list[tuple[bytes, bytes]], kernel_ns: int) -> None:
        self.status, self.first_byte_ns = status, kernel_ns
        content_type = b""
        for raw_name, value in headers:
            name = raw_name.lower()
            if name in _ID_HEADERS and self.server_request_id is None:
                self.server_request_id = value.decode("latin-1")[:100]
            elif name in (b"retry-after", b"retry-after-ms") or (
                b"ratelimit" in name and any(part in name for part in _RATE_PARTS)
            ):
                self.rate_limit[name.decode("latin-1")] = value.decode("latin-1")[:100]
            elif name == b"content-type":
                content_type = value.lower()
        if status == 200 and self.streamed and b"event-stream" not in content_type:
            self.flag("content_type")

    def flag(self, name: str) -> None:
        """Note a quirk, once."""
        if name not in self.flags:
            self.flags.append(name)

    def feed(self, data: bytes, kernel_ns: int) -> Iterator[int]:
        """Token counts (1 when the payload does not say) of the token-bearing chunks completed by this read."""
        self.last_read_ns = kernel_ns
        if self._sse is not None:
            payloads = self._sse.feed(data)
        elif self.whole is not None:
            if len(self.whole) < ERROR_BODY_BYTES or self.status == 200:
                self.whole += data
            return
        else:
            sniffed = self._sniff(data)
            if sniffed is None or self._sse is None:
                return
            payloads = self._sse.feed(sniffed)
        for index, payload in enumerate(payloads):
            tokens = self._payload(payload, index, kernel_ns)
            if tokens is not None:
                yield tokens

    def _sniff(self, data: bytes) -> bytes | None:
        """Decide by the body's first bytes whether this is an event stream; content types lie."""
        self._start += data
        text = self._start.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n")
        if not text:
            return None
        begun, self._start = self._start, b""
        if self.status == 200 and self.streamed and text[:1] not in (b"{", b"[", b"<"):
            self._sse = SseParser()
            return begun
        self.whole = begun
        return None

    def end(self) -> Iterator[int]:
        """The stream ended cleanly: what was held back counts."""
        if self._sse is not None:
            for index, payload in enumerate(self._sse.flush()):
                tokens = self._payload(payload, index, self.last_read_ns or 0)
                if tokens is not None:
                    yield tokens
            if self._sse.torn_end:
                self.flag("no_final_blank")
            if self._sse.oversize:
                self.flag("oversize_event")
        elif self.whole is not None and 200 <= self.status < 300:
            self._read_whole(self.whole)

    def _payload(self, payload: bytes, index: int, kernel_ns: int) -> int | None:
        """Take one event's facts in; its tokens when it bears any."""
        facts = deltas.read(payload)
        if facts is deltas.CONTENT:
            self.chunks += 1
            self.last_token_ns = kernel_ns
            self.in_reasoning = False
            if self.first_content_ns is None:
                self._first(facts, 1, kernel_ns)
            return 1
        if payload.strip() == b"[DONE]":
            self.done = True
            return None
        if facts.is_event and self.first_event_ns is None:
            self.first_event_ns = kernel_ns
        name = self._sse.event_names.get(index) if self._sse is not None else None
        if name == b"error" and facts.error is None:
            kind, text = deltas.error_text(payload)
            facts.error = (kind or "error", text)
        self._take(facts)
        return self._bearing(facts, kernel_ns)

    def _bearing(self, facts: deltas.Facts, kernel_ns: int) -> int | None:
        grown = 0
        if facts.cumulative is not None and facts.is_event:
            grown = facts.cumulative - self._cumulative
            if grown < 0:
                self.flag("usage_shrank")
                grown = 0
            self._cumulative = facts.cumulative
        elif facts.cumulative is not None:
            return None  # the usage chunk: not a token
        bears = facts.bears or (grown > 0 and facts.finish_reason is None)
        if not bears:
            return None
        if grown:
            tokens, source = grown, "continuous_usage"
        elif facts.tokens is not None and facts.token_source is not None:
            tokens, source = facts.tokens, facts.token_source
        else:
            tokens, source = 1, None
        if source is not None:
            self._counted[source] += tokens
            self._counted_chunks[source] += 1
        self.chunks += 1
        self.last_token_ns = kernel_ns
        self.in_reasoning = facts.reasoning and not facts.content
        if self.first_token_ns is None:
            self._first_chunk = tokens if source else None
        self._first(facts, tokens, kernel_ns)
        return tokens

    def _first(self, facts: deltas.Facts, tokens: int, kernel_ns: int) -> None:
        if self.first_event_ns is None:
            self.first_event_ns = kernel_ns
        if self.first_token_ns is None:
            self.first_token_ns = kernel_ns
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
        self.finish_reason = facts.finish_reason or self.finish_reason
        self.error = self.error or facts.error
        if facts.timings:
            self.timings |= facts.timings
        for flag in facts.flags:
            self.flag(flag)

    def _read_whole(self, body: bytes) -> None:
        """A JSON answer: its usage and finish count; it has no first token. Some proxies append `data: [DONE]`."""
        facts = deltas.read(body.partition(b"\ndata:")[0])
        if not facts.is_event and facts.error is None:
            kind, text = deltas.error_text(body)
            facts.error = (kind or "not_an_answer", text[:300] or "an empty answer")
        self._take(facts)
        self.chunks = 0
        if facts.error is None:
            self.last_token_ns = self.last_read_ns

    # --- judging -----------------------------------------------------------------------------------------------

    def counts(self, max_tokens: int | None) -> Counts:
        """Output tokens from the best source there is; see `finished.token_source`."""
        flags: list[str] = []
        source, output = self._best_source()
        if self.usage_output is not None and output is not None and source != "usage":
            if abs(self.usage_output - output) > _MISMATCH * max(self.usage_output, 1):
                flags.append("usage_mismatch")
            output = self.usage_output
        first = self._first_chunk
        if first is None and self.chunks and output == self.chunks:
            first = 1  # as many tokens as chunks: one each
        if max_tokens is not None and output is not None and output > max_tokens:
            flags.append("limit_ignored")
        return Counts(output, first, source, tuple(flags))

    def _best_source(self) -> tuple[str | None, int | None]:
        for source in ("continuous_usage", "token_ids", "logprobs"):
            if self._counted_chunks[source] and self._counted_chunks[source] == self.chunks:
                return source, self._counted[source]
        if self.usage_output is not None:
            return "usage", self.usage_output
        return ("chunks", self.chunks) if self.chunks else (None, None)

    @property
    def is_stream(self) -> bool:
        return self._sse is not None


def judge(answer: Answer, error: Exception | None, forced: str | None) -> Judgement:
    """The outcome of a request: what we did to it, else what the network did, else what the server said."""
    if forced is not None:
        texts = {"timeout": "no progress within the time limit", "stall": "the stream went silent"}
        return Judgement(forced, forced if forced in texts else None, texts.get(forced))
    if error is not None:
        return _of_exception(answer, error)
    if answer.status != 200:
        return _of_status(answer)
    if answer.error is not None:
        outcome = "protocol_error" if answer.error[0] == "not_an_answer" else "stream_error"
        return Judgement(outcome, *answer.error)
    if not answer.is_stream:
        return _of_whole(answer)
    return _of_stream(answer)


def _of_exception(answer: Answer, error: Exception) -> Judgement:
    kind, text = type(error).__name__, str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectTimeout):
        return Judgement("connect_error", "connect_timeout", text)
    if isinstance(error, httpx.ConnectError):
        return Judgement("tls_error" if text.startswith("TLS") else "connect_error", kind, text)
    if isinstance(error, httpx.TimeoutException):
        return Judgement("timeout", kind, text)
    if answer.error is not None:
        return Judgement("stream_error", *answer.error)
    if answer.status >= 400:
        return _of_status(answer)
    if answer.status == 200 and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        if answer.is_stream and answer.done:
            answer.flag("closed_early")  # everything had been said; the last chunk marker is missing
            return _of_stream(answer)
        return Judgement("truncated", kind, text)
    return Judgement("protocol_error", kind, text)


def _of_status(answer: Answer) -> Judgement:
    status = answer.status
    kind, text = deltas.error_text(answer.whole or b"")
    if 300 <= status < 400:
        return Judgement("protocol_error", "redirect", f"HTTP {status}: redirected; use the final URL")
    outcome = {429: "rate_limited", 503: "unavailable"}.get(status)
    if outcome is None:
        outcome = "http_4xx" if 400 <= status < 500 else "http_5xx" if status >= 500 else "protocol_error"
    return Judgement(outcome, kind or f"http_{status}", f"HTTP {status}: {text}" if text else f"HTTP {status}")


def _of_whole(answer: Answer) -> Judgement:
    if answer.whole is None:
        return Judgement("empty", "empty", "HTTP 200 without a body")
    if answer.streamed:
        return Judgement("not_streamed", "not_streamed", "a whole answer came although a stream was asked for")
    return Judgement("ok")


def _of_stream(answer: Answer) -> Judgement:
    if not (answer.finish_reason or answer.done or answer.usage_output is not None):
        if not answer.chunks:
            return Judgement("empty", "empty", "the stream ended without a token")
        return Judgement("truncated", "truncated", "the stream ended without finish_reason, usage or [DONE]")
    if not answer.chunks and not answer.usage_output:
        return Judgement("empty", "empty", "the stream held no token")
    if not answer.done:
        answer.flag("no_done")
    if answer.finish_reason == "content_filter":
        answer.flag("content_filter")
    elif answer.finish_reason is not None and answer.finish_reason not in _KNOWN_FINISH:
        answer.flag("finish_reason")
    return Judgement("ok")
