"""A byte-exact HTTP server for the tests: each request gets the next script, a list of steps, to the letter.

Steps: bytes are written in one go (and their time noted), a number is a pause in seconds, None closes the connection,
RESET tears it down. What the server saw and when it wrote is the independent truth that tests compare with.
"""

import asyncio
import json
import socket
import struct
import time

RESET = "reset"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def chunk(data):
    """One HTTP chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(payload, end="\n\n"):
    """One server-sent event; what is not text yet becomes JSON."""
    text = payload if isinstance(payload, str) else json.dumps(payload, ensure_ascii=False)
    return f"data: {text}{end}".encode()


def sse(*payloads, end=LAST):
    """A script: the head of an event stream, each payload as an event in a chunk of its own, the end of the body."""
    return [HEAD, *(chunk(event(payload)) for payload in payloads), end]


def answer(status, body=b"", *headers):
    """A script: a whole answer with its length."""
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers]
    return ["\r\n".join(lines).encode() + b"\r\n\r\n" + body]


class WireServer:
    """`scripts` are used one per request, in order; a request beyond them gets the last one again.

    `one_byte` writes every byte by itself; `reads_body` False answers after the request's head and reads no more.
    `requests` are the requests' bytes, `from_connection` the connection each came over (from 1), `writes` the
    monotonic ns just before each bytes step of each request; `closed` counts connections the client has ended.
    """

    def __init__(self, *scripts, one_byte=False, context=None, reads_body=True, host=None):
        self.scripts, self.one_byte, self.context, self.reads_body = scripts, one_byte, context, reads_body
        self.host = host or ("localhost" if context else "127.0.0.1")
        self.requests: list[bytes] = []
        self.from_connection: list[int] = []
        self.writes: list[list[int]] = []
        self.connections = self.closed = 0
        self._tasks: set[asyncio.Task] = set()

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.context)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def url(self):
        return f"{'https' if self.context else 'http'}://{self.host}:{self.port}/v1"

    async def _serve(self, reader, writer):
        task = asyncio.current_task()
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        number = self.connections
        try:
            while request := await self._request(reader):
                self.requests.append(request)
                self.from_connection.append(number)
                if not await self._play(writer):
                    break
            else:
                self.closed += 1
        except ConnectionError:
            self.closed += 1
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            writer.close()

    async def _request(self, reader):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return b""
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if not lengths or not self.reads_body:
            return head
        return head + await reader.readexactly(int(lengths[0].partition(b":")[2]))

    async def _play(self, writer):
        """One script; False when the connection is over."""
        script = self.scripts[min(len(self.requests), len(self.scripts)) - 1]
        times: list[int] = []
        self.writes.append(times)
        for step in script:
            if step is None:
                return False
            if step == RESET:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
                return False
            if isinstance(step, bytes):
                times.append(time.monotonic_ns())
                await self._write(writer, step)
            else:
                await asyncio.sleep(step)
        return True

    async def _write(self, writer, data):
        for piece in [data[at : at + 1] for at in range(len(data))] if self.one_byte else [data]:
            writer.write(piece)
            await writer.drain()
            if self.one_byte:
                await asyncio.sleep(0)  # let the client read it by itself
