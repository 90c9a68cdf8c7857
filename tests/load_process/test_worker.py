"""The load process over real pipes, against a real server that keeps its own log."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from load_process_server import Server
from load_process_worker import Worker

from lpxtop.events import commands
from lpxtop.events.commands import Cancel, Pause, Resume, SetConcurrency, SetRate
from lpxtop.events.records import Arrivals, Finished, LoadSample, Request, Source
from lpxtop.load.outlet import Outlet
from lpxtop.plan import Load, Prompts, Secrets, Stop


async def until(condition, timeout=6.0):
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.01)


# --- a whole load --------------------------------------------------------------------------------------------------


async def test_exactly_so_many_requests_and_every_token():
    """Stop by requests sends exactly that many, and the sums of the events are those of the server's own log."""
    plan = {"load": Load(concurrency=3), "stop": Stop(requests=10)}
    async with Server(tokens=5) as server, Worker(server.url, **plan) as worker:
        worker.send(Resume())
        code = await worker.end()

    finished = worker.of(Finished)
    assert code == 0
    assert len(server.seen) == 10
    assert [event.outcome for event in finished] == ["ok"] * 10
    assert sorted(event.request_id for event in finished) == sorted(seen.id for seen in server.seen)
    assert sum(event.output_tokens for event in finished) == sum(seen.tokens for seen in server.seen) == 50
    assert sum(len(event.gap) for event in worker.of(Arrivals)) == 50
    assert server.most_in_flight == 3
    assert len({event.id for event in worker.of(Request)}) == 10
    assert worker.of(LoadSample)[-1].done == {"ok": 10}
    assert [event.seq for event in worker.events] == list(range(len(worker.events)))
    assert worker.stderr == b""


async def test_it_says_who_it_is_first_and_goodbye_last():
    """The first event is `joined` with host, pid and Python; the last one is `left`."""
    async with Server() as server, Worker(server.url, stop=Stop(requests=1)) as worker:
        worker.send(Resume())
        await worker.end()

    first, last = worker.events[0], worker.events[-1]
    assert [source.state for source in worker.of(Source)] == ["joined", "left"]
    assert (first.state, last.state) == ("joined", "left")
    assert first.descriptor["pid"] == worker.process.pid
    assert first.descriptor["python"] == ".".join(map(str, sys.version_info[:3]))
    assert first.host
    assert first.t < last.t


async def test_two_workers_make_the_level_together():
    """Five users over two workers: 3 and 2, different prompts and ids, and the server sees five."""
    plan = {"load": Load(concurrency=5), "stop": Stop(requests=9), "prompts": Prompts(tokens=40)}
    async with (
        Server(tokens=6) as server,
        Worker(server.url, worker=0, workers=2, **plan) as one,
        Worker(server.url, worker=1, workers=2, **plan) as two,
    ):
        for worker in (one, two):
            await worker.until(lambda worker=worker: worker.events)
        for worker in (one, two):
            worker.send(Resume())
        await one.end()
        await two.end()

    assert [len(worker.of(Finished)) for worker in (one, two)] == [5, 4]
    assert [max(sample.target for sample in worker.of(LoadSample)) for worker in (one, two)] == [3, 2]
    assert server.most_in_flight == 5
    assert len({seen.id for seen in server.seen}) == 9
    assert len({seen.body["messages"][0]["content"].split("]")[0] for seen in server.seen}) == 9


async def test_commands():
    """Nothing is sent before resume; concurrency, pause, cancel and rate do what they say; nonsense is ignored."""
    async with Server(tokens=1000, gap_s=0.02) as server, Worker(server.url, load=Load(concurrency=2)) as worker:
        await worker.until(lambda: len(worker.of(LoadSample)) >= 2)
        assert server.seen == []
        worker.send(Resume())
        await until(lambda: server.in_flight == 2)
        worker.process.stdin.write(b"nonsense\n{}\n")
        worker.send(SetConcurrency(n=6), SetRate(rate=3.0))
        await until(lambda: server.in_flight == 6)
        worker.send(Pause(), Cancel())
        await until(lambda: server.in_flight == 0)
        await worker.until(lambda: len(worker.of(Finished)) == 6)
        worker.send(Resume())
        await until(lambda: server.in_flight == 6)
        worker.send(commands.Stop(drain_s=0.0))
        assert await worker.end() == 0

    assert sorted(event.outcome for event in worker.of(Finished)) == ["cancelled"] * 6 + ["cut"] * 6
    assert b"not a command" in worker.stderr
    assert b"nonsense" not in worker.stderr


