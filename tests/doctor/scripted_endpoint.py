"""An OpenAI-shaped endpoint whose every answer a test decides: real sockets, one request per connection."""

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from email.utils import formatdate


@dataclass
class Endpoint:
    """What it answers. `text` is streamed word by word, `gap_s` apart; `held` sends the stream's text in one write."""

    text: str = "Paris"
    counted: str = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20"
    reasoning: str = ""
    usage: bool = True
    extra_tokens: int = 0
    streams: bool = True
    held: bool = False
    gap_s: float = 0.002
    models: list | None = field(default_factory=lambda: [{"id": "m", "max_model_len": 4096}])
    key: str | None = None
    key_for_models: bool = True
    skew_s: float | None = 0.0
    health: int = 200
    chat_status: int = 200
    metrics: str | None = (
        "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
    )
    seen: list = field(default_factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head.split("\r\n")[1:])}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await self.answer(head.split()[1], headers, body, writer)
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()

    async def answer(self, path: str, headers: dict, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.seen.append((path, headers.get("authorization"), body))
        allowed = self.key is None or headers.get("authorization") == f"Bearer {self.key}"
        if path == "/health":
            self.send(writer, self.health, b"")
        elif path == "/metrics" and self.metrics is not None:
            self.send(writer, 200, self.metrics.encode(), "text/plain")
        elif path == "/v1/models" and self.models is not None and (allowed or not self.key_for_models):
            self.send(writer, 200, json.dumps({"data": self.models}).encode())
        elif not allowed:
            self.send(writer, 401, b'{"error": {"message": "Incorrect API key provided"}}')
        elif path == "/v1/chat/completions":
            await self.complete(json.loads(body), writer)
        else:
            self.send(writer, 404, b'{"detail": "Not Found"}')

    async def complete(self, ask: dict, writer: asyncio.StreamWriter) -> None:
        if self.chat_status != 200:
            self.send(writer, self.chat_status, b'{"error": {"message": "engine is dead"}}')
            return
        wants_count = "Count" in ask["messages"][-1]["content"]
        text = self.counted if wants_count else self.text
        usage = {"prompt_tokens": 9, "completion_tokens": len(text.split()) + self.extra_tokens}
        if not ask.get("stream") or not self.streams:
            message = {"content": text, "reasoning_content": self.reasoning}
            whole = {"choices": [{"message": message, "finish_reason": "stop"}]}
            self.send(writer, 200, json.dumps(whole | ({"usage": usage} if self.usage else {})).encode())
            return
        pieces = [{"choices": [{"delta": {"content": word + " "}}]} for word in text.split()]
        pieces += [{"choices": [], "usage": usage}] if self.usage else []
        lines = [b"data: " + json.dumps(piece).encode() + b"\n\n" for piece in pieces] + [b"data: [DONE]\n\n"]
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        if self.held:
            await asyncio.sleep(len(lines) * self.gap_s)
            lines = [b"".join(lines)]
        for line in lines:
            writer.write(line)
            await writer.drain()
            await asyncio.sleep(self.gap_s)

    def send(self, writer: asyncio.StreamWriter, status: int, body: bytes, kind: str = "application/json") -> None:
        date = "" if self.skew_s is None else f"date: {formatdate(time.time() + self.skew_s, usegmt=True)}\r\n"
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\n{date}content-length: {len(body)}\r\n"
        writer.write(head.encode() + b"connection: close\r\n\r\n" + body)


@contextlib.asynccontextmanager
async def listening(endpoint: Endpoint, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """The endpoint's base URL while it listens on loopback."""
    server = await asyncio.start_server(endpoint.handle, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"{'https' if context else 'http'}://127.0.0.1:{port}"
    finally:
        server.close()
