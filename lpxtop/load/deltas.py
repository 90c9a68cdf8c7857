"""One streamed payload to facts: does it bear tokens, of which kind, what usage, finish or error it carries.

Accepts whatever shape a server sends; never raises for JSON. Must not keep state between payloads or read a clock.
"""

from typing import Any

import msgspec

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_FATAL_FINISH = frozenset({"abort", "error", "insufficient_system_resource", "parse_error"})
TIMING_OBJECTS = ("timings", "metrics", "perf_metrics")


class Facts(msgspec.Struct):
    """What a payload says. `tokens` is the number of tokens in this chunk when the payload itself tells it.

    `cumulative` is continuous usage's completion count so far. `error` is (type, message).
    """

    is_event: bool = False  # has choices: what some tools call the first token
    bears: bool = False
    reasoning: bool = False
    content: bool = False
    tokens: int | None = None
    token_source: str | None = None
    cumulative: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: tuple[str, str] | None = None
    timings: dict[str, float] | None = None
    flags: tuple[str, ...] = ()


class _Delta(msgspec.Struct, forbid_unknown_fields=True):
    """A delta of the common kind. Any other field may bear tokens (reasoning, tool calls), so it must be looked at."""

    content: str | None = None
    role: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    index: int = 0
    finish_reason: str | None = None
    logprobs: None = None
    token_ids: None = None


class _Chunk(msgspec.Struct):
    choices: tuple[_Choice]
    usage: None = None
    error: None = None
    timings: None = None
    metrics: None = None
    x_groq: None = None
    perf_metrics: None = None


_decode_common = msgspec.json.Decoder(_Chunk).decode

CONTENT = Facts(is_event=True, bears=True, content=True)
"""The facts of a plain content chunk: shared, never changed."""
EMPTY = Facts(is_event=True)


def read(payload: bytes) -> Facts:
    """The facts of one `data` payload (not `[DONE]`)."""
    try:
        choice = _decode_common(payload).choices[0]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _read_any(payload)
    if choice.finish_reason is None and choice.index == 0:
        return CONTENT if choice.delta.content else EMPTY
    return _read_any(payload)


def _read_any(payload: bytes) -> Facts:
    flags: tuple[str, ...] = ()
    try:
        data = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            data = msgspec.json.decode(payload.decode("utf-8", "replace"))
            flags = ("bad_utf8",)
        except (msgspec.DecodeError, RecursionError):
            return Facts(flags=("bad_json",))
    if not isinstance(data, dict):
        return Facts(flags=("bad_json",))
    facts = Facts(flags=flags)
    facts.error = error_of(data)
    _read_usage(data, facts)
    _read_timings(data, facts)
    choices = data.get("choices")
    if isinstance(choices, list) and choices:
        facts.is_event = True
        for choice in choices:
            if isinstance(choice, dict):
                _read_choice(choice, facts)
    return facts


def _read_choice(choice: dict[str, Any], facts: Facts) -> None:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        _read_delta(delta, facts)
    text = choice.get("text")
    if isinstance(text, str) and text:
        facts.bears = facts.content = True
    message = choice.get("message")
    if isinstance(message, dict):  # a whole answer: not a stream's chunk, but it bears tokens
        _read_delta(message, facts)
    finish = choice.get("finish_reason")
    if isinstance(finish, str):
        facts.finish_reason = finish
        if finish in _FATAL_FINISH and facts.error is None:
            facts.error = (finish, f"the server ended the answer with finish_reason {finish}")
    _read_token_ids(choice, facts)


def _read_delta(delta: dict[str, Any], facts: Facts) -> None:
    for field in ("content", "refusal"):
        value = delta.get(field)
        if (isinstance(value, str) and value) or (isinstance(value, list) and value):
            facts.bears = facts.content = True
    for field in REASONING_FIELDS:
        value = delta.get(field)
        if isinstance(value, str) and value:
            facts.bears = facts.reasoning = True
    details = delta.get("reasoning_details")
    if isinstance(details, list) and any(_text_in(detail) for detail in details):
        facts.bears = facts.reasoning = True
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else [{"function": delta.get("function_call")}]:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and (function.get("name") or function.get("arguments")):
            facts.bears = facts.content = True


def _text_in(detail: Any) -> bool:
    return isinstance(detail, dict) and any(detail.get(field) for field in ("text", "summary", "data"))


