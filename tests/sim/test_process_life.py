"""The simulated server as a process: how it starts, refuses to start, and ends."""

import contextlib
import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from sim_process import ROOT, start, stop, wait_for


def tried(*flags, stdin=subprocess.DEVNULL):
    return subprocess.run(
        [sys.executable, "-m", "lpxtop.sim.server", *flags],
        stdin=stdin, capture_output=True, text=True, cwd=ROOT, timeout=10,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--preset", "h200"], "presets: h100-8b, fast-decode, small"),
        (["--engine", "{oops"], "--engine is not a JSON object"),
        (["--engine", '{"kv_tokns": 1}'], "kv_tokns"),
        (["--engine", '{"kv_tokens": 1}'], "at least two blocks"),
        (["--gpu", '{"limit_watts": 0}'], "$.gpu.limit_watts"),
        (["--trouble", '{"cut_every": "x"}'], "$.trouble.cut_every"),
        (["--port", "99999"], "$.port"),
    ],
)
def test_a_mistake_in_the_flags_is_one_line_that_names_it(flags, says):
    """Exit code 2, nothing on stdout, no traceback."""
    done = tried(*flags)

    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr


def test_a_taken_port_is_said_with_what_to_do():
    """The address, the reason, and --port 0."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = tried("--port", str(taken.getsockname()[1]))

    assert done.returncode == 2
    assert "Address already in use" in done.stderr
    assert "--port (0" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_a_pipe_there_is_no_parent_to_die_with():
    """--die-with-parent on /dev/null is refused with a reason."""
    done = tried("--port", "0", "--die-with-parent")

    assert done.returncode == 2
    assert "pipe" in done.stderr


def test_it_ends_when_its_parent_is_killed():
    """The parent dies of SIGKILL without a word; the server is gone soon after."""
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-m', 'lpxtop.sim.server', '--port', '0', '--die-with-parent'],"
        " stdin=subprocess.PIPE)\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    child = None
    try:
        lines = {parent.stdout.readline(), parent.stdout.readline()}
        child = int(next(line for line in lines if line.strip().isdigit()))
        url = next(line for line in lines if "listening" in line).removeprefix("listening on ").strip()
        assert httpx.get(f"{url}/health").status_code == 200
        parent.send_signal(signal.SIGKILL)
        parent.wait(5)

        def refused():
            try:
                httpx.get(f"{url}/health", timeout=1)
            except httpx.TransportError:
                return True
            return False

        wait_for(refused, 5)
    finally:
        parent.kill()
        parent.wait(5)
        parent.stdout.close()
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_even_with_streams_open(number):
    """Exit code 0 within two seconds; the open stream is cut, not left hanging."""
    process, url = start()
    try:
        body = {"model": "sim-8b", "stream": True, "max_tokens": 5000, "ignore_eos": True, "prompt": "x"}
        with httpx.Client() as client, client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            chunks = answer.iter_bytes()
            next(chunks)
            process.send_signal(number)
            assert process.wait(2) == 0
            with pytest.raises(httpx.RemoteProtocolError):
                for _ in chunks:
                    pass
    finally:
        stop(process)


def test_the_same_seed_gives_the_same_answers():
    """Lengths and words of answers that end by themselves are those of the seed."""

    def answers(seed):
        process, url = start("--seed", seed, "--engine", '{"step_base_s": 0.0005}')
        try:
            body = {"model": "sim-8b", "max_tokens": 400, "messages": [{"role": "user", "content": "x"}]}
            got = [httpx.post(f"{url}/v1/chat/completions", json=body, timeout=20).json() for _ in range(2)]
        finally:
            stop(process)
        return [(one["choices"][0]["message"]["content"], one["usage"]) for one in got]

    assert answers("4") == answers("4") != answers("5")
