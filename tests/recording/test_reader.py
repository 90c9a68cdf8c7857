"""Reading recordings: whatever happened to the file, whole lines are read and damage is said."""

import contextlib
import gzip
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lpxtop.errors import RecordingError
from lpxtop.events import codec
from lpxtop.events.records import End, Mark, Unknown
from lpxtop.recording.reader import Recording

GOLDEN = Path(__file__).parent / "golden" / "minimal-v1.0.jsonl"
ROOT = GOLDEN.parents[3]
KINDS = ["header", "source", "phase", "request", "arrivals", "finished", "load", "mark", "source", "end"]


def kinds(recording):
    return [event.k if isinstance(event, Unknown) else event.__struct_config__.tag for event in recording]


def test_the_first_format_stays_readable_for_ever():
    """The golden file of schema 1.0: every line, in order, with its values, without a problem."""
    recording = Recording.open(str(GOLDEN))
    events = list(recording)

    assert kinds(recording) == KINDS
    assert recording.problems == []
    assert recording.header.target["model"] == "m"
    assert events[4].gap == [5000, 1000, 1200]
    assert events[5].first_token_us == 50_000
    assert recording.last_t() == 500_000


def test_a_file_torn_anywhere_keeps_its_whole_lines(tmp_path):
    """For every length the file may have been cut to: the whole lines before the cut, and the torn rest reported."""
    data = GOLDEN.read_bytes()
    first = data.index(b"\n") + 1
    path = tmp_path / "torn.jsonl"
    for length in range(first, len(data)):
        path.write_bytes(data[:length])
        recording = Recording.open(str(path))

        assert len(list(recording)) == data[:length].count(b"\n")
        torn = length - (data.rfind(b"\n", 0, length) + 1)
        assert any(f"({torn} bytes" in problem for problem in recording.problems) == bool(torn)
        assert any("no end" in problem for problem in recording.problems)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_after_the_header_are_survived(tmp_path, junk):
    """Arbitrary bytes never crash the reader, and the events around them are read."""
    header, rest = GOLDEN.read_bytes().split(b"\n", 1)
    path = tmp_path / "junk.jsonl"
    path.write_bytes(header + b"\n" + junk + b"\n" + rest)

    got = kinds(Recording.open(str(path)))

    assert got[0] == "header"
    assert got[-9:] == KINDS[1:]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_any_file_is_a_recording_or_a_clear_error(tmp_path, data):
    """Opening arbitrary bytes gives a recording or a RecordingError."""
    path = tmp_path / "any"
    path.write_bytes(data)
    with contextlib.suppress(RecordingError):
        list(Recording.open(str(path)))


def test_nul_runs_blank_lines_comments_and_crlf_are_not_damage(tmp_path):
    """What a power loss or an editor leaves behind is passed over without being counted as damage."""
    lines = GOLDEN.read_bytes().splitlines()
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b"\r\n".join([lines[0], b"", b"# a comment", b"\0" * 300, *lines[1:]]) + b"\r\n")
    recording = Recording.open(str(path))

    assert kinds(recording) == KINDS
    assert recording.problems == []


def test_bad_lines_in_the_middle_are_counted(tmp_path):
    """Two damaged lines: the rest is read and the number said."""
    lines = GOLDEN.read_bytes().splitlines()
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n".join([*lines[:3], b'{"k":', b"[1,2]", *lines[3:]]) + b"\n")
    recording = Recording.open(str(path))

    assert kinds(recording) == KINDS
    assert recording.problems == ["2 damaged lines left out"]


