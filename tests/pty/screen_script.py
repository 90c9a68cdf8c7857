"""A screen on a pretended run, for tests on a pseudo-terminal. Arguments: view name, then key=value pairs.

`session=1` runs a pretended session that writes when it was closed; `crash=1` breaks the screen while a secret is in
a local variable; `noise=1` writes to descriptor 2; `lively=1` lets the run go on by itself.
"""

import asyncio
import contextlib
import fcntl
import os
import sys
import termios
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "tui")]

from lpxtop.errors import LpxtopError  # noqa: E402
from lpxtop.tui.app import run_app  # noqa: E402


def main() -> int:
    """Run it; print the exit code and the calls made, as a command would print its summary."""
    options = dict(pair.split("=", 1) for pair in sys.argv[2:])
    with contextlib.suppress(OSError):  # as a login would: the terminal is ours
        fcntl.ioctl(2, termios.TIOCSCTTY, 0)
    import screen_fakes

    kind = screen_fakes.LivelyControl if "lively" in options else screen_fakes.FakeControl
    view = screen_fakes.VIEWS[sys.argv[1]]
    if "start" in options:
        import msgspec

        view = msgspec.structs.replace(view, phase="measure")
    control = kind(view)

    async def watch_loop() -> None:
        """How late a 5 ms sleep wakes, in ms."""
        loop, late = asyncio.get_running_loop(), []
        while not control.stopped.is_set():
            due = loop.time() + 0.005
            await asyncio.sleep(0.005)
            if loop.time() > began + 3:
                late.append((loop.time() - due) * 1000)
        Path(options["stalls"]).write_text(" ".join(f"{ms:.2f}" for ms in late))

    began = time.monotonic()

    async def session() -> None:
        if "stalls" in options:
            await watch_loop()
            return
        if "noise" in options:
            os.write(2, b"native library says hello\n")
        if "crash" in options:
            await asyncio.sleep(0.3)
            control.view = lambda: crash("Bearer " + options["crash"])
        if "fail" in options:
            raise LpxtopError("the load process died")
        await control.wait()
        await asyncio.sleep(float(options.get("drain", "0.05")))
        Path(options["closed"]).write_text("closed") if "closed" in options else None

    def crash(secret: str) -> None:
        raise RuntimeError("the view broke")

    code = run_app(
        control,
        title="test",
        theme=options.get("theme"),
        color=options.get("color", "auto"),
        glyphs=options.get("glyphs", "auto"),
        fps=int(options.get("fps", "4")),
        mouse="mouse" in options,
        session=session,
        log=Path(options["log"]) if "log" in options else None,
    )
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"exit {code} calls {control.calls}", flush=True)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LpxtopError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        sys.exit(error.exit_code)
