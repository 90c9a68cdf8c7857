"""Writing recordings: whole lines, private, never over another file, and never in the way of the run."""

import asyncio
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
from lpxtop.events import codec
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
    command = [sys.executable, "-c", script(limit=0, count=10**7)]
    lengths = []
    for batch in range(5):
        paths = [tmp_path / f"{batch}-{number}.jsonl" for number in range(4)]
        writers = [subprocess.Popen([*command, str(path)], stdout=subprocess.PIPE, text=True) for path in paths]
        for process in writers:
            process.stdout.readline()
        for process in writers:
            time.sleep(draw.uniform(0.0, 0.2))
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
        for path in paths:
            times = [event.t for event in Recording.open(str(path))][1:]
            assert times == list(range(len(times)))
            lengths.append(len(times))

    assert max(lengths) > 1000


def test_a_full_file_system_leaves_whole_lines_and_a_reason(tmp_path):
    """On a file system of 64 KiB that is really full: the same, and the reason is the system's own."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "lpxtop-test", str(tmp_path)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs privileges")
    try:
        path = tmp_path / "full.jsonl"
        done = subprocess.run([sys.executable, "-c", script(limit=0, count=2000), str(path)],
                              capture_output=True, text=True, timeout=30, check=True)  # fmt: skip

        assert done.stdout.splitlines()[-1] == "failed No space left on device"
        data = path.read_bytes()
        assert 50_000 < len(data) <= 65_536
        assert data.endswith(b"\n")
        assert [event.t for event in Recording.open(str(path))][1:] == list(range(data.count(b"\n") - 1))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_header_that_does_not_fit_is_refused_and_leaves_no_file(tmp_path):
    """A disk without room for the header: a usage error before the run, and no empty recording left behind."""
    path = tmp_path / "none.jsonl"

    done = subprocess.run([sys.executable, "-c", script(limit=40, count=1), str(path)], capture_output=True, text=True)

    assert "UsageError" in done.stderr
    assert "cannot be written: File too large" in done.stderr
    assert not path.exists()


async def test_a_file_put_in_its_place_is_left_alone(tmp_path):
    """Another file under the recording's name: the recording stops with a reason and the other file keeps its bytes."""
    path = tmp_path / "a.jsonl"
    writer = await RecordingWriter.create(path, HEADER)
    path.rename(tmp_path / "moved.jsonl")
    path.write_text("precious, and not ours")
    writer.event(Mark(t=1, text="x"))
    await writer.close()

    assert writer.status()[0] == "failed"
    assert path.read_text() == "precious, and not ours"
    assert list(Recording.open(str(tmp_path / "moved.jsonl"))) == [HEADER, Mark(t=1, text="x")]


async def test_a_pause_is_written_down(tmp_path):
    """While paused nothing is recorded; the first line after it says for how long and how many events are missing."""
    path = tmp_path / "a.jsonl"
    writer = await RecordingWriter.create(path, HEADER)
    writer.event(Mark(t=1_000_000, text="before"))
    writer.pause()
    assert writer.status()[0] == "paused"
    for number in range(7):
        writer.event(Mark(t=1_500_000 + number, text="unseen"))
    writer.resume()
    writer.event(Mark(t=3_500_000, text="after"))
    await writer.close()

    recording = Recording.open(str(path))
    before, gap, after = list(recording)[1:]
    assert (before.text, after.text) == ("before", "after")
    assert (gap.t, gap.code) == (3_500_000, "recording_gap")
    assert gap.text == "recording was off for 2.5 s; 7 events are missing"
    assert len(list(recording)) == 4


async def test_the_end_is_recorded_even_while_paused(tmp_path):
    """A run that ends while recording is off leaves a finished recording that tells of its gap."""
    path = tmp_path / "a.jsonl"
    writer = await RecordingWriter.create(path, HEADER)
    writer.pause()
    writer.event(Mark(t=1, text="unseen"))
    writer.event(End(t=2_000_000, reason="done"))
    await writer.close()

    gap, end = list(Recording.open(str(path)))[1:]
    assert gap.code == "recording_gap"
    assert isinstance(end, End)


async def test_an_event_that_has_no_line_becomes_a_mark(tmp_path):
    """Text that is not Unicode never raises into the run; the recording says what is missing and goes on."""
    path = tmp_path / "a.jsonl"
    writer = await RecordingWriter.create(path, HEADER)
    writer.event(Finished(t=5, id=0, slot=0, due=0, outcome="stream_error", error="\ud800"))
    writer.event(End(t=6, reason="done"))
    await writer.close()

    mark, end = list(Recording.open(str(path)))[1:]
    assert (mark.t, mark.code) == (5, "event_unwritable")
    assert "finished" in mark.text
    assert isinstance(end, End)


async def test_losses_are_told_before_the_end(tmp_path, monkeypatch):
    """When the disk never catches up, the loss is still written down, before `end`; keyframes make room too."""
    monkeypatch.setattr(writing, "QUEUE_BYTES", 500)
    path = tmp_path / "a.jsonl"
    writer = await RecordingWriter.create(path, HEADER)
    for number in range(50):
        writer.event(Arrivals(t=number, slot=[0], n=[20], gap=list(range(20))))
    writer.event(Keyframe(t=50, state={}))
    writer.event(End(t=51, reason="done"))
    await writer.close()

    events = list(Recording.open(str(path)))
    kept = sum(isinstance(event, Arrivals) for event in events)
    assert events[-2].text.startswith(f"{50 - kept} frames")
    assert isinstance(events[-1], End)
    assert not any(isinstance(event, Keyframe) for event in events)


async def test_lines_go_through_a_descriptor_that_does_not_block():
    """A pipe that somebody made non-blocking and that is full for a while still gets every line."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    sink = LineSink(write_end)
    events = [Mark(t=number, text="x" * 1000) for number in range(300)]
    for event in events:
        sink.event(event)

    def read_slowly():
        got = b""
        while got.count(b"\n") < len(events):
            got += os.read(read_end, 50_000)
        return got

    got = await asyncio.to_thread(read_slowly)
    await sink.close()

    assert [codec.decode(line) for line in got.splitlines()] == events
    assert (sink.error, sink.dropped) == (None, 0)
    os.close(read_end)
    os.close(write_end)


async def test_a_reader_that_went_away_is_told():
    """Nobody at the other end of the pipe: events are taken without complaint, and the reason can be read."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    sink = LineSink(write_end)
    sink.event(Mark(t=1, text="x"))
    await sink.close()
    sink.event(Mark(t=2, text="y"))

    assert sink.error == "Broken pipe"
    os.close(write_end)


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
