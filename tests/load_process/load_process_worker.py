"""Starts a real load process for the tests and reads what it says."""

import asyncio
import sys
import time

from lpxtop.events import codec, commands
from lpxtop.plan import Negotiated, Plan, Secrets, Target


class Worker:
    """`async with Worker(server.url, load=…)`: a load process that has its Start line. `events` grows as it speaks."""

    def __init__(self, url, *, negotiated=None, secrets=None, worker=0, workers=1, model="m", **plan):
        self.start = commands.Start(
            plan=Plan(target=Target(url=url, model=model), **plan),
            negotiated=negotiated or Negotiated(),
            secrets=secrets or Secrets(),
            origin_ns=time.monotonic_ns(),
            src=f"load{worker}",
            worker=worker,
            workers=workers,
        )
        self.lines, self.events, self.stderr = [], [], b""

    async def __aenter__(self):
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "lpxtop.load.worker", stdin=pipe, stdout=pipe, stderr=pipe, limit=1 << 24
        )
        self._news = asyncio.Event()
        self._reader = asyncio.create_task(self._read())
        self.send(self.start)
        return self

    async def __aexit__(self, *_):
        if self.process.returncode is None:
            self.process.kill()
        await asyncio.wait_for(self._reader, 5)
        await self.process.wait()
        self.process._transport.close()

    async def _read(self):
        async for line in self.process.stdout:
            self.lines.append(line)
            self.events.append(codec.decode(line))
            self._news.set()
        self.stderr = await self.process.stderr.read()
        self._news.set()

    def send(self, *orders):
        for order in orders:
            self.process.stdin.write(commands.encode(order))

    async def until(self, condition, timeout=8.0):
        """Wait until the condition holds of what was said so far."""
        async with asyncio.timeout(timeout):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def end(self, timeout=8.0):
        """Wait for the end of the process; returns its exit code."""
        code = await asyncio.wait_for(self.process.wait(), timeout)
        await asyncio.wait_for(self._reader, 5)
        return code

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]
