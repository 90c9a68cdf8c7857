"""How a request ended: what we did to it, else what the network did, else what the server said. Pure judgement."""

import ssl

import httpx
import msgspec

from lpxtop.load import deltas
from lpxtop.load.answers import Answer
from lpxtop.load.exchange import TlsError

UNREADABLE_MOST = 10
"""A few undecodable events are a quirk; more, and this is no answer."""
_KNOWN_FINISH = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter", "eos_token",
                           "stop_sequence", "end_turn"})  # fmt: skip
_FORCED = {"timeout": "no progress within the time limit", "stall": "the stream went silent"}


class Judgement(msgspec.Struct, frozen=True):
    """How a request ended."""

    outcome: str
    error_type: str | None = None
    error: str | None = None


def judge(answer: Answer, error: Exception | None, forced: str | None) -> Judgement:
    """The outcome. `error` is what the transport raised, `forced` how we ended it ourselves."""
    if forced == "stall" and answer.done:
        answer.flag("not_closed")  # everything had been said; the server did not end the answer
        return _of_stream(answer)
    if forced is not None:
        return Judgement(forced, forced if forced in _FORCED else None, _FORCED.get(forced))
    if error is not None:
        return _of_exception(answer, error)
    if not answer.succeeded:
        return _of_status(answer)
    if answer.error is not None:
        outcome = "protocol_error" if answer.error[0] == "not_an_answer" else "stream_error"
        return Judgement(outcome, *answer.error)
    return _of_stream(answer) if answer.is_stream else _of_whole(answer)


def _of_exception(answer: Answer, error: Exception) -> Judgement:
    kind, text = type(error).__name__, str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectTimeout):
        return Judgement("connect_error", "connect_timeout", text)
    if isinstance(error, httpx.ConnectError | httpx.ProxyError):
        return Judgement("tls_error" if _is_tls(error) else "connect_error", kind, text)
    if isinstance(error, httpx.TimeoutException):
        return Judgement("timeout", kind, text)
    if answer.error is not None:
        return Judgement("stream_error", *answer.error)
    if answer.status and not answer.succeeded:
        return _of_status(answer)
    if answer.succeeded and isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        if answer.is_stream and answer.done:
            answer.flag("closed_early")  # everything had been said; the last chunk marker is missing
            return _of_stream(answer)
        return Judgement("truncated", kind, text)
    return Judgement("protocol_error", kind, text)


def _is_tls(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, TlsError | ssl.SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _of_status(answer: Answer) -> Judgement:
    status = answer.status
    kind, text = deltas.error_text(bytes(answer.whole or b""))
    if 300 <= status < 400:
        to = f" to {answer.location}" if answer.location else ""
        return Judgement("protocol_error", "redirect", f"HTTP {status}: redirected{to}; not followed, use that URL")
    outcome = {429: "rate_limited", 503: "unavailable"}.get(status)
    if outcome is None:
        outcome = "http_4xx" if 400 <= status < 500 else "http_5xx" if status >= 500 else "protocol_error"
    return Judgement(outcome, kind or f"http_{status}", f"HTTP {status}: {text}" if text else f"HTTP {status}")


def _of_whole(answer: Answer) -> Judgement:
    if answer.whole is None:
        return Judgement("empty", "empty", f"HTTP {answer.status} without a body")
    if answer.streamed:
        return Judgement("not_streamed", "not_streamed", "a whole answer came although a stream was asked for")
    return Judgement("ok")


def _of_stream(answer: Answer) -> Judgement:
    if answer.error is not None:
        return Judgement("stream_error", *answer.error)
    if answer.unreadable > UNREADABLE_MOST or (answer.unreadable and not answer.chunks):
        said = "" if answer.chunks else f": {answer.unreadable_start.decode('utf-8', 'replace')}"
        return Judgement("protocol_error", "not_json", f"{answer.unreadable} events of the stream are not JSON{said}")
    if not (answer.finish_reason or answer.done or answer.usage_output is not None):
        if not answer.chunks:
            return Judgement("empty", "empty", "the stream ended without a token")
        return Judgement("truncated", "truncated", "the stream ended without finish_reason, usage or [DONE]")
    if not answer.chunks and not answer.usage_output:
        return Judgement("empty", "empty", "the stream held no token")
    return _ok(answer)


def _ok(answer: Answer) -> Judgement:
    if not answer.done:
        answer.flag("no_done")
    if answer.finish_reason == "content_filter":
        answer.flag("content_filter")
    elif answer.finish_reason is not None and answer.finish_reason not in _KNOWN_FINISH:
        answer.flag("finish_reason")
    return Judgement("ok")