def test_an_oversize_line_is_left_out(tmp_path):
    """A line of 40 MB is one damaged line; what follows is read."""
    lines = GOLDEN.read_bytes().splitlines()
    path = tmp_path / "big.jsonl"
    path.write_bytes(
        b"\n".join([*lines[:2], b'{"k":"mark","t":1,"text":"' + b"x" * 40_000_000 + b'"}', *lines[2:]]) + b"\n"
    )
    recording = Recording.open(str(path))

    assert kinds(recording) == KINDS
    assert recording.problems == ["1 damaged line left out"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"\n\n", "no whole line"),
        (b"hello\n", "not a recording"),
        (b'{"k":"mark","t":1,"text":"x"}\n', "not a recording"),
        (b'{"k":"header","t":0,"schema":[2,0],"session":"s","wall_ns":1,"mono_ns":1,"lpxtop":"9"}\n', "schema 2.0"),
        (b'{"k":"header","t":0,"schema":[2,0],"session":5}\n', "reads 1.x"),
        (b'{"k":"header","t":0}\n', "not a recording"),
    ],
)
def test_what_cannot_be_read_says_why(tmp_path, content, says):
    """Empty files, other files and other major schemas are refused with a reason."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)

    with pytest.raises(RecordingError, match=says):
        Recording.open(str(path))


def test_a_missing_file_and_a_directory_are_said(tmp_path):
    """Neither is a traceback."""
    with pytest.raises(RecordingError, match="no file"):
        Recording.open(str(tmp_path / "none"))
    with pytest.raises(RecordingError, match="cannot be read"):
        Recording.open(str(tmp_path))


def test_a_newer_minor_is_read_with_a_note_and_kept_whole(tmp_path):
    """Unknown kinds and fields are read, survive being written again, and the reader says the file is newer."""
    lines = GOLDEN.read_bytes().splitlines()
    lines[0] = lines[0].replace(b'"schema":[1,0]', b'"schema":[1,7],"colour":"blue"')
    lines.insert(3, b'{"k":"aura","t":2500,"hue":[1,2]}')
    path = tmp_path / "newer.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    recording = Recording.open(str(path))

    written = [codec.encode(event).strip() for event in recording]

    assert len(recording.problems) == 1
    assert "newer" in recording.problems[0]
    assert b'"colour":"blue"' in written[0]
    assert written[3] == lines[3]


def test_packed_recordings_are_read_as_far_as_they_go(tmp_path):
    """A .gz reads like the plain file; one cut in the middle gives what can be unpacked."""
    whole = tmp_path / "a.jsonl.gz"
    with gzip.open(whole, "wb") as file:
        file.write(GOLDEN.read_bytes())
    many = tmp_path / "b.jsonl.gz"
    with gzip.open(many, "wb") as file:
        file.write(GOLDEN.read_bytes().rsplit(b"\n", 2)[0] + b"\n")
        for number in range(20_000):
            file.write(b'{"k":"mark","t":%d,"text":"%d"}\n' % (500_000 + number, number * 7919))
    many.write_bytes(many.read_bytes()[:-3000])

    assert kinds(Recording.open(str(whole))) == KINDS
    torn = list(Recording.open(str(many)))
    assert 5_000 < len(torn) < 20_010


def test_last_t_is_found_from_the_tail(tmp_path):
    """The duration of a big file comes from its end, a torn last line left out."""
    path = tmp_path / "long.jsonl"
    lines = [b'{"k":"mark","t":%d,"text":"%s"}' % (number * 1000, b"x" * 100) for number in range(20_000)]
    path.write_bytes(GOLDEN.read_bytes().splitlines()[0] + b"\n" + b"\n".join(lines) + b'\n{"k":"mark","t":99999999999')

    assert Recording.open(str(path)).last_t() == 19_999_000


def test_losses_that_the_writer_told_of_are_said(tmp_path):
    """Marks of dropped frames and of a pause make the recording incomplete, and the reader says in how many places."""
    header, rest = GOLDEN.read_bytes().split(b"\n", 1)
    told = codec.encode(Mark(t=1, text="x", code="arrivals_dropped")) + codec.encode(
        Mark(t=2, text="y", code="recording_gap")
    )
    path = tmp_path / "lossy.jsonl"
    path.write_bytes(header + b"\n" + told + rest)
    recording = Recording.open(str(path))
    list(recording)

    assert len(recording.problems) == 1
    assert "missing in 2 places" in recording.problems[0]


READ = """
import sys
sys.path.insert(0, {root!r})
from lpxtop.errors import RecordingError
from lpxtop.recording.reader import Recording
try:
    recording = Recording.open(sys.argv[1])
    print(len(list(recording)), recording.name, *recording.problems, sep=" | ")
except RecordingError as error:
    print(error)
