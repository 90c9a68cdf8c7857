"""A request inside the simulated server: what it asks, the chunks it is sent, what is logged of it. No engine, no HTTP.

Prompts are counted as one token per 4 characters, rounded up, plus 4 per chat message and 3 for the answer's start.
"""

import random
import time
from typing import Any

import msgspec

from lpxtop.sim.engine import Sequence

CHARACTERS_PER_TOKEN = 4
WORDS = (" the", " of", " a load", " wind", " in", " river", " stone", " runs", " and", " light", " on", " water",
         " slow", " bright", " iron", " north")  # fmt: skip


class BadRequest(Exception):
    """The request is not acceptable: (status, type, message)."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind

    def body(self) -> dict[str, Any]:
        """vLLM's error shape."""
        return {"error": {"message": str(self), "type": self.kind, "param": None, "code": self.status}}


class Ask(msgspec.Struct, kw_only=True):
    """A validated request."""

    chat: bool
    text: str
    prompt_tokens: int
    max_tokens: int
    output_tokens: int
    stream: bool
    include_usage: bool
    continuous_usage: bool


def parse_ask(body: bytes, *, chat: bool, model: str, max_model_len: int, draw: random.Random) -> Ask:
    """Read a completion request. Raises BadRequest in the shapes vLLM uses."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise BadRequest(400, "BadRequestError", "the body is not JSON") from None
    if not isinstance(data, dict):
        raise BadRequest(400, "BadRequestError", "the body is not an object")
    if data.get("model") != model:
        raise BadRequest(404, "NotFoundError", f"The model `{data.get('model')}` does not exist.")
    text, messages = _prompt_text(data, chat=chat)
    prompt_tokens = count_tokens(text) + 4 * messages + (3 if chat else 0)
    limit = data.get("max_completion_tokens", data.get("max_tokens", 16))
    if not isinstance(limit, int) or limit < 1:
        raise BadRequest(400, "BadRequestError", "max_tokens must be at least 1")
    if prompt_tokens + limit > max_model_len:
        raise BadRequest(
            400, "BadRequestError",
            f"This model's maximum context length is {max_model_len} tokens; {prompt_tokens} + {limit} were requested.",
        )  # fmt: skip
    options = data.get("stream_options") or {}
    stream = bool(data.get("stream"))
    if options and not stream:
        raise BadRequest(400, "BadRequestError", "stream_options can only be set when stream is true")
    least = data.get("min_tokens") or 0
    drawn = limit if data.get("ignore_eos") else max(1, least, min(limit, round(draw.gammavariate(3, 60))))
    return Ask(
        chat=chat, text=text, prompt_tokens=prompt_tokens, max_tokens=limit, output_tokens=min(drawn, limit),
        stream=stream, include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
    )  # fmt: skip


def _prompt_text(data: dict[str, Any], *, chat: bool) -> tuple[str, int]:
    if chat:
        messages = data.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest(400, "BadRequestError", "messages must be a list with at least one message")
        return "".join(_content(message) for message in messages), len(messages)
    prompt = data.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise BadRequest(400, "BadRequestError", "prompt must be a string")
    return prompt, 0


def _content(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def count_tokens(text: str) -> int:
    return -(-len(text) // CHARACTERS_PER_TOKEN)


def block_hashes(text: str, block_tokens: int) -> tuple[int, ...]:
    """Chained hashes of the prompt's whole blocks: equal prefixes give equal leading hashes."""
    size = block_tokens * CHARACTERS_PER_TOKEN
    hashes: list[int] = []
    chained = 0
    for start in range(0, len(text) - size + 1, size):
        chained = hash((chained, text[start : start + size]))
        hashes.append(chained)
    return tuple(hashes)


class Record(msgspec.Struct, kw_only=True):
    """The truth about one request, for /sim/log. Times are CLOCK_MONOTONIC ns; `writes` only with --stamp."""

    id: str
    request_id: str | None
    received_ns: int
    prompt_tokens: int = 0
    first_write_ns: int | None = None
    last_write_ns: int | None = None
    writes: list[int] = []
    tokens_per_write: list[int] = []
    tokens: int = 0
    preemptions: int = 0
    outcome: str = "running"


class Chunks:
    """Builds the event-stream chunks of one answer."""

    def __init__(self, ask: Ask, answer_id: str, model: str, *, stamp: bool, seed: int) -> None:
        kind = "chat.completion.chunk" if ask.chat else "text_completion"
        created = int(time.time())
        self._head = f'data: {{"id":"{answer_id}","object":"{kind}","created":{created},"model":"{model}","choices":'
        self._ask, self._stamp = ask, stamp
        self._words = random.Random(seed)
        self._sent = 0

    def role(self) -> bytes:
        """The chat's first chunk: only a role."""
        delta = '[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return (self._head + delta + self._usage() + "}\n\n").encode()

    def content(self, tokens: int, finish: str | None, write_ns: int) -> bytes:
        """A chunk of `tokens` tokens, as vLLM shapes it; the finish reason rides on the last one."""
        text = self._words.choice(WORDS) if tokens == 1 else "".join(self._words.choices(WORDS, k=tokens))
        self._sent += tokens
        body = f'"delta":{{"content":"{text}"}}' if self._ask.chat else f'"text":"{text}"'
        reason = f'"{finish}"' if finish else "null"
        stamp = f',"lpx_write_ns":{write_ns}' if self._stamp else ""
        choice = f'[{{"index":0,{body},"logprobs":null,"finish_reason":{reason}}}]'
        return f"{self._head}{choice}{self._usage()}{stamp}}}\n\n".encode()

    def _usage(self) -> str:
        if not self._ask.continuous_usage:
            return ""
        return ',"usage":' + msgspec.json.encode(usage(self._ask, self._sent, 0)).decode()

    def tail(self, cached: int) -> bytes:
        """The usage chunk, where it was asked for, and [DONE]."""
        done = b"data: [DONE]\n\n"
        if not self._ask.include_usage:
            return done
        found = msgspec.json.encode(usage(self._ask, self._sent, cached)).decode()
        return f'{self._head}[],"usage":{found}}}\n\n'.encode() + done

    def error(self) -> bytes:
        body = {"error": {"message": "the engine died (simulated)", "type": "InternalServerError", "code": 500}}
        return b"data: " + msgspec.json.encode(body) + b"\n\n"


def usage(ask: Ask, completion: int, cached: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt_tokens": ask.prompt_tokens,
        "total_tokens": ask.prompt_tokens + completion,
        "completion_tokens": completion,
    }
    if cached:
        found["prompt_tokens_details"] = {"cached_tokens": cached}
    return found


def whole_answer(ask: Ask, sequence: Sequence, *, answer_id: str, model: str, finish: str, seed: int) -> dict[str, Any]:
    """The answer to a request without streaming."""
    text = "".join(random.Random(seed).choices(WORDS, k=sequence.generated)).strip()
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
    choice |= {"message": {"role": "assistant", "content": text}} if ask.chat else {"text": text}
    return {
        "id": answer_id,
        "object": "chat.completion" if ask.chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage(ask, sequence.generated, sequence.cached),
    }
