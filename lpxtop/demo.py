"""The simulated server as a child process for the length of a demo. Must not draw or measure."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from lpxtop.errors import LpxtopError

START_TIMEOUT_S = 15.0
_GREETING = "listening on "


@contextlib.contextmanager
def simulated_server(preset: str) -> Iterator[str]:
    """Start `lpxtop sim` on a free loopback port; yields its URL; ends it afterwards, whatever happened."""
    process = subprocess.Popen(  # noqa: S603 - our own interpreter, and a preset that the server checks
        [sys.executable, "-m", "lpxtop.sim.server", "--port", "0", "--preset", preset, "--die-with-parent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith(_GREETING):
            process.kill()
            assert process.stderr is not None
            last = process.stderr.read().strip().splitlines()[-1:] or ["no message"]
            raise LpxtopError(f"the simulated server did not start: {last[0]}")
        yield line.removeprefix(_GREETING).strip()
    finally:
        process.terminate()
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