async def test_an_open_loop_in_a_process_of_its_own():
    """100 Poisson arrivals at 200 per second: every one sent, within 20 ms of its due time."""
    load = Load(mode="poisson", rate=200.0)
    async with (
        Server(tokens=1, first_s=0.05) as server,
        Worker(server.url, load=load, stop=Stop(requests=100)) as worker,
    ):
        worker.send(Resume())
        await worker.end()

    late = sorted(event.sent - event.due for event in worker.of(Finished))
    assert len(late) == len(server.seen) == 100
    assert late[0] >= 0
    assert late[94] < 20_000


# --- ends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["SIGTERM", "stdin"])
async def test_a_clean_end_within_a_moment(how):
    """SIGTERM, or the end of stdin, in the middle of streams: everything taken up has its finished line, and `left`."""
    async with Server(tokens=1000, gap_s=0.01) as server, Worker(server.url, load=Load(concurrency=8)) as worker:
        worker.send(Resume())
        await until(lambda: server.in_flight == 8)
        await worker.until(lambda: worker.of(Arrivals))
        begin = time.monotonic()
        if how == "SIGTERM":
            worker.process.send_signal(signal.SIGTERM)
        else:
            worker.process.stdin.close()
        code = await worker.end()

    assert code == 0
    assert time.monotonic() - begin < 2.0
    assert {event.id for event in worker.of(Finished)} == {event.id for event in worker.of(Request)} == set(range(8))
    assert {event.outcome for event in worker.of(Finished)} == {"cut"}
    assert worker.events[-1].state == "left"


async def test_a_second_sigterm_does_not_wait():
    """Told twice, it cuts at once; SIGINT is the parent's business."""
    async with Server(tokens=1, first_s=30.0) as server, Worker(server.url) as worker:
        worker.send(Resume())
        await until(lambda: server.in_flight == 1)
        worker.process.send_signal(signal.SIGINT)
        await worker.until(lambda: len(worker.of(LoadSample)) >= 3)
        begin = time.monotonic()
        worker.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        worker.process.send_signal(signal.SIGTERM)
        assert await worker.end() == 0

    assert time.monotonic() - begin < 0.45


async def test_it_dies_with_its_parent():
    """kill -9 of the parent: the load process ends by itself, and the server's streams with it."""
    parent = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-m', 'lpxtop.load.worker'], stdin=subprocess.PIPE,"
        " stdout=subprocess.PIPE)\n"
        "p.stdin.write(sys.stdin.buffer.read()); p.stdin.flush()\n"
        "print(p.pid, flush=True)\n"
        "while p.stdout.readline(): pass\n"
    )
    async with Server(tokens=1000, gap_s=0.02) as server:
        start = Worker(server.url, load=Load(concurrency=3)).start
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", parent, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        process.stdin.write(commands.encode(start) + commands.encode(Resume()))
        process.stdin.close()
        pid = int(await process.stdout.readline())
        await until(lambda: server.in_flight == 3)

        process.kill()
        await process.wait()

        await until(lambda: server.in_flight == 0, 4.0)
        await until(lambda: not alive(pid), 4.0)
        process._transport.close()


