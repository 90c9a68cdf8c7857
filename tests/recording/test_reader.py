"""Reading recordings: whatever happened to the file, whole lines are read and damage is said."""

import contextlib
import gzip
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lpxtop.errors import RecordingError
from lpxtop.events import codec
from lpxtop.events.records import Unknown
from lpxtop.recording.reader import Recording

GOLDEN = Path(__file__).parent / "golden" / "minimal-v1.0.jsonl"
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
