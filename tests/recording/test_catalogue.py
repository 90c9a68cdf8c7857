"""The list of recordings: what is one is listed, newest first; nothing else is, and nothing is read beyond headers."""

import gzip
import os

from lpxtop.events import codec
from lpxtop.events.records import Header
from lpxtop.recording import catalogue


def header(wall_s, **fields):
    return codec.encode(
        Header(t=0, schema=(1, 0), session="s", wall_ns=wall_s * 10**9, mono_ns=1, lpxtop="0", **fields)
    )


def listed(directory):
    return [entry for entry in catalogue.recordings(directory) if entry.path.parent == directory]


def test_the_users_recordings_come_newest_first_and_then_the_samples(tmp_path):
    """Order by the header's wall clock, whatever the names; the packaged samples follow."""
    (tmp_path / "b.jsonl").write_bytes(header(1_700_000_000, target={"model": "old"}))
    (tmp_path / "a.jsonl").write_bytes(header(1_800_000_000, target={"model": "new"}, simulated=True))

    entries = catalogue.recordings(tmp_path)

    assert [entry.title for entry in entries[:2]] == ["2027-01-15 08:00 run new SIM", "2023-11-14 22:13 run old"]
    assert entries[2:]
    assert all(entry.path.parent == catalogue.sample_directory() for entry in entries[2:])


def test_what_is_no_recording_is_left_out(tmp_path):
    """Other files, damaged ones, other majors, impossible dates, directories and pipes do not spoil the list."""
    (tmp_path / "good.jsonl").write_bytes(header(1_700_000_000))
    (tmp_path / "notes.txt").write_bytes(header(1_700_000_000))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "other.jsonl").write_bytes(b"hello\n")
    (tmp_path / "major.jsonl").write_bytes(header(1).replace(b"[1,0]", b"[9,0]"))
    (tmp_path / "date.jsonl").write_bytes(header(10**15))
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(header(1))[:12])
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.jsonl")

    assert [entry.path.name for entry in listed(tmp_path)] == ["good.jsonl"]


def test_listing_reads_no_more_than_headers(tmp_path):
    """A packed recording of 30 MB is listed without being unpacked: what is wrong in its middle is not even noticed."""
    path = tmp_path / "big.jsonl.gz"
    packed = gzip.compress(header(1_700_000_000) + os.urandom(3_000_000).hex().encode() * 5, 1)
    path.write_bytes(packed[: len(packed) // 2])

    (entry,) = listed(tmp_path)

    assert entry.bytes == path.stat().st_size


def test_a_directory_that_does_not_exist_lists_the_samples(tmp_path):
    """The first start of lpxtop: no state directory yet."""
    entries = catalogue.recordings(tmp_path / "none")

    assert entries
    assert {entry.path.parent for entry in entries} == {catalogue.sample_directory()}
