"""Starts load processes and speaks with them: each is an event source, and takes commands. Must not know metrics.

A process that dies is an event (`source`, state failed) with the last line it wrote to stderr, never an exception.
"""

import asyncio
import contextlib
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator

from lpxtop.clock import Clock, session_us
from lpxtop.events import codec, commands
from lpxtop.events.records import AnyEvent, Source
from lpxtop.load.schedule import share
from lpxtop.plan import Negotiated, Plan, Secrets

READ_BYTES = 1 << 18
KILL_AFTER_S = 2.0


class LocalWorker:
    """One load process on this machine. Iterate it once, after `start`."""

    def __init__(self, start: commands.Start, clock: Clock, environment: dict[str, str]) -> None:
        self.name = start.src
        self._environment = environment
        self._start = start
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._stderr: deque[str] = deque(maxlen=20)
        self._stderr_task: asyncio.Task[None] | None = None
        self._left = False

    async def start(self) -> None:
        """Start the process and hand it the plan and the secrets, on its stdin only."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "lpxtop.load.worker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C at the terminal goes to the parent alone, which decides
            env=self._environment,
        )  # fmt: skip
        self._stderr_task = asyncio.create_task(self._read_stderr())
        self.send(self._start)

    def send(self, command: commands.Command) -> None:
        """Hand a command over; one for a process that is gone is dropped."""
        process = self._process
        if process is None or process.stdin is None or process.returncode is not None or process.stdin.is_closing():
            return
        with contextlib.suppress(ConnectionError, RuntimeError):
            process.stdin.write(commands.encode(command))

    async def __aiter__(self) -> AsyncIterator[AnyEvent]:
        assert self._process is not None
        assert self._process.stdout is not None
        rest = b""
        while data := await self._process.stdout.read(READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                event = self._decode(line)
                if event is not None:
                    yield event
        code = await self._process.wait()
        if self._stderr_task is not None:
            await self._stderr_task
        if code or not self._left:
            yield self._failed(code)

    def _decode(self, line: bytes) -> AnyEvent | None:
        try:
            event = codec.decode(line)
        except codec.CodecError:
            self._stderr.append(line[:200].decode(errors="replace"))
            return None
        if isinstance(event, Source) and event.state == "left":
            self._left = True
        return event

    def _failed(self, code: int) -> Source:
        last = next((line for line in reversed(self._stderr) if line.strip()), "no message")
        text = f"load process ended with code {code}: {last[:200]}"
        now = session_us(self._clock.monotonic_ns(), self._start.origin_ns)
        return Source(t=now, src=self.name, kind="load", state="failed", text=text)

    async def _read_stderr(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError):  # a line beyond the reader's limit
            async for line in self._process.stderr:
                self._stderr.append(line.decode(errors="replace").rstrip())

    @property
    def stderr(self) -> list[str]:
        """The last lines the process wrote to stderr."""
        return list(self._stderr)

    async def close(self) -> None:
        """End the process now if it still runs: terminate, then kill."""
        process = self._process
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM):
            if process.returncode is not None:
                break
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), KILL_AFTER_S)
        if self._stderr_task is not None:
            self._stderr_task.cancel()


class Fleet:
    """All load processes of a run behind one slider; whatever their number, their shares sum to the target."""

    def __init__(
        self,
        plan: Plan,
        negotiated: Negotiated,
        secrets: Secrets,
        *,
        origin_ns: int,
        clock: Clock,
        environment: dict[str, str],
    ) -> None:
        count = max(1, plan.workers)
        self.workers = [
            LocalWorker(
                commands.Start(
                    plan=plan, negotiated=negotiated, secrets=secrets, origin_ns=origin_ns,
                    src=f"load{index}", worker=index, workers=count,
                ),
                clock,
                environment,
            )
            for index in range(count)
        ]  # fmt: skip

    async def start(self) -> None:
        for worker in self.workers:
            await worker.start()

    def set_concurrency(self, n: int, ramp_s: float = 0.0) -> None:
        for index, worker in enumerate(self.workers):
            worker.send(commands.SetConcurrency(n=share(n, index, len(self.workers)), ramp_s=ramp_s))

    def set_rate(self, rate: float) -> None:
        for worker in self.workers:
            worker.send(commands.SetRate(rate=rate / len(self.workers)))

    def send(self, command: commands.Pause | commands.Resume | commands.Stop | commands.Cancel) -> None:
        """The same command to every process."""
        for worker in self.workers:
            worker.send(command)

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self.workers))
