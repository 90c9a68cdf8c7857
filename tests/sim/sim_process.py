"""A simulated server as a process, and an asyncio client for it that keeps when each chunk came."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def start(*flags: str) -> tuple[subprocess.Popen, str]:
    """The process, and its URL once it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lpxtop.sim.server", "--port", "0", "--die-with-parent", *flags],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    return process, process.stdout.readline().removeprefix("listening on ").strip()


def stop(process: subprocess.Popen) -> int:
    """End it as an operator would; its exit code."""
    if process.poll() is None:
        process.terminate()
    code = process.wait(5)
    process.stdin.close()
    process.stdout.close()
    return code


@contextlib.contextmanager
def server(*flags: str):
    """A simulated server for the length of a block; yields its URL."""
    process, url = start(*flags)
    try:
        yield url
    finally:
        stop(process)


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.read()


def truth(url: str) -> list[dict]:
    """The server's log, in the order the requests came."""
    return [json.loads(line) for line in get(f"{url}/sim/log").splitlines()]


def wait_for(condition, seconds: float = 10.0):
    """Poll something outside until it is true; its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return value


class Stream:
    """What came of one streamed request: (arrival ns, event) pairs, and whether it ended properly."""

    def __init__(self) -> None:
        self.events: list[tuple[int, dict]] = []
        self.done = False
        self.head = ""

    @property
    def tokens(self) -> list[tuple[int, dict]]:
        """Chunks with content."""
        return [(at, event) for at, event in self.events if event.get("choices") and _text(event)]

    @property
    def usage(self) -> dict:
        return self.events[-1][1]["usage"]


def _text(event: dict) -> str:
    return event["choices"][0].get("delta", {}).get("content", "")


async def stream(url: str, **fields) -> Stream:
    """One chat stream over a socket of its own, within 20 s."""
    async with asyncio.timeout(20):
        return await _stream(url, fields)


async def _stream(url: str, fields: dict) -> Stream:
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = {"model": "sim-8b", "stream": True, "max_tokens": 6, "ignore_eos": True,
            "messages": [{"role": "user", "content": "hello there"}],
            "stream_options": {"include_usage": True}} | fields  # fmt: skip
    data = json.dumps(body).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(data) + data)
    got = Stream()
    try:
        got.head = (await reader.readuntil(b"\r\n\r\n")).decode()
        while line := await reader.readline():
            if line == b"data: [DONE]\n":
                got.done = True
                break
            if line.startswith(b"data: "):
                got.events.append((time.monotonic_ns(), json.loads(line[6:])))
    finally:
        writer.close()
    return got
