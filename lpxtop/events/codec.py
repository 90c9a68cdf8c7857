"""Event <-> one JSON line. The only module that knows how events look on the wire. Must not do I/O.

Reading never raises for what a line holds except `CodecError`, which says why the line is not an event at all.
Unknown kinds become `Unknown`; unknown fields of a known kind are kept in `extra`; both are written back.
"""

from functools import reduce
from operator import or_
from typing import Any

import msgspec

from lpxtop.events.records import KINDS, AnyEvent, Event, Unknown

_TAGS: dict[str, type[Event]] = {str(kind.__struct_config__.tag): kind for kind in KINDS}
_FIELDS: dict[type[Event], frozenset[str]] = {
    kind: frozenset(field.encode_name for field in msgspec.structs.fields(kind)) - {"~extra"} for kind in KINDS
}
_decode_known = msgspec.json.Decoder(reduce(or_, KINDS)).decode
_encode = msgspec.json.Encoder().encode


class CodecError(ValueError):
    """The line is not an event: not JSON, not an object, or without a kind and a time."""


def encode(event: AnyEvent) -> bytes:
    """The event as one line, newline included. Raises ValueError for NaN or infinity hidden in free-form fields."""
    if isinstance(event, Unknown):
        return _encode(event.raw) + b"\n"
    if event.extra is None:
        return _encode(event) + b"\n"
    record = msgspec.to_builtins(event, str_keys=True)
    record.pop("~extra")
    return _encode(record | event.extra) + b"\n"


def decode(line: bytes | bytearray | memoryview) -> AnyEvent:
    """One line as an event. Raises CodecError when it is none."""
    try:
        event = _decode_known(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _decode_odd(line)
    return _decode_odd(line) if event.extra is not None else event


def _decode_odd(line: bytes | bytearray | memoryview) -> AnyEvent:
    """A line that is not exactly a known record: newer fields, a newer kind, a wrong type, or garbage."""
    try:
        raw = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CodecError("not a JSON object")
    kind, t = raw.get("k"), raw.get("t")
    if not isinstance(kind, str) or type(t) is not int:
        raise CodecError("no kind (k) or no integer time (t)")
    if kind in _TAGS:
        event = _with_extra(_TAGS[kind], raw)
        if event is not None:
            return event
    return Unknown(t=t, k=kind, raw=raw, src=_typed(raw.get("src"), str, ""), seq=_typed(raw.get("seq"), int, 0))


def _with_extra(kind: type[Event], raw: dict[str, Any]) -> Event | None:
    """The known fields as a record with the others in `extra`; None when a known field has a wrong type."""
    fields = _FIELDS[kind]
    known = {name: value for name, value in raw.items() if name in fields or name == "k"}
    other = {name: value for name, value in raw.items() if name not in known}
    try:
        event = msgspec.convert(known, kind, str_keys=True)
    except msgspec.ValidationError:
        return None
    return msgspec.structs.replace(event, extra=other) if other else event


def _typed(value: Any, kind: type, default: Any) -> Any:
    return value if type(value) is kind else default
