"""Writing recordings: whole lines, private, never over another file, and never in the way of the run."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lpxtop.errors import UsageError
from lpxtop.events.records import Arrivals, End, Finished, Header, Keyframe, Mark
from lpxtop.recording import writer as writing
from lpxtop.recording.reader import Recording
from lpxtop.recording.writer import LineSink, RecordingWriter, default_path

ROOT = Path(__file__).resolve().parents[2]
HEADER = Header(t=0, schema=(1, 0), session="s", wall_ns=1_800_000_000_000_000_000, mono_ns=1, lpxtop="0")


async def test_what_is_written_is_read_back(tmp_path):
    """Events come back equal and in order; the file is the user's alone."""
    path = tmp_path / "a.jsonl"
    events = [Mark(t=number, text=str(number)) for number in range(500)] + [End(t=500, reason="done")]
    writer = await RecordingWriter.create(path, HEADER)
    for event in events:
        writer.event(event)
    await writer.close()

    assert list(Recording.open(str(path))) == [HEADER, *events]
    assert path.stat().st_mode & 0o777 == 0o600
    assert writer.status() == ("on", path, path.stat().st_size, None)


async def test_the_header_is_on_disk_before_anything_else(tmp_path):
    """After create the header is a whole line in the file."""
    path = tmp_path / "a.jsonl"
    writer = await RecordingWriter.create(path, HEADER)

    assert path.read_bytes().count(b"\n") == 1
    await writer.close()


async def test_keyframes_know_where_they_are(tmp_path):
    """Each keyframe carries its own offset and that of the one before."""
    path = tmp_path / "a.jsonl"
    writer = await RecordingWriter.create(path, HEADER)
    for t in range(3):
        writer.event(Mark(t=t, text="é"))
        writer.event(Keyframe(t=t, state={"n": t}))
    await writer.close()

    data = path.read_bytes()
    found = [json.loads(line) for line in data.splitlines() if b'"keyframe"' in line]
    assert [data[k["offset"] :].startswith(b'{"k":"keyframe"') for k in found] == [True] * 3
    assert [k.get("prev") for k in found] == [None, found[0]["offset"], found[1]["offset"]]


async def test_it_never_overwrites_and_follows_no_link(tmp_path):
    """An existing file and a symbolic link are refused, and stay as they were."""
    existing, link = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    existing.write_text("precious")
    link.symlink_to(tmp_path / "target.jsonl")

    for path in (existing, link):
        with pytest.raises(UsageError):
            await RecordingWriter.create(path, HEADER)
    assert existing.read_text() == "precious"
    assert not (tmp_path / "target.jsonl").exists()


async def test_a_directory_that_cannot_be_written_is_said(tmp_path):
    """A missing directory is a usage error with a way out."""
    with pytest.raises(UsageError) as caught:
        await RecordingWriter.create(tmp_path / "none" / "a.jsonl", HEADER)

    assert "--no-record" in caught.value.hint


async def test_a_file_that_vanishes_stops_the_recording_and_says_so(tmp_path):
    """Removing the file under the writer: state failed with a reason, and events are still taken without complaint."""
    path = tmp_path / "a.jsonl"
    writer = await RecordingWriter.create(path, HEADER)
    path.unlink()
    writer.event(Mark(t=1, text="x"))
    await writer.close()
    writer.event(Mark(t=2, text="y"))

    state, _, _, reason = writer.status()
    assert state == "failed"
    assert "gone" in reason


async def test_a_slow_disk_costs_arrivals_and_nothing_else(tmp_path, monkeypatch):
    """With the queue full, arrivals are dropped and the loss is written down; finished and end are not dropped."""
    monkeypatch.setattr(writing, "QUEUE_BYTES", 2000)
    path = tmp_path / "a.jsonl"
    writer = await RecordingWriter.create(path, HEADER)
    for number in range(100):
        writer.event(Arrivals(t=number, slot=[0], n=[20], gap=list(range(20))))
        writer.event(Finished(t=number, id=number, slot=0, due=0, outcome="ok"))
    await writer._drain()
    writer.event(End(t=100, reason="done"))
    await writer.close()

    events = list(Recording.open(str(path)))
    kept = sum(isinstance(event, Arrivals) for event in events)
    dropped = next(event for event in events if isinstance(event, Mark))
    assert sum(isinstance(event, Finished) for event in events) == 100
    assert kept < 100
    assert dropped.text.startswith(f"{100 - kept} frames")
    assert isinstance(events[-1], End)


