"""A session without a screen: a progress line on stderr, signals that end it well. Must not print results."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator

import click

from lpxtop import format
from lpxtop.errors import EXIT_INTERRUPTED
from lpxtop.metrics.view import RunView
from lpxtop.session import Session

PROGRESS_TTY_S = 0.5
PROGRESS_PLAIN_S = 5.0
INTERRUPT_DRAIN_S = 2.0


async def run(session: Session) -> int:
    """Run with a progress line on stderr. The first Ctrl-C drains briefly, the second cuts."""
    loop = asyncio.get_running_loop()
    code = 0
    tasks: set[asyncio.Task[None]] = set()

    def on_signal(number: int) -> None:
        nonlocal code
        drain_s = INTERRUPT_DRAIN_S if not code else 0.0
        code = EXIT_INTERRUPTED if number == signal.SIGINT else 128 + number
        task = asyncio.ensure_future(session.stop("interrupted", drain_s=drain_s))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    with _signals(loop, on_signal):
        progress = asyncio.create_task(_progress(session))
        try:
            await session.run()
        finally:
            progress.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await progress
    return code


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, handler: Callable[[int], None]) -> Iterator[None]:
    wanted = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    added: list[signal.Signals] = []
    try:
        for number in wanted:
            with contextlib.suppress(NotImplementedError):  # Windows' loops: Ctrl-C stays KeyboardInterrupt
                loop.add_signal_handler(number, handler, number)
                added.append(number)
        yield
    finally:
        for number in added:
            loop.remove_signal_handler(number)


async def _progress(session: Session) -> None:
    """One line that rewrites itself on a terminal; a plain line now and then elsewhere."""
    tty = sys.stderr.isatty()
    try:
        while True:
            await asyncio.sleep(PROGRESS_TTY_S if tty else PROGRESS_PLAIN_S)
            line = progress_line(session.view())
            click.echo(f"\r\x1b[K{line[: _columns()]}" if tty else line, err=True, nl=not tty)
    finally:
        if tty:
            click.echo("\r\x1b[K", err=True, nl=False)


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns - 1
    except OSError:
        return 79


def progress_line(view: RunView) -> str:
    """The run in one line of at most about 110 columns; every figure of the last window."""
    head = [format.clock_time(view.t), view.phase]
    parts = _watch_parts(view) if view.kind == "watch" else _load_parts(view)
    return "  ".join(head + parts)


def _load_parts(view: RunView) -> list[str]:
    load, window = view.load, view.window
    failed = sum(number for outcome, number in load.done.items() if outcome not in ("ok", "cut", "cancelled"))
    return [
        f"in flight {load.in_flight}/{format.count(load.target)}",
        f"ok {format.count(load.done.get('ok', 0))}",
        f"failed {format.count(failed)}",
        f"out {format.with_unit(window.output_tokens_per_s, 'tok/s')}",
        f"ttft p50 {format.latency(window.ttft.p50)}",
        f"itl p50 {format.latency(window.itl.p50)}",
        f"(last {window.window_s:.0f} s)",
    ]


def _watch_parts(view: RunView) -> list[str]:
    """Of a watch: what the first server says of itself, and the busiest GPU."""
    parts = []
    for server in view.servers[:1]:
        parts += [
            f"running {format.significant(server.running)}",
            f"waiting {format.significant(server.waiting)}",
            f"KV {format.percent(server.kv_usage)}",
            f"out {format.with_unit(server.output_tokens_per_s, 'tok/s')}",
            f"ttft mean {format.latency(server.ttft_mean_ms)}",
        ]
    busiest = max(view.gpus, key=lambda gpu: gpu.utilization_percent or 0.0, default=None)
    if busiest is not None:
        parts.append(f"GPU {busiest.index} {format.with_unit(busiest.utilization_percent, '%')}")
        parts.append(format.with_unit(busiest.power_watts, "W"))
    return parts or [view.gpu_note or "nothing to see yet"]