def alive(pid):
    """Whether the process still runs (one that ended and was not collected does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_nobody_reads_any_more():
    """The reader of its events is gone: it stops sending and ends."""
    async with Server(tokens=1000, gap_s=0.01) as server, Worker(server.url, load=Load(concurrency=2)) as worker:
        worker.send(Resume())
        await until(lambda: server.in_flight == 2)
        worker.process.stdout._transport.close()
        assert await asyncio.wait_for(worker.process.wait(), 4) == 0
        await until(lambda: server.in_flight == 0)


async def test_a_slow_reader_slows_nothing():
    """Nobody reads for more than a second: the load goes on at its rate, and afterwards not one event is missing."""
    plan = {"load": Load(mode="constant", rate=300.0), "stop": Stop(duration_s=1.5)}
    async with Server(tokens=8, gap_s=0.001, first_s=0.001) as server, Worker(server.url, **plan) as worker:
        await worker.until(lambda: worker.events)
        worker.process.stdout._transport.pause_reading()
        worker.send(Resume())
        await until(lambda: len(server.seen) >= 400)
        assert len(worker.of(Finished)) < 400
        worker.process.stdout._transport.resume_reading()
        assert await worker.end() == 0

    assert [event.seq for event in worker.events] == list(range(len(worker.events)))
    assert len(worker.of(Finished)) == len(server.seen) == 450
    assert sum(sum(event.n) for event in worker.of(Arrivals)) == 8 * 450
    assert max(sample.backlog_bytes for sample in worker.of(LoadSample)) > 0
    assert worker.of(LoadSample)[-1].dropped_events == 0


# --- set-up and secrets --------------------------------------------------------------------------------------------


async def test_no_secret_leaves_the_process():
    """Key and header go to the server alone: not into any event, log line, argument or variable; nor when echoed."""
    secrets = Secrets(api_key="sk-very-secret-123", headers={"X-Token": "hush-hush-456"})
    error = "wrong key sk-very-secret-123 with hush-hush-456"
    async with Server(status=401, error=error) as server, Worker(server.url, secrets=secrets) as worker:
        await worker.until(lambda: worker.events)
        process = Path(f"/proc/{worker.process.pid}")
        about = process.joinpath("cmdline").read_bytes() + process.joinpath("environ").read_bytes()
        worker.send(Resume())
        await worker.end()

    assert server.seen[0].headers["authorization"] == "bearer sk-very-secret-123"
    assert server.seen[0].headers["x-token"] == "hush-hush-456"
    said = b"".join(worker.lines) + worker.stderr + about
    assert b"wrong key" in said
    assert b"sk-very-secret-123" not in said
    assert b"hush-hush-456" not in said


@pytest.mark.parametrize("first", [b"", b"nonsense\n", commands.encode(Resume())])
async def test_without_a_start_line(first):
    """No plan, no load: exit 2 and a sentence, no traceback."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lpxtop.load.worker",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(first), 5)

    assert process.returncode == 2
    assert out == b""
    assert err.count(b"\n") == 1
    assert b"first line is not a start command" in err


async def test_a_bad_prompt_file_is_one_line(tmp_path):
    """A mistake in the plan ends the process with its message on stderr."""
    file = tmp_path / "p.jsonl"
    file.write_text("{}\n")
    async with Worker("http://127.0.0.1:1/v1", prompts=Prompts(path=str(file))) as worker:
        assert await worker.end() == 2

    assert worker.events == []
    assert f"lpxtop: {file}:1: has none of prompt".encode() in worker.stderr
    assert b"Traceback" not in worker.stderr


# --- the way out ---------------------------------------------------------------------------------------------------


def test_the_backlog_is_bounded_and_drops_only_what_may_be_dropped():
    """A stuck reader: beyond the limit droppable lines are dropped and counted, others never; order is kept."""
    reader, writer = os.pipe()
    outlet = Outlet(writer, limit=200_000)
    filler = b"f" * 69_999 + b"\n"
    outlet.write(filler)
    outlet.write(filler)
    outlet.write(b"d" * 69_999 + b"\n", droppable=True)
    outlet.write(b"kept\n")
    outlet.write(b"dropped\n" * 100_000, droppable=True)
    outlet.write(b"kept too\n" + filler)

    assert outlet.dropped == 2
    with open(reader, "rb", buffering=0) as file:
        data = bytearray()
        while len(data) < 3 * 70_000 + 14:
            data += file.read(1 << 16)
        outlet.close(2.0)
        os.close(writer)
        assert file.read(1) == b""
    assert bytes(data) == filler + filler + b"kept\nkept too\n" + filler
    assert outlet.backlog_bytes == 0


def test_closing_does_not_wait_for_ever_on_a_stuck_reader():
    """A reader that never reads: `close` gives up after its time."""
    reader, writer = os.pipe()
    outlet = Outlet(writer)
    outlet.write(b"x" * 200_000)
    begin = time.monotonic()
    outlet.close(0.1)

    assert time.monotonic() - begin < 0.5
    os.close(reader)
    outlet.close(2.0)
    os.close(writer)
    assert outlet.broken
