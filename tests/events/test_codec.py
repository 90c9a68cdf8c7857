"""The codec: what is written is read back, and nothing a line holds can crash the reader."""

import types
from typing import Any, Union, get_args, get_origin

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpxtop.events import codec
from lpxtop.events.records import KINDS, Header, Mark, Unknown

INTS = st.integers(-(2**53), 2**53)
JSON = st.recursive(
    st.none() | st.booleans() | INTS | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def records() -> st.SearchStrategy:
    """Any event of any kind, with any fields its types allow."""
    return st.one_of(*(st.builds(kind, extra=st.none(), **_fields(kind)) for kind in KINDS))


def _fields(kind: type) -> dict:
    strategies = {}
    for field in msgspec.structs.fields(kind):
        if field.name == "extra":
            continue
        strategies[field.name] = _strategy(field.type)
    return strategies


def _strategy(annotation) -> st.SearchStrategy:
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return JSON
    if origin in (types.UnionType, Union):
        return st.one_of(*map(_strategy, args))
    if origin is list:
        return st.lists(_strategy(args[0]), max_size=4)
    if origin is tuple:
        return st.tuples(*map(_strategy, args))
    if origin is dict:
        return st.dictionaries(_strategy(args[0]), _strategy(args[1]), max_size=3)
    simple = {
        int: INTS,
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(),
        bool: st.booleans(),
        type(None): st.none(),
    }
    return simple[annotation]


@given(records())
def test_every_record_round_trips(event):
    """Writing any event and reading the line gives an equal event, and the same line again."""
    line = codec.encode(event)

    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    again = codec.decode(line)
    assert type(again) is type(event)
    assert codec.encode(again) == line
    assert again == event


@given(
    st.dictionaries(st.text(), JSON, max_size=6), st.sampled_from([*(k.__struct_config__.tag for k in KINDS), "new"])
)
def test_any_object_with_a_kind_and_a_time_survives_a_round_trip(fields, kind):
    """Unknown kinds, unknown fields and fields of a wrong type are written back with the same content."""
    line = msgspec.json.encode(fields | {"k": kind, "t": 5})

    written = codec.encode(codec.decode(line))

    expected, got = msgspec.json.decode(line), msgspec.json.decode(written)
    for name in got.keys() & expected.keys():
        assert got[name] == expected[name]
    # what is missing may only be a known field that had its default, which means the same
    for name in expected.keys() - got.keys():
        default = {f.name: f for k in KINDS if k.__struct_config__.tag == kind for f in msgspec.structs.fields(k)}[name]
        assert expected[name] == (
            default.default if default.default is not msgspec.NODEFAULT else default.default_factory()
        )


@given(st.binary(max_size=200) | st.text(max_size=80).map(str.encode) | JSON.map(msgspec.json.encode))
def test_no_line_crashes_the_reader(line):
    """Any bytes are an event or a CodecError."""
    try:
        event = codec.decode(line)
    except codec.CodecError:
        return
    assert isinstance(event.t, int)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"t":1}', "no kind"),
        (b'{"k":"mark"}', "no kind"),
        (b'{"k":"mark","t":1.5}', "no kind"),
        (b'{"k":"mark","t":true}', "no kind"),
        (b"[" * 100_000, "not JSON"),
        (b'\xff{"k":"mark"}', "not JSON"),
    ],
)
def test_what_is_no_event_says_why(line, why):
    """A line without a kind and an integer time is refused with a reason."""
    with pytest.raises(codec.CodecError, match=why):
        codec.decode(line)


def test_newer_fields_are_kept_beside_the_known_ones():
    """A field of a newer minor version neither hides the known fields nor gets lost."""
    event = codec.decode(b'{"k":"mark","t":7,"text":"hi","colour":"blue"}')

    assert event == Mark(t=7, text="hi", extra={"colour": "blue"})
    assert codec.encode(event) == b'{"k":"mark","t":7,"text":"hi","colour":"blue"}\n'


def test_a_newer_kind_is_passed_through_untouched():
    """A kind this version does not know keeps its fields."""
    event = codec.decode(b'{"k":"aura","t":3,"src":"x","seq":4,"hue":[1,2]}')

    assert event == Unknown(
        t=3, k="aura", raw={"k": "aura", "t": 3, "src": "x", "seq": 4, "hue": [1, 2]}, src="x", seq=4
    )


def test_unknown_values_are_absent_not_zero():
    """None is left out of the line."""
    line = codec.encode(Header(t=0, schema=(1, 0), session="s", wall_ns=1, mono_ns=2, lpxtop="0"))

    assert b"null" not in line
    assert b"simulated" not in line
