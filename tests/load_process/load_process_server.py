"""A small real server for the tests of the load process: OpenAI-like SSE over asyncio, with its own log."""

import asyncio
import json
import time
from dataclasses import dataclass, field


@dataclass
class Seen:
    """One request as the server saw it."""

    id: str
    body: dict
    headers: dict
    begun: float
    tokens: int = 0
    complete: bool = False


@dataclass
class Server:
    """`tokens` chunks, one every `gap_s`, after `first_s`; then usage and [DONE]. `status` other than 200: an error."""

    tokens: int = 4
    gap_s: float = 0.005
    first_s: float = 0.005
    status: int = 200
    error: str = "no"
    seen: list[Seen] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    url: str = ""

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._tasks = set()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            while request := await self._read(reader):
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                try:
                    await self._answer(request, writer)
                finally:
                    self.in_flight -= 1
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _read(self, reader):
        head = await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b""
        if not head:
            return None
        lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
        seen = Seen(headers.get("x-request-id", ""), body, headers, time.monotonic())
        self.seen.append(seen)
        return seen

    async def _answer(self, seen, writer):
        if self.status != 200:
            body = json.dumps({"error": {"message": self.error, "type": "bad"}}).encode()
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (self.status, len(body)) + body)
            return await writer.drain()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for index in range(self.tokens):
            await asyncio.sleep(self.gap_s if index else self.first_s)
            _chunk(writer, {"choices": [{"index": 0, "delta": {"content": " word"}, "finish_reason": None}]})
            await writer.drain()
            seen.tokens += 1
        _chunk(writer, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        usage = {"prompt_tokens": 7, "completion_tokens": self.tokens, "total_tokens": 7 + self.tokens}
        _chunk(writer, {"choices": [], "usage": usage})
        _chunk(writer, None)
        writer.write(b"0\r\n\r\n")
        seen.complete = True
        return await writer.drain()


def _chunk(writer, data):
    text = b"data: " + (b"[DONE]" if data is None else json.dumps(data).encode()) + b"\n\n"
    writer.write(b"%x\r\n%b\r\n" % (len(text), text))
