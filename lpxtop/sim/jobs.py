"""A request inside the simulated server: what it asks, and what is logged of it. No engine, no HTTP.

Prompts are counted as one token per 4 characters, rounded up, plus 4 per chat message and 3 for the answer's start;
a prompt given as token ids counts its ids.
"""

import random
from typing import Annotated, Any

import msgspec

CHARACTERS_PER_TOKEN = 4
TOKENS_PER_MESSAGE, ANSWER_TOKENS = 4, 3
COMPLETIONS_LIMIT = 16
"""The limit of a completion that names none; a chat may fill the context, as with vLLM."""
ANSWER_SHAPE, ANSWER_SCALE = 3, 60
"""Lengths of answers that end by themselves: gamma distributed, 180 tokens on average."""


class BadRequest(Exception):
    """The request is not acceptable: status, error type, message."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind

    def body(self) -> dict[str, Any]:
        """vLLM's error shape."""
        return {"error": {"message": str(self), "type": self.kind, "param": None, "code": self.status}}


def _refused(message: str) -> BadRequest:
    return BadRequest(400, "BadRequestError", message)


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Part(msgspec.Struct, frozen=True):
    """A part of a message's content; only text counts."""

    text: str = ""


class Message(msgspec.Struct, frozen=True):
    """A chat message."""

    role: str
    content: str | list[Part] | None = None

    def text(self) -> str:
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content or ())


Limit = Annotated[int, msgspec.Meta(ge=1)]


class Body(msgspec.Struct, frozen=True):
    """What the two completion endpoints read of a request; other fields are taken and ignored, as vLLM does."""

    model: str | None = None
    messages: list[Message] = []
    prompt: str | list[int] | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request. `output_tokens` is how many it will get: its limit, or a length drawn by seed."""

    chat: bool
    prompt: str | list[int]
    prompt_tokens: int
    max_tokens: int
    output_tokens: int
    stream: bool
    include_usage: bool
    continuous_usage: bool


_decode_body = msgspec.json.Decoder(Body).decode


def parse_ask(body: bytes, *, chat: bool, model: str, max_model_len: int, draw: random.Random) -> Ask:
    """Read a completion request. Raises BadRequest in the shapes vLLM uses."""
    data = decode_body(body)
    if data.model is not None and data.model != model:
        raise BadRequest(404, "NotFoundError", f"The model `{data.model}` does not exist.")
    if data.n not in (None, 1):
        raise _refused("n must be 1 here")
    prompt, prompt_tokens = _prompt(data, chat=chat)
    room = max_model_len - prompt_tokens
    limit = data.max_completion_tokens or data.max_tokens or (room if chat else COMPLETIONS_LIMIT)
    if limit > room or room < 1:
        raise _refused(
            f"This model's maximum context length is {max_model_len} tokens; {prompt_tokens} of the prompt and "
            f"{max(limit, 1)} of the answer were requested."
        )
    options = data.stream_options or StreamOptions()
    if data.stream_options and not data.stream:
        raise _refused("stream_options can only be set when stream is true")
    return Ask(
        chat=chat, prompt=prompt, prompt_tokens=prompt_tokens, max_tokens=limit,
        output_tokens=_length(data, limit, draw), stream=bool(data.stream),
        include_usage=bool(options.include_usage), continuous_usage=bool(options.continuous_usage_stats),
    )  # fmt: skip


def decode_body(body: bytes) -> Body:
    """Raises BadRequest, naming the field that is wrong."""
    try:
        return _decode_body(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(f"the body is not acceptable: {error}") from None


def _length(data: Body, limit: int, draw: random.Random) -> int:
    least = data.min_tokens or 0
    if least > limit:
        raise _refused(f"min_tokens must be less than or equal to max_tokens={limit}, got {least}.")
    if data.ignore_eos:
        return limit
    return max(1, least, min(limit, round(draw.gammavariate(ANSWER_SHAPE, ANSWER_SCALE))))


def _prompt(data: Body, *, chat: bool) -> tuple[str | list[int], int]:
    if chat and not data.messages:
        raise _refused("messages must be a list with at least one message")
    if not chat and not data.prompt:
        raise _refused("prompt must be a string or a list of token ids")
    if chat or data.prompt is None:
        text = "".join(message.text() for message in data.messages)
        return text, count_tokens(text) + TOKENS_PER_MESSAGE * len(data.messages) + ANSWER_TOKENS
    return data.prompt, count_tokens(data.prompt)


def prompt_size(data: Body) -> int:
    """Tokens of what /tokenize is asked: the same count that a request would be charged."""
    return _prompt(data, chat=bool(data.messages))[1]


def count_tokens(prompt: str | list[int]) -> int:
    return -(-len(prompt) // CHARACTERS_PER_TOKEN) if isinstance(prompt, str) else len(prompt)


def block_hashes(prompt: str | list[int], block_tokens: int) -> tuple[int, ...]:
    """Chained hashes of the prompt's whole blocks: equal prefixes give equal leading hashes."""
    size = block_tokens * (CHARACTERS_PER_TOKEN if isinstance(prompt, str) else 1)
    hashes: list[int] = []
    chained = 0
    for start in range(0, len(prompt) - size + 1, size):
        block = prompt[start : start + size]
        chained = hash((chained, block if isinstance(block, str) else tuple(block)))
        hashes.append(chained)
    return tuple(hashes)


class Record(msgspec.Struct, kw_only=True):
    """The truth about one request, for /sim/log. Times are CLOCK_MONOTONIC ns; `writes` only with --stamp.

    `outcome`: running, ok, abort (the client left), http_<status>, or the trouble made: stall, cut, error.
    """

    id: str
    request_id: str | None
    received_ns: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_write_ns: int | None = None
    last_write_ns: int | None = None
    writes: list[int] = []
    tokens_per_write: list[int] = []
    tokens: int = 0
    preemptions: int = 0
    outcome: str = "running"
