"""What the live screen costs: CPU, bytes to the terminal, event-loop stalls and the first frame, on a pseudo-terminal.

    python tests/benchmarks/screen.py [seconds]

The run is pretended (8 GPUs, figures as at 5,000 tokens/s, every figure moving each frame), so this is the screen
alone. Budgets (DESIGN §9, 120x40 at 4 Hz): 10 % of a core, 40 KB/s, stalls p99 25 ms, first frame 0.8 s.
"""

import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "pty")]

from terminals import Terminal  # noqa: E402

SETTLE_S = 3.0
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def measure(size: tuple[int, int], fps: int, seconds: float, *, view: str = "eight", lively: bool = True) -> dict:
    """One run of the screen at a size and a rate."""
    stalls = Path(f"/tmp/lpxtop-stalls-{os.getpid()}")
    options = [f"fps={fps}", f"stalls={stalls}", *(["lively=1", "start=1"] if lively else [])]
    started = time.monotonic()
    with Terminal(view, *options, size=size, env={"COLORTERM": "truecolor"}) as terminal:
        while "TTFT" not in terminal.text():
            terminal.read(0.005)
        first_frame = time.monotonic() - started
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            drain(terminal)
        cpu, begin, sent = cpu_s(terminal.process.pid), time.monotonic(), 0
        while (took := time.monotonic() - begin) < seconds:
            sent += drain(terminal)
        cpu = cpu_s(terminal.process.pid) - cpu
        terminal.keys("qy")
        terminal.wait()
    late = sorted(float(x) for x in stalls.read_text().split())
    stalls.unlink()
    return {
        "first_frame_s": first_frame,
        "cpu_percent": 100 * cpu / took,
        "kb_per_s": sent / took / 1000,
        "stall_p99_ms": late[int(0.99 * len(late))],
        "stall_max_ms": late[-1],
    }


def drain(terminal: Terminal) -> int:
    """Read what there is without parsing it."""
    time.sleep(0.02)
    try:
        os.set_blocking(terminal.master, False)
        return len(os.read(terminal.master, 1 << 20))
    except BlockingIOError:
        return 0
    finally:
        os.set_blocking(terminal.master, True)


def main() -> None:
    """Print the table."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    print(f"{'what':28}{'first frame':>13}{'CPU':>8}{'to terminal':>14}{'stall p99':>12}{'max':>9}")
    cases = [
        ("idle (ready) 120x40 4 Hz", (120, 40), 4, {"view": "ready", "lively": False}),
        ("live 80x24 4 Hz", (80, 24), 4, {}),
        ("live 120x40 4 Hz", (120, 40), 4, {}),
        ("live 120x40 10 Hz", (120, 40), 10, {}),
        ("live 200x60 4 Hz", (200, 60), 4, {}),
    ]
    for name, size, fps, options in cases:
        found = measure(size, fps, seconds, **options)
        print(
            f"{name:28}{found['first_frame_s']:11.2f} s{found['cpu_percent']:7.1f}%{found['kb_per_s']:9.1f} KB/s"
            f"{found['stall_p99_ms']:9.1f} ms{found['stall_max_ms']:6.1f} ms"
        )


if __name__ == "__main__":
    main()
