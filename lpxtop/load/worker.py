"""The load process: `Start` and commands as lines on stdin, events as lines on stdout, logs on stderr.

    python -m lpxtop.load.worker

Ends by itself when told, when its load is over, when stdin ends or when nobody reads its events. The plain selector
loop is meant: with kernel stamps uvloop changes neither the accuracy nor, much, the cost (reference/measured.md).
Must not import anything of a screen, of NVML or of plotting.
"""

import asyncio
import contextlib
import gc
import logging
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import msgspec

from lpxtop.errors import EXIT_OK, EXIT_USAGE, LpxtopError
from lpxtop.events import codec, commands
from lpxtop.events.records import Arrivals, Event, Source
from lpxtop.load.client import Client
from lpxtop.load.outlet import Outlet
from lpxtop.load.prompts import Prompts, session_mark
from lpxtop.load.runner import Runner

ORPHAN_DRAIN_S = 1.0
TERMINATED_DRAIN_S = 0.5
FLUSH_S = 10.0
_READ_BYTES = 1 << 16


def main() -> int:
    """Run one load. Returns the exit code; a mistake in the plan is one or two lines on stderr."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what a Ctrl-C means
    lines = _lines(0)
    try:
        start = commands.decode(next(lines, b""))
    except msgspec.DecodeError:
        start = None
    if not isinstance(start, commands.Start):
        sys.stderr.write("lpxtop.load.worker: the first line is not a start command; lpxtop run starts this process\n")
        return EXIT_USAGE
    _raise_descriptor_limit()
    outlet = Outlet(1)
    try:
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as loop:
            loop.run(_run(start, lines, outlet))
    except LpxtopError as error:
        sys.stderr.write("\n".join(error.lines()) + "\n")
        return error.exit_code
    finally:
        outlet.close(FLUSH_S)
    return EXIT_OK


async def _run(start: commands.Start, lines: Iterator[bytes], outlet: Outlet) -> None:
    def emit(event: Event) -> None:
        outlet.write(codec.encode(event), droppable=isinstance(event, Arrivals))
        if outlet.broken:
            runner.stop(0.0)

    client = Client(
        plan=start.plan, negotiated=start.negotiated, secrets=start.secrets, origin_ns=start.origin_ns, src=start.src
    )
    prompts = Prompts(
        start.plan, start.negotiated, mark=session_mark(start.origin_ns), worker=start.worker, workers=start.workers
    )
    runner = Runner(
        start=start, client=client, prompts=prompts, emit=emit, backlog=lambda: (outlet.backlog_bytes, outlet.dropped)
    )
    await client.start()
    _tune_garbage_collection()
    _say(runner, start, "joined")
    with _signals(runner):
        _listen(lines, runner)
        await runner.run()
    await client.aclose()
    _say(runner, start, "left")


def _say(runner: Runner, start: commands.Start, state: str) -> None:
    about = {"pid": os.getpid(), "python": platform.python_version(), "worker": start.worker, "workers": start.workers}
    runner.frames.event(
        Source(
            t=runner.frames.now_us(),
            kind="load",
            state=state,
            host=platform.node(),
            descriptor=about if state == "joined" else {},
        )
    )


def _listen(lines: Iterator[bytes], runner: Runner) -> None:
    """Read commands in a thread: it works for pipes, files and terminals alike, and never blocks the loop."""
    loop = asyncio.get_running_loop()

    def tell(action: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(action)

    def read() -> None:
        for line in lines:
            tell(lambda line=line: obey(line, runner))  # type: ignore[misc]
        tell(lambda: runner.stop(ORPHAN_DRAIN_S))

    threading.Thread(target=read, name="commands in", daemon=True).start()


def obey(line: bytes, runner: Runner) -> None:
    """Carry one command out; what is none is logged and ignored."""
    try:
        command = commands.decode(line)
    except msgspec.DecodeError as error:
        logging.getLogger("lpxtop.load").warning("not a command: %s", error)
        return
    match command:
        case commands.Resume():
            runner.resume()
        case commands.Pause():
            runner.pause()
        case commands.SetConcurrency(n=n, ramp_s=ramp_s):
            runner.set_concurrency(n, ramp_s)
        case commands.SetRate(rate=rate):
            runner.set_rate(rate)
        case commands.Cancel():
            runner.cancel()
        case commands.Stop(drain_s=drain_s):
            runner.stop(drain_s)


def _lines(descriptor: int) -> Iterator[bytes]:
    """Whole lines as they come. Reads the descriptor itself: a buffered reader's lock would hang the exit."""
    rest = b""
    while True:
        try:
            data = os.read(descriptor, _READ_BYTES)
        except OSError:
            return
        if not data:
            return
        *lines, rest = (rest + data).split(b"\n")
        yield from (line for line in lines if line.strip())


@contextlib.contextmanager
def _signals(runner: Runner) -> Iterator[None]:
    """SIGTERM: a short drain; a second one cuts at once."""
    loop = asyncio.get_running_loop()
    drains = iter((TERMINATED_DRAIN_S,))
    try:
        loop.add_signal_handler(signal.SIGTERM, lambda: runner.stop(next(drains, 0.0)))
    except NotImplementedError:  # Windows' loops
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _tune_garbage_collection() -> None:
    """Full collections walk everything that imports left behind, and stall the loop for it: freeze that part, and
    collect the young rarely, as a request leaves next to nothing behind that reference counts do not free."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def _raise_descriptor_limit() -> None:
    """One connection per stream: the usual 1024 descriptors would be a hidden cap."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
