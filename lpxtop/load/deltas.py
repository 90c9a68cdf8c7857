"""One streamed payload to facts: does it bear tokens, of which kind, what usage, finish or error it carries.

Accepts whatever shape a server sends; never raises for JSON. Must not keep state between payloads or read a clock.
"""

import math
import re
from typing import Any

import msgspec

TEXT_BYTES = 16_384
"""Of a body that is no JSON, so much is looked at for words."""
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_FATAL_FINISH = frozenset({"abort", "error", "insufficient_system_resource", "parse_error"})
MOST_TIMINGS = 32
TIMING_OBJECTS = ("timings", "metrics", "perf_metrics")


class Facts(msgspec.Struct, gc=False):
    """What a payload says. `tokens` is the number of tokens in this chunk when the payload itself tells it.

    `cumulative` is the completion count so far of a payload with choices (continuous usage, or final usage in the
    last chunk); `output_tokens` that of a usage payload without choices. `index` is the choice's (n > 1). `error` is
    (type, message). `common` says that there is nothing in it but text and counts.
    """

    is_event: bool = False  # has choices: what some tools call the first token
    bears: bool = False
    reasoning: bool = False
    content: bool = False
    common: bool = False
    index: int = 0
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


class _Delta(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A delta of the common kind. Any field not named here may bear tokens, so such a delta must be looked at."""

    content: str | None = None
    role: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    tool_calls: None = None
    function_call: None = None
    reasoning_details: None = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Delta | None = None
    text: str | None = None
    index: int = 0
    message: None = None
    finish_reason: None = None
    logprobs: None = None
    token_ids: None = None
    output_ids: None = None


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int
    prompt_tokens: int | None = None
    completion_tokens_details: None = None
    prompt_tokens_details: None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: tuple[_Choice]
    usage: _Usage | None = None
    error: None = None
    timings: None = None
    metrics: None = None
    x_groq: None = None
    perf_metrics: None = None


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode_common = msgspec.json.Decoder(_Chunk).decode

CONTENT = Facts(is_event=True, bears=True, content=True, common=True)
"""The facts of a plain content chunk: shared, never changed."""
REASONING = Facts(is_event=True, bears=True, reasoning=True, common=True)
EMPTY = Facts(is_event=True, common=True)


def read(payload: bytes) -> Facts:
    """The facts of one `data` payload (not `[DONE]`)."""
    try:
        chunk = _decode_common(payload)
    except _UNREADABLE:
        return _read_any(payload)
    choice = chunk.choices[0]
    delta = choice.delta
    if choice.index or (choice.text and delta is not None):
        return _read_any(payload)
    if delta is None:
        facts = CONTENT if choice.text else EMPTY
    elif delta.content:
        facts = CONTENT if not (delta.reasoning_content or delta.reasoning) else _read_any(payload)
    else:
        facts = REASONING if delta.reasoning_content or delta.reasoning else EMPTY
    usage = chunk.usage
    return facts if usage is None or not facts.common else _counted(facts, usage)


def _counted(facts: Facts, usage: _Usage) -> Facts:
    """The same with continuous usage."""
    if usage.completion_tokens < 0:
        return facts
    return Facts(
        is_event=True, common=True, bears=facts.bears, reasoning=facts.reasoning, content=facts.content,
        cumulative=usage.completion_tokens, input_tokens=usage.prompt_tokens,
    )  # fmt: skip


def _read_any(payload: bytes) -> Facts:
    flags: tuple[str, ...] = ()
    try:
        data = msgspec.json.decode(payload)
    except _UNREADABLE:
        try:
            data = msgspec.json.decode(payload.decode("utf-8", "replace"))
            flags = ("bad_utf8",)
        except _UNREADABLE:
            return Facts(flags=("bad_json",))
    if not isinstance(data, dict):
        return Facts(flags=("bad_json",))
    facts = Facts(flags=flags)
    facts.error = error_of(data)
    choices = data.get("choices")
    if isinstance(choices, list) and choices:
        facts.is_event = True
        for choice in choices:
            if isinstance(choice, dict):
                _read_choice(choice, facts)
    _read_usage(data, facts)
    _read_timings(data, facts)
    return facts


def _read_choice(choice: dict[str, Any], facts: Facts) -> None:
    facts.index = _integer(choice.get("index")) or 0
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
        if isinstance(value, str) and value:
            facts.bears = facts.content = True
        elif isinstance(value, list):
            _read_parts(value, facts)
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


def _read_parts(parts: list[Any], facts: Facts) -> None:
    """Content as a list of parts, thinking among them."""
    for part in parts:
        thinks = isinstance(part, dict) and part.get("type") in ("thinking", "reasoning")
        facts.bears = True
        facts.reasoning |= thinks
        facts.content |= not thinks


def _text_in(detail: Any) -> bool:
    return isinstance(detail, dict) and any(detail.get(field) for field in ("text", "summary", "data"))


def _read_token_ids(choice: dict[str, Any], facts: Facts) -> None:
    """Tokens of the chunk from token ids, failing that from logprobs."""
    for field in ("token_ids", "output_ids"):
        ids = choice.get(field)
        if isinstance(ids, list) and ids:
            facts.tokens, facts.token_source = len(ids), "token_ids"
            facts.bears = facts.bears or facts.finish_reason is None
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
    output = _integer(usage.get("completion_tokens", usage.get("output_tokens")))
    if facts.is_event:
        facts.cumulative = output
    else:
        facts.output_tokens = output
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
            numbers = {str(name)[:40]: _number(value) for name, value in list(found.items())[:MOST_TIMINGS]}
            known = {name: value for name, value in numbers.items() if value is not None}
            facts.timings = {**(facts.timings or {}), **known} or None
    if facts.timings and facts.cached_tokens is None and "cache_n" in facts.timings:
        facts.cached_tokens = int(facts.timings["cache_n"])


def _number(value: Any) -> float | None:
    """A JSON number that is one: no boolean, no infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e18 or not math.isfinite(value):
        return None
    return float(value)


def _integer(value: Any) -> int | None:
    """A count; some proxies write 12.0."""
    number = _number(value)
    return int(number) if number is not None and number >= 0 and number == int(number) else None


def _seconds_to_ms(value: Any) -> float | None:
    number = _number(value)
    return None if number is None else number * 1000.0


def error_of(data: Any) -> tuple[str, str] | None:
    """(type, message) of any error shape servers use; None when the object is no error.

    Shapes: {"error": {…}}, {"error": "…"}, {"object": "error", "message": …}, {"detail": "…" or […]}.
    """
    if not isinstance(data, dict):
        return None
    error = data.get("error")
    if isinstance(error, dict) and error:
        kind = error.get("type") or error.get("code") or "error"
        message = error.get("message") or error.get("detail") or msgspec.json.encode(error).decode()
        return str(kind), str(message)
    if isinstance(error, str) and error:
        return str(data.get("error_type") or data.get("type") or "error"), error
    if data.get("object") == "error" or data.get("type") == "error":
        kind = data.get("type") if data.get("type") != "error" else None
        return str(kind or data.get("code") or "error"), str(data.get("message") or "no message")
    detail = data.get("detail")
    if detail and "choices" not in data:
        return "detail", detail if isinstance(detail, str) else _details(detail)
    return None


def _details(detail: Any) -> str:
    """FastAPI's validation list as `field: message`; anything else as it is."""
    if not isinstance(detail, list):
        return str(detail)
    return "; ".join(_detail(item) if isinstance(item, dict) else str(item) for item in detail)


def _detail(item: dict[str, Any]) -> str:
    where = item.get("loc")
    place = ".".join(map(str, where)) if isinstance(where, list) else ""
    message = str(item.get("msg") or item.get("message") or "")
    return f"{place}: {message}" if place else message


_TAGS = re.compile(r"<(script|style).*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
_MESSAGE_FIELDS = ("message", "Message", "msg", "title", "reason")


def error_text(body: bytes) -> tuple[str | None, str]:
    """(type, message) of an error response's body: JSON of any shape, else the text without HTML tags."""
    try:
        data = msgspec.json.decode(body)
    except _UNREADABLE:
        data = None
    if isinstance(data, list) and data:
        data = data[0]
    found = error_of(data)
    if found:
        return found
    if isinstance(data, dict):
        for field in _MESSAGE_FIELDS:
            if isinstance(data.get(field), str):
                return None, data[field]
    text = body[:TEXT_BYTES].decode("utf-8", "replace")
    return None, " ".join((_TAGS.sub(" ", text) if "<" in text else text).split())
