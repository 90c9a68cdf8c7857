"""The recordings there are: the samples that come with lpxtop and the user's own. Must not read more than headers."""

import datetime
from pathlib import Path

import msgspec

from lpxtop.errors import RecordingError
from lpxtop.recording.reader import read_header

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


class Entry(msgspec.Struct, frozen=True):
    """One recording: where it is, what it is, when it began (UTC)."""

    path: Path
    title: str
    bytes: int
    wall_ns: int


def sample_directory() -> Path | None:
    """Where the samples are: inside the installed package, or beside it in the source tree."""
    package = Path(__file__).resolve().parent.parent
    for directory in (package / "recordings", package.parent / "recordings"):
        if directory.is_dir():
            return directory
    return None


def recordings(user_directory: Path) -> list[Entry]:
    """The user's recordings, newest first, then the samples. Unreadable files are left out."""
    samples = sample_directory()
    own = sorted(_entries(user_directory), key=lambda entry: entry.wall_ns, reverse=True)
    return own + (sorted(_entries(samples), key=lambda entry: entry.path.name) if samples else [])


def _entries(directory: Path) -> list[Entry]:
    found = []
    for path in directory.glob("*") if directory.is_dir() else ():
        if path.name.endswith(SUFFIXES):
            entry = _entry(path)
            if entry is not None:
                found.append(entry)
    return found


def _entry(path: Path) -> Entry | None:
    """None for what is not a recording, or cannot be read."""
    try:
        if not path.is_file():
            return None
        header = read_header(path)
        size = path.stat().st_size
        begun = datetime.datetime.fromtimestamp(header.wall_ns / 1e9, datetime.UTC)
    except (RecordingError, OSError, ValueError, OverflowError):
        return None
    model = header.target.get("model") or header.kind
    marked = " SIM" if header.simulated else ""
    return Entry(path, f"{begun:%Y-%m-%d %H:%M} {header.kind} {model}{marked}", size, header.wall_ns)
