"""One prompt to an endpoint and what came back, with the times of its pieces. Must not judge the answer."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from lpxtop.load import refusals
from lpxtop.load.deltas import error_text
from lpxtop.load.scrub import scrubbed
from lpxtop.load.sse import SseParser
from lpxtop.plan import Negotiated, Plan, Secrets

ANSWER_TOKENS = 64
STREAM_TOKENS = 48
QUESTION = "What is the capital of France? Answer with the one word."
EXPECTED = "paris"
COUNT = "Count from 1 to 40, one number after another, separated by spaces. Do not stop before 40."
_MOST_BYTES = 1 << 20
ANSWER_S = 30.0
"""A healthy model on a busy server may need this long for a short answer; a check of 3 s would call it dead."""


@dataclass(frozen=True)
class Asked:
    """Whom to ask and in which shape."""

    plan: Plan
    secrets: Secrets = field(repr=False)
    shape: Negotiated
    model: str


@dataclass
class Reply:
    """An answer to a prompt. Times are seconds since it was sent; `reads` are the times of reads that bore text."""

    status: int | None = None
    problem: str = ""
    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    output_tokens: int | None = None
    input_tokens: int | None = None
    limit: int = 0
    reads: list[float] = field(default_factory=list)
    end_s: float | None = None
    streamed: bool = False

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.problem


def keyed(secrets: Secrets) -> dict[str, str]:
    bearer = {"authorization": f"Bearer {secrets.api_key}"} if secrets.api_key else {}
    return bearer | {name.lower(): value for name, value in secrets.headers.items()}


async def send(asked: Asked, http: httpx.AsyncClient, text: str, limit: int, *, stream: bool) -> Reply:
    """One prompt at the plan's temperature (0 unless it says otherwise)."""
    reply = Reply(limit=limit)
    api = "completions" if asked.plan.target.api == "completions" else "chat/completions"
    begin = time.monotonic()
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            http.stream("POST", f"{asked.plan.target.url}/{api}", json=_body(asked, text, limit, stream),
                        headers=keyed(asked.secrets), timeout=ANSWER_S) as response,
        ):  # fmt: skip
            reply.status = response.status_code
            reply.streamed = "event-stream" in response.headers.get("content-type", "")
            await _read(reply, response.aiter_raw(), begin, asked.secrets)
    except TimeoutError:
        reply.problem = f"not complete within {ANSWER_S:g} s"
    except httpx.HTTPError as error:
        reply.problem = str(refusals.unreachable(asked.plan.target.url, error))
    reply.end_s = time.monotonic() - begin
    return reply


def _body(asked: Asked, text: str, limit: int, stream: bool) -> dict[str, Any]:
    shape, sampling = asked.shape, asked.plan.sampling
    body: dict[str, Any] = {"model": asked.model, "temperature": sampling.temperature, shape.limit_parameter: limit}
    if asked.plan.target.api == "completions":
        body["prompt"] = "The capital of France is the city of" if not stream else "1 2 3 4 5 6 7 8"
    else:
        body["messages"] = [{"role": "user", "content": text}]
    if stream:
        body["stream"] = True
        body |= {"stream_options": {"include_usage": True}} if shape.include_usage else {}
    return body | sampling.extra_body


async def _read(reply: Reply, reads: AsyncIterator[bytes], begin: float, secrets: Secrets) -> None:
    parser, whole = SseParser(), bytearray()
    async for data in reads:
        whole += data
        if reply.streamed and reply.status == 200:
            before = len(reply.text) + len(reply.reasoning)
            for payload in parser.feed(data):
                _take(reply, payload, secrets)
            if len(reply.text) + len(reply.reasoning) > before:
                reply.reads.append(time.monotonic() - begin)
        if len(whole) > _MOST_BYTES:
            reply.problem = "more than 1 MiB for a short answer"
            return
    for payload in parser.flush() if reply.streamed and reply.status == 200 else ():
        _take(reply, payload, secrets)
    if not reply.streamed or reply.status != 200:
        _take(reply, bytes(whole), secrets)
    if reply.status != 200 and not reply.problem:
        reply.problem = scrubbed(error_text(bytes(whole))[1], secrets, 120) or f"HTTP {reply.status}"


def _take(reply: Reply, payload: bytes, secrets: Secrets) -> None:
    """One JSON payload of an answer, whole or a chunk."""
    if payload.strip() == b"[DONE]":
        return
    try:
        data = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        reply.problem = reply.problem or "the answer is not JSON"
        return
    if not isinstance(data, dict):
        return
    if data.get("error") or data.get("object") == "error":
        reply.problem = scrubbed(error_text(payload)[1], secrets, 120) or "an error inside the answer"
    for choice in data.get("choices") or ():
        _take_choice(reply, choice)
    usage = data.get("usage")
    if isinstance(usage, dict):
        for name, key in (("output_tokens", "completion_tokens"), ("input_tokens", "prompt_tokens")):
            if isinstance(usage.get(key), int):
                setattr(reply, name, usage[key])


def _take_choice(reply: Reply, choice: Any) -> None:
    if not isinstance(choice, dict):
        return
    message = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
    if isinstance(message, dict):
        reply.text += message["content"] if isinstance(message.get("content"), str) else ""
        for name in ("reasoning_content", "reasoning"):
            reply.reasoning += message[name] if isinstance(message.get(name), str) else ""
    if isinstance(choice.get("finish_reason"), str):
        reply.finish = choice["finish_reason"]
