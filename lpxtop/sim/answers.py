"""The bytes of an answer, as vLLM shapes them: stream chunks from a template, or one object. No engine, no HTTP."""

import random
import time
from typing import Any

import msgspec

from lpxtop.sim.jobs import Ask

WORDS = (" the", " of", " a load", " wind", " in", " river", " stone", " runs", " and", " light", " on", " water",
         " slow", " bright", " iron", " north")  # fmt: skip
DONE = b"data: [DONE]\n\n"


class Chunks:
    """Builds the event-stream chunks of one answer."""

    def __init__(self, ask: Ask, answer_id: str, model: str, *, stamp: bool, seed: int) -> None:
        kind = "chat.completion.chunk" if ask.chat else "text_completion"
        same = {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}
        self._head = "data: " + msgspec.json.encode(same).decode()[:-1] + ',"choices":'
        self._ask, self._stamp = ask, stamp
        self._words = random.Random(seed)
        self._sent = 0

    def role(self) -> bytes:
        """The chat's first chunk: only a role."""
        delta = '[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return (self._head + delta + self._usage() + "}\n\n").encode()

    def content(self, tokens: int, finish: str | None, write_ns: int) -> bytes:
        """A chunk of `tokens` tokens; the finish reason rides on the last one."""
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
        if not self._ask.include_usage:
            return DONE
        found = msgspec.json.encode(usage(self._ask, self._sent, cached)).decode()
        return f'{self._head}[],"usage":{found}}}\n\n'.encode() + DONE


def stream_error() -> bytes:
    """What vLLM sends into a stream whose engine fails: an error object, and the end."""
    body = {"error": {"message": "the engine died (simulated)", "type": "InternalServerError", "code": 500}}
    return b"data: " + msgspec.json.encode(body) + b"\n\n" + DONE


def usage(ask: Ask, completion: int, cached: int) -> dict[str, Any]:
    """The `usage` object."""
    found: dict[str, Any] = {
        "prompt_tokens": ask.prompt_tokens,
        "total_tokens": ask.prompt_tokens + completion,
        "completion_tokens": completion,
    }
    if cached:
        found["prompt_tokens_details"] = {"cached_tokens": cached}
    return found


def whole_answer(ask: Ask, *, answer_id: str, model: str, finish: str, cached: int, seed: int) -> dict[str, Any]:
    """The answer to a request without streaming."""
    text = "".join(random.Random(seed).choices(WORDS, k=ask.output_tokens)).strip()
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
    choice |= {"message": {"role": "assistant", "content": text}} if ask.chat else {"text": text}
    return {
        "id": answer_id,
        "object": "chat.completion" if ask.chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage(ask, ask.output_tokens, cached),
    }