def _read_token_ids(choice: dict[str, Any], facts: Facts) -> None:
    """Tokens of the chunk from token ids, failing that from logprobs."""
    for field in ("token_ids", "output_ids"):
        ids = choice.get(field)
        if isinstance(ids, list) and ids:
            facts.tokens, facts.token_source = len(ids), "token_ids"
            facts.bears = True
            return
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, dict):
        for field in ("content", "tokens"):
            entries = logprobs.get(field)
            if isinstance(entries, list) and entries:
                facts.tokens, facts.token_source = len(entries), "logprobs"
                return


def _read_usage(data: dict[str, Any], facts: Facts) -> None:
    usage = data.get("usage")
    if not isinstance(usage, dict):
        groq = data.get("x_groq")
        usage = groq.get("usage") if isinstance(groq, dict) else None
    if not isinstance(usage, dict):
        return
    facts.input_tokens = _integer(usage.get("prompt_tokens", usage.get("input_tokens")))
    facts.output_tokens = _integer(usage.get("completion_tokens", usage.get("output_tokens")))
    facts.cumulative = facts.output_tokens
    for container, field, name in (
        ("completion_tokens_details", "reasoning_tokens", "reasoning_tokens"),
        ("prompt_tokens_details", "cached_tokens", "cached_tokens"),
    ):
        details = usage.get(container)
        if isinstance(details, dict):
            setattr(facts, name, _integer(details.get(field)))
    if facts.reasoning_tokens is None:
        facts.reasoning_tokens = _integer(usage.get("reasoning_tokens"))
    times = {name: _seconds_to_ms(usage.get(name)) for name in ("queue_time", "prompt_time", "completion_time")}
    known = {f"{name.removesuffix('_time')}_ms": value for name, value in times.items() if value is not None}
    if known:
        facts.timings = known


def _read_timings(data: dict[str, Any], facts: Facts) -> None:
    """The server's own timings as it names them, numbers only: llama.cpp, vLLM per-request metrics, Fireworks."""
    for field in TIMING_OBJECTS:
        found = data.get(field)
        if isinstance(found, dict):
            numbers = {
                str(name): float(value)
                for name, value in found.items()
                if isinstance(value, int | float) and not isinstance(value, bool)
            }
            facts.timings = {**(facts.timings or {}), **numbers} or facts.timings
    if facts.timings and facts.cached_tokens is None and "cache_n" in facts.timings:
        facts.cached_tokens = int(facts.timings["cache_n"])


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _seconds_to_ms(value: Any) -> float | None:
    return value * 1000.0 if isinstance(value, int | float) and not isinstance(value, bool) else None


def error_of(data: Any) -> tuple[str, str] | None:
    """(type, message) of any error shape servers use; None when the object is no error.

    Shapes: {"error": {…}}, {"error": "…"}, {"object": "error", "message": …}, {"detail": "…" or […]}.
    """
    if not isinstance(data, dict):
        return None
    error = data.get("error")
    if isinstance(error, dict):
        kind = error.get("type") or error.get("code") or "error"
        message = error.get("message") or error.get("detail") or msgspec.json.encode(error).decode()
        return str(kind), str(message)
    if isinstance(error, str) and error:
        return str(data.get("error_type") or data.get("type") or "error"), error
    if data.get("object") == "error" or data.get("type") == "error":
        return str(data.get("code") or data.get("type") or "error"), str(data.get("message") or "no message")
    detail = data.get("detail")
    if detail and "choices" not in data:
        return "detail", detail if isinstance(detail, str) else _details(detail)
    return None


def _details(detail: Any) -> str:
    """FastAPI's validation list as `field: message`."""
    if isinstance(detail, list):
        return "; ".join(
            f"{'.'.join(map(str, item.get('loc', ())))}: {item.get('msg', '')}"
            for item in detail
            if isinstance(item, dict)
        )
    return str(detail)


def error_text(body: bytes) -> tuple[str | None, str]:
    """(type, message) of an error response's body: JSON of any shape, else the text without HTML tags."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        data = None
    if isinstance(data, list) and data:
        data = data[0]
    found = error_of(data)
    if found:
        return found
    if isinstance(data, dict) and isinstance(data.get("message"), str):
        return None, data["message"]
    text = body[:2000].decode("utf-8", "replace")
    if "<" in text:
        import re

        text = re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", text, flags=re.S | re.I)
    return None, " ".join(text.split())
