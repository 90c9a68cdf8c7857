"""A byte-exact HTTP server for the tests: each request gets the next script, a list of steps, to the letter.

Steps: bytes are written in one go (and their time noted), a number is a pause in seconds, CLOSE ends the connection,
RESET tears it down. What the server saw and when it wrote is the independent truth that tests compare with.
"""

import asyncio
import json
import socket
import struct
import time
from dataclasses import dataclass, field

CLOSE, RESET = "close", "reset"
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TO_THE_END = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
LAST = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(data):
    """One HTTP chunk."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(payload, end=b"\n\n"):
    """One server-sent event; a dict becomes JSON."""
    text = payload if isinstance(payload, bytes) else json.dumps(payload, separators=(",", ":"), ensure_ascii=False).encode()
    return b"data: " + text + end


def delta(finish=None, index=0, **fields):
    """A chat chunk with this delta."""
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m",
            "choices": [{"index": index, "delta": fields, "logprobs": None, "finish_reason": finish}]}  # fmt: skip


def usage(completion, prompt=7, **more):
    """A usage chunk: choices are empty."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [], "usage": counts | more}


def answer(status, body=b"", *headers, reason=b"X"):
    """A whole answer with a content length."""
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    lines = [b"HTTP/1.1 %d %s" % (status, reason), b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def streamed(*events):
    """A whole event stream in one write: head, every event as a chunk of its own, [DONE], the end."""
    return STREAM + b"".join(chunk(part if isinstance(part, bytes) else event(part)) for part in (*events, DONE)) + LAST


@dataclass
class Seen:
    """One request as it came over the wire, and the times (monotonic ns) and bytes of what was written back."""

    head: bytes
    body: bytes
    connection: int
    writes: list = field(default_factory=list)

    @property
    def headers(self):
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}


class WireServer:
    """`scripts` are used one per request, the last one again and again. `reads_body` False: answer after the head."""

    def __init__(self, *scripts, ssl=None, reads_body=True, host="127.0.0.1"):
        self.scripts, self.ssl, self.reads_body, self.host = list(scripts), ssl, reads_body, host
        self.seen: list[Seen] = []
        self.connections = 0
        self.closed = 0
        self._tasks = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, self.host, 0, ssl=self.ssl)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self):
        return f"{'https' if self.ssl else 'http'}://{self.host}:{self.port}/v1"

    async def _serve(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        number = self.connections
        try:
            while await self._one(reader, writer, number):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.closed += 1
            writer.close()

    async def _one(self, reader, writer, number):
        head = await reader.readuntil(b"\r\n\r\n")
        seen = Seen(head, b"", number)
        if self.reads_body:
            seen.body = await reader.readexactly(int(seen.headers.get("content-length", 0)))
        self.seen.append(seen)
        script = self.scripts[min(len(self.seen), len(self.scripts)) - 1]
        for step in script if isinstance(script, list) else [script]:
            if step == CLOSE:
                return False
            if step == RESET:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
                return False
            if isinstance(step, bytes):
                seen.writes.append((time.monotonic_ns(), step))
                writer.write(step)
                await writer.drain()
            else:
                await asyncio.sleep(step)
        return True
