"""`lpxtop explain "ERROR TEXT"`: finds an error text in the table errors.toml and says cause, check, cure. Pure text.

Must not run what it advises.
"""

import functools
import re
import textwrap
import tomllib
from importlib import resources

import msgspec

from lpxtop.probes import xid

WIDTH = 80
MOST_ENTRIES = 3
_XID = re.compile(r"\bxid\b\D{0,40}?(?:\([^)]*\)\s*:?\s*)?(\d{1,3})\b", re.IGNORECASE)


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row: `match` are regular expressions, any of which means this error; `sample` is a text as people paste it."""

    id: str
    title: str
    match: list[str]
    sample: str
    cause: str
    check: str
    cure: str
    xids: list[int] = []


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    errors: list[Entry]


@functools.cache
def entries() -> tuple[Entry, ...]:
    """The table, most special first."""
    text = resources.files(__package__).joinpath("errors.toml").read_text(encoding="utf-8")
    return tuple(msgspec.convert(tomllib.loads(text), _Table).errors)


def find(text: str) -> list[Entry]:
    """The entries an error text speaks of, in the table's order; a log full of them gives several."""
    flat = " ".join(text.split())
    numbers = {int(number) for number in _XID.findall(flat)}
    return [
        entry
        for entry in entries()
        if numbers & set(entry.xids) or any(re.search(pattern, flat, re.IGNORECASE) for pattern in entry.match)
    ]


def explain_error(text: str) -> str | None:
    """Cause, check and cure of an error text or code, at most three errors; None when the table has nothing."""
    found = find(text)[:MOST_ENTRIES]
    if found:
        return "\n\n".join(_shown(entry) for entry in found)
    number = _XID.search(text)
    return _unlisted_xid(int(number.group(1))) if number else None


def _unlisted_xid(number: int) -> str:
    meaning = xid.MEANING.get(number)
    known = meaning or "not in this table; NVIDIA's catalogue is at docs.nvidia.com/deploy/xid-errors"
    whose = "a program, mostly" if number in xid.APPLICATION else "driver or hardware"
    return f"XID {number}: {known}\n  cause  {whose}\n  check  sudo dmesg -T | grep -i xid"


def _shown(entry: Entry) -> str:
    lines = [entry.title]
    for name in ("cause", "check", "cure"):
        text = " ".join(getattr(entry, name).split())
        lines += textwrap.wrap(
            text, WIDTH, initial_indent=f"  {name:<6} ", subsequent_indent=" " * 9, break_on_hyphens=False,
            break_long_words=False,
        )  # fmt: skip
    return "\n".join(lines)