"""


def read_in_shell(command, **environment):
    """What a reader in a process of its own says; $READ is its command."""
    read = f"{sys.executable} -c '{READ.format(root=str(ROOT)).replace(chr(39), chr(34))}'"
    done = subprocess.run(
        ["bash", "-c", command.replace("$READ", read)], capture_output=True, text=True, timeout=30,
        env={**os.environ, **environment}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.strip()


def test_a_pipe_is_read_to_its_end_however_slowly_it_comes():
    """The header late, the rest later still: iterating waits for the end of the stream, and loses nothing."""
    slowly = f"(sleep 0.2; head -3 {GOLDEN}; sleep 0.3; tail -n +4 {GOLDEN})"

    assert read_in_shell(f"{slowly} | $READ -") == f"{len(KINDS)} | stdin"
    assert read_in_shell(f"$READ <({slowly})").startswith(f"{len(KINDS)} | /dev/fd/")


def test_pipes_that_hold_no_recording_say_so(tmp_path):
    """An empty stream, another one, and a packed one: a reason each, and the packed one is told what to do."""
    packed = tmp_path / "a.gz"
    packed.write_bytes(gzip.compress(GOLDEN.read_bytes()))

    assert read_in_shell("true | $READ -") == "stdin is empty"
    assert read_in_shell("echo hello | $READ -") == "stdin is not a recording"
    assert read_in_shell(f"cat {packed} | $READ -") == "stdin is packed"
    assert read_in_shell("$READ /dev/zero").endswith("neither a file nor a pipe")


def test_a_stream_that_does_not_fit_on_the_disk_is_read_as_far_as_it_was_kept(tmp_path):
    """When the temporary file may not grow: what was kept is read and the reason is among the problems."""
    limited = "import resource,signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"
    code = limited + READ.format(root=str(ROOT))
    done = subprocess.run([sys.executable, "-c", code, "-"], input=GOLDEN.read_bytes(), capture_output=True, timeout=30)

    whole = GOLDEN.read_bytes()[:1000].count(b"\n")
    assert done.stdout.startswith(b"%d | stdin" % whole)
    assert b"could not be kept any longer: File too large" in done.stdout


def test_zstd_is_read_or_its_extra_named(tmp_path):
    """With the extra installed a .zst reads like the plain file, also torn; without it the error names the extra."""
    path = tmp_path / "a.jsonl.zst"
    try:
        import zstandard
    except ImportError:
        path.write_bytes(b"\x28\xb5\x2f\xfd rest")
        with pytest.raises(RecordingError) as caught:
            Recording.open(str(path))
        assert "lpxtop[zstd]" in caught.value.hint
        return
    path.write_bytes(zstandard.compress(GOLDEN.read_bytes()))

    assert kinds(Recording.open(str(path))) == KINDS


def test_damage_inside_a_packed_file_is_said(tmp_path):
    """Bytes overwritten in the middle of a .gz: what came before them is read, and the damage is a problem."""
    path = tmp_path / "a.jsonl.gz"
    marks = b"".join(codec.encode(Mark(t=number, text=str(number * 7919))) for number in range(50_000))
    packed = bytearray(gzip.compress(GOLDEN.read_bytes().split(b"\n")[0] + b"\n" + marks))
    packed[len(packed) // 2 : len(packed) // 2 + 64] = b"\xff" * 64
    path.write_bytes(packed)
    recording = Recording.open(str(path))

    assert len(list(recording)) > 5_000
    assert any("packed file is torn" in problem for problem in recording.problems)


async def test_following_waits_for_what_is_still_written(tmp_path):
    """Follow gives what is there, waits while there is nothing new, completes a torn line, and ends with `end`."""
    path = tmp_path / "growing.jsonl"
    header = GOLDEN.read_bytes().split(b"\n", 1)[0] + b"\n"
    path.write_bytes(header)
    late = codec.encode(Mark(t=1, text="late"))
    appended = [late[:9], late[9:], b"", codec.encode(End(t=2, reason="done"))]

    async def sleep(_seconds):
        with path.open("ab") as file:
            file.write(appended.pop(0))

    events = [event async for event in Recording.open(str(path)).follow(sleep)]

    assert events[1:] == [Mark(t=1, text="late"), End(t=2, reason="done")]
    assert appended == []


def test_last_t_behind_a_long_run_of_nul(tmp_path):
    """A file whose last megabytes are NUL, as after a power loss, still tells when it ended."""
    path = tmp_path / "nul.jsonl"
    path.write_bytes(GOLDEN.read_bytes() + b"\0" * 6_000_000)

    assert Recording.open(str(path)).last_t() == 500_000


def test_a_named_pipe_is_read_like_a_file(tmp_path):
    """mkfifo: the reader takes what another process writes into it."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    feeder = threading.Thread(target=lambda: path.write_bytes(GOLDEN.read_bytes()))
    feeder.start()

    assert kinds(Recording.open(str(path))) == KINDS
    feeder.join()
