"""Reads files of prompts: plain lines, JSON lines, ShareGPT. Every mistake names the file and the line.

Must not build requests (prompts.py does) or change a prompt.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from lpxtop.errors import UsageError

Entry = str | list[dict[str, Any]]
"""A text, or the messages of a chat."""

_SHAPES = {".txt": "text", ".jsonl": "lines", ".ndjson": "lines", ".json": "list", "[": "list", "{": "lines"}
_HUMAN = ("human", "user")
_LINES = re.compile(r"\r\n|\n|\r")


def read_entries(path: Path, api: str = "chat") -> list[Entry]:
    """The prompts of a file, in order. Empty lines are skipped. Raises UsageError.

    By its ending: `.txt` one prompt a line; `.jsonl` a JSON object a line; `.json` a list of them; else by its first
    character. An object has `prompt` (text), `messages` (chat), or ShareGPT's `conversations` (its first human turn).
    """
    text = _read(path)
    shape = _SHAPES.get(path.suffix.lower()) or _SHAPES.get(text.lstrip()[:1], "text")
    if shape == "list":
        entries = list(_json_list(path, text, api))
    elif shape == "lines":
        entries = list(_json_lines(path, text, api))
    else:
        entries = [line for _, line in _lines(text)]
    if not entries:
        raise UsageError(f"{path}: no prompt in it", "one prompt a line, or JSON lines with prompt or messages")
    return entries


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--prompts {path}: {error.strerror}") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line}: not UTF-8", "iconv -t utf-8 converts it") from None


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that hold something, numbered from 1. Only CR and LF end a line: prompts may hold Unicode's others."""
    for number, line in enumerate(_LINES.split(text), 1):
        if line.strip():
            yield number, line


def _json_lines(path: Path, text: str, api: str) -> Iterator[Entry]:
    for number, line in _lines(text):
        where = f"{path}:{number}"
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise UsageError(f"{where}: not JSON: {error}") from None
        yield _entry(where, record, api)


def _json_list(path: Path, text: str, api: str) -> Iterator[Entry]:
    try:
        records = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from None
    if not isinstance(records, list):
        raise UsageError(f"{path}: not a list", "a .json file holds a list of prompts; JSON lines end in .jsonl")
    for index, record in enumerate(records, 1):
        yield _entry(f"{path}: entry {index}", record, api)


def _entry(where: str, record: Any, api: str) -> Entry:
    """What one JSON value asks; a bare string is a prompt."""
    if isinstance(record, str) and record.strip():
        return record
    if not isinstance(record, dict):
        raise UsageError(f"{where}: neither text nor an object", 'like {"prompt": "…"}')
    for name, read in _FIELDS.items():
        if name in record:
            return read(where, record[name], api)
    raise UsageError(f"{where}: has none of {', '.join(_FIELDS)}", 'like {"prompt": "…"}')


def _prompt(where: str, value: Any, api: str) -> Entry:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{where}: prompt is not a text, or an empty one")
    return value


def _messages(where: str, value: Any, api: str) -> Entry:
    if api != "chat":
        raise UsageError(f"{where}: messages are for the chat API", "leave out --api completions, or give prompt")
    good = (
        isinstance(value, list) and value and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value)
    )
    if not good:
        raise UsageError(f"{where}: messages is not a list of objects with a role")
    messages: list[dict[str, Any]] = value
    return messages


def _conversation(where: str, value: Any, api: str) -> Entry:
    turns = value if isinstance(value, list) else []
    for turn in turns:
        if isinstance(turn, dict) and turn.get("from") in _HUMAN:
            return _prompt(where, turn.get("value"), api)
    raise UsageError(f"{where}: conversations has no turn from human or user")


_FIELDS: dict[str, Callable[[str, Any, str], Entry]] = {
    "prompt": _prompt,
    "messages": _messages,
    "conversations": _conversation,
}