SCRIPT = """
import asyncio, sys, resource
sys.path.insert(0, {root!r})
from pathlib import Path
from lpxtop.events.records import Header, Mark
from lpxtop.recording.writer import RecordingWriter
limit = {limit}
if limit:
    import signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
async def main():
    header = Header(t=0, schema=(1, 0), session="s", wall_ns=1, mono_ns=1, lpxtop="0")
    writer = await RecordingWriter.create(Path(sys.argv[1]), header)
    print("ready", flush=True)
    for number in range({count}):
        writer.event(Mark(t=number, text="x" * 50))
        if number % 50 == 0:
            await asyncio.sleep(0.001)
    await writer.close()
    print(writer.status()[0], writer.status()[3], flush=True)
asyncio.run(main())
"""


def script(**values):
    return textwrap.dedent(SCRIPT).format(root=str(ROOT), **values)


def test_a_full_disk_leaves_whole_lines_and_a_reason(tmp_path):
    """When the system refuses to let the file grow: state failed, the file ends at a whole line, all of it readable."""
    path = tmp_path / "full.jsonl"

    done = subprocess.run([sys.executable, "-c", script(limit=20_000, count=2000), str(path)],
                          capture_output=True, text=True, timeout=30, check=True)  # fmt: skip

    assert done.stdout.splitlines()[-1].startswith("failed File too large")
    data = path.read_bytes()
    assert 19_000 < len(data) <= 20_000
    assert data.endswith(b"\n")
    assert len(list(Recording.open(str(path)))) == data.count(b"\n")


def test_kill_9_at_any_moment_leaves_whole_lines(tmp_path):
    """Twenty writers killed at random moments: every recording opens and its times are 0, 1, 2, … without a hole."""
    draw = random.Random(5)
    for attempt in range(20):
        path = tmp_path / f"{attempt}.jsonl"
        process = subprocess.Popen(
            [sys.executable, "-c", script(limit=0, count=10**7), str(path)], stdout=subprocess.PIPE, text=True
        )
        process.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.7))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()

        times = [event.t for event in Recording.open(str(path))][1:]
        assert times == list(range(len(times)))


async def test_lines_to_a_reader_that_stalls_do_not_stall_the_session(tmp_path, monkeypatch):
    """A pipe nobody reads: events are taken at once, arrivals beyond the backlog are dropped and counted."""
    monkeypatch.setattr(writing, "PIPE_BYTES", 100_000)
    monkeypatch.setattr(writing, "CLOSE_S", 0.2)
    read_end, write_end = os.pipe()
    sink = LineSink(write_end)
    begin = time.perf_counter()
    for number in range(20_000):
        sink.event(Arrivals(t=number, slot=[0], n=[5], gap=[1, 2, 3, 4, 5]))
    took = time.perf_counter() - begin
    await sink.close()

    assert took < 2.0
    assert sink.dropped > 10_000
    os.close(read_end)


def test_default_names_are_fresh_utc_and_safe(tmp_path):
    """The name holds the time in UTC and a harmless form of the model; a second one in the same second differs."""
    wall = 1_800_000_000_000_000_000

    first = default_path(tmp_path / "new", wall, "meta/../Llama 3.1:8B")
    first.write_text("x")
    second = default_path(tmp_path / "new", wall, "meta/../Llama 3.1:8B")

    assert first.name == "2027-01-15T08-00-00-Llama-3.1-8B.lpx.jsonl"
    assert second.name == "2027-01-15T08-00-00-Llama-3.1-8B-2.lpx.jsonl"
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
