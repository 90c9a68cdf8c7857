"""Real processes for the end-to-end tests: the simulated server, the command line, and a server that keeps heads."""

import contextlib
import fcntl
import json
import os
import pty
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def simulated(*flags: str):
    """A simulated server on a free port; yields its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lpxtop.sim.server", "--port", "0", "--die-with-parent", *flags],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        yield process.stdout.readline().removeprefix("listening on ").strip()
    finally:
        process.terminate()
        process.wait(5)
        process.stdin.close()
        process.stdout.close()


def truth(url: str) -> list[dict]:
    """The simulated server's own log, one record per request."""
    with urllib.request.urlopen(f"{url}/sim/log") as answer:
        return [json.loads(line) for line in answer.read().splitlines()]


def lpxtop(*arguments, home: Path, env: dict | None = None, timeout: float = 60) -> subprocess.CompletedProcess:
    """The command line in its own state directory, without the caller's keys."""
    return subprocess.run(
        [sys.executable, "-m", "lpxtop", *map(str, arguments)],
        capture_output=True, text=True, cwd=ROOT, env=environment(home) | (env or {}), timeout=timeout,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


class OnScreen:
    """The command line on a pseudo-terminal of 120×40 that is read as fast as it is written."""

    def __init__(self, *arguments, home: Path):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lpxtop", *map(str, arguments)],
            stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, start_new_session=True,
            env=environment(home) | {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LC_ALL": "C.UTF-8"},
        )  # fmt: skip
        os.close(slave)
        self.bytes = 0
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def _drain(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self._master, 65536):
                self.bytes += len(data)

    def keys(self, text: str) -> None:
        os.write(self._master, text.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(2)
        os.close(self._master)


def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.endswith("_KEY")}
    return kept | {"XDG_STATE_HOME": str(home / "state"), "XDG_CONFIG_HOME": str(home / "config")}


class HeadKeeper:
    """A tiny server on 127.0.0.1 that keeps every request head and answers each with a fixed answer by path."""

    def __init__(
        self, answers: dict[str, bytes], default: bytes = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
    ):
        self.heads: list[str] = []
        self._answers, self._default = answers, default
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, contextlib.suppress(OSError):
            data = b""
            while b"\r\n\r\n" not in data:
                piece = peer.recv(65536)
                if not piece:
                    return
                data += piece
            head, _, rest = data.partition(b"\r\n\r\n")
            text = head.decode("latin-1")
            self.heads.append(text)
            length = next(
                (int(line.split(":")[1]) for line in text.split("\r\n") if line.lower().startswith("content-length")), 0
            )
            while len(rest) < length:
                rest += peer.recv(65536)
            path = text.split(" ")[1]
            peer.sendall(self._answers.get(path, self._default))

    def close(self) -> None:
        self._listener.close()


def wait_for(condition, seconds: float = 20.0) -> None:
    """Poll a condition of the outside world."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
