"""Payload to facts: every shape servers send, what it means by hand, and that no JSON at all makes it stumble."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpxtop.load import deltas
from lpxtop.load.deltas import CONTENT, EMPTY, REASONING, Facts, read


def chat(delta, *, choice=None, **more):
    return json.dumps(
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None, **(choice or {})}], **more}
    ).encode()


def told(facts):
    """The fields that say something, without the mark of the short way."""
    values = {field: getattr(facts, field) for field in facts.__struct_fields__ if field != "common"}
    return {field: value for field, value in values.items() if value != getattr(Facts(), field)}


TEXT = {"is_event": True, "bears": True, "content": True}
THOUGHT = {"is_event": True, "bears": True, "reasoning": True}
NOTHING = {"is_event": True}
USAGE = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}

SHAPES = [
    ("content", chat({"content": "x"}), TEXT),
    ("role and no content", chat({"role": "assistant", "content": ""}), NOTHING),
    ("role and null", chat({"role": "assistant", "content": None}), NOTHING),
    ("an empty delta", chat({}), NOTHING),
    ("a delta of null", chat(None), NOTHING),
    ("a space is a token", chat({"content": " "}), TEXT),
    (
        "nulls of SGLang",
        chat({"role": None, "content": "x", "reasoning_content": None, "tool_calls": None}, usage=None),
        TEXT,
    ),
    ("nulls of vLLM", chat({"content": "x"}, choice={"logprobs": None, "token_ids": None, "stop_reason": None}), TEXT),
    ("reasoning_content", chat({"content": None, "reasoning_content": "x"}), THOUGHT),
    ("reasoning", chat({"reasoning": "x"}), THOUGHT),
    ("thinking", chat({"thinking": "x"}), THOUGHT),
    ("reasoning_details", chat({"reasoning_details": [{"type": "reasoning.text", "text": "x"}]}), THOUGHT),
    ("encrypted reasoning", chat({"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}), THOUGHT),
    ("no reasoning details", chat({"content": "x", "reasoning_details": []}), TEXT),
    ("both in one chunk", chat({"content": "x", "reasoning": "y"}), TEXT | THOUGHT),
    ("content in parts", chat({"content": [{"type": "text", "text": "x"}]}), TEXT),
    ("thinking in parts", chat({"content": [{"type": "thinking", "thinking": []}]}), THOUGHT),
    ("refusal", chat({"refusal": "no"}), TEXT),
    ("a tool's name", chat({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}), TEXT),
    ("a tool's arguments", chat({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}), TEXT),
    (
        "a tool call without either",
        chat({"tool_calls": [{"index": 0, "id": "a", "function": {"arguments": ""}}]}),
        NOTHING,
    ),
    ("the old function call", chat({"function_call": {"arguments": "{"}}), TEXT),
    ("completions", json.dumps({"choices": [{"index": 0, "text": "x", "finish_reason": None}]}).encode(), TEXT),
    ("text beside an empty delta", json.dumps({"choices": [{"text": "x", "delta": {}}]}).encode(), TEXT),
    ("completions, no text", json.dumps({"choices": [{"index": 0, "text": ""}]}).encode(), NOTHING),
    ("a finish", chat({}, choice={"finish_reason": "stop"}), NOTHING | {"finish_reason": "stop"}),
    (
        "a finish with the last token",
        chat({"content": "x"}, choice={"finish_reason": "length"}),
        TEXT | {"finish_reason": "length"},
    ),
    ("another choice", chat({"content": "x"}, choice={"index": 2}), TEXT | {"index": 2}),
    ("final usage", json.dumps({"choices": [], "usage": USAGE}).encode(), {"input_tokens": 9, "output_tokens": 4}),
    ("usage of nulls", json.dumps({"choices": [], "usage": {"completion_tokens": None}}).encode(), {}),
    (
        "usage in floats",
        json.dumps({"choices": [], "usage": {"completion_tokens": 4.0}}).encode(),
        {"output_tokens": 4},
    ),
    (
        "usage with details",
        json.dumps(
            {
                "choices": [],
                "usage": {
                    **USAGE,
                    "completion_tokens_details": {"reasoning_tokens": 3},
                    "prompt_tokens_details": {"cached_tokens": 8},
                },
            }
        ).encode(),
        {"input_tokens": 9, "output_tokens": 4, "reasoning_tokens": 3, "cached_tokens": 8},
    ),
    ("continuous usage", chat({"content": "x"}, usage=USAGE), TEXT | {"cumulative": 4, "input_tokens": 9}),
    (
        "continuous usage of a thought",
        chat({"reasoning": "x"}, usage=USAGE),
        THOUGHT | {"cumulative": 4, "input_tokens": 9},
    ),
    (
        "Groq",
        json.dumps({"choices": [], "x_groq": {"usage": {**USAGE, "queue_time": 0.002, "prompt_time": 0.01}}}).encode(),
        {"input_tokens": 9, "output_tokens": 4, "timings": {"queue_ms": 2.0, "prompt_ms": 10.0}},
    ),
    (
        "token ids",
        chat({"content": "xyz"}, choice={"token_ids": [1, 2, 3]}),
        TEXT | {"tokens": 3, "token_source": "token_ids"},
    ),
    (
        "token ids without text",
        chat({"content": ""}, choice={"token_ids": [1]}),
        NOTHING | {"bears": True, "tokens": 1, "token_source": "token_ids"},
    ),
    (
        "the end token's id",
        chat({}, choice={"token_ids": [2], "finish_reason": "stop"}),
        NOTHING | {"tokens": 1, "token_source": "token_ids", "finish_reason": "stop"},
    ),
    (
        "logprobs",
        chat({"content": "xy"}, choice={"logprobs": {"content": [{"token": "x"}, {"token": "y"}]}}),
        TEXT | {"tokens": 2, "token_source": "logprobs"},
    ),
    (
        "logprobs of completions",
        json.dumps({"choices": [{"text": "xy", "logprobs": {"tokens": ["x", "y"]}}]}).encode(),
        TEXT | {"tokens": 2, "token_source": "logprobs"},
    ),
    (
        "llama.cpp's timings",
        json.dumps({"choices": [], "timings": {"cache_n": 3, "prompt_ms": 12.5}}).encode(),
        {"timings": {"cache_n": 3.0, "prompt_ms": 12.5}, "cached_tokens": 3},
    ),
    (
        "vLLM's metrics",
        json.dumps({"choices": [], "metrics": {"queue_time_ms": 1.5, "note": "x", "ok": True}}).encode(),
        {"timings": {"queue_time_ms": 1.5}},
    ),
    (
        "Fireworks",
        json.dumps({"choices": [], "perf_metrics": {"server-time-to-first-token": 0.2}}).encode(),
        {"timings": {"server-time-to-first-token": 0.2}},
    ),
    ("Azure's prompt filter", json.dumps({"choices": [], "prompt_filter_results": [{}]}).encode(), {}),
    (
        "Azure's late filter",
        json.dumps({"choices": [{"index": 0, "content_filter_offsets": {}, "finish_reason": None}]}).encode(),
        NOTHING,
    ),
    ("an error object", b'{"error":{"message":"m","type":"t","code":500}}', {"error": ("t", "m")}),
    ("an error with a code only", b'{"error":{"message":"m","code":500}}', {"error": ("500", "m")}),
    ("an error string", b'{"error":"m","error_type":"generation"}', {"error": ("generation", "m")}),
    (
        "object error",
        b'{"object":"error","message":"m","type":"NotFoundError","code":404}',
        {"error": ("NotFoundError", "m")},
    ),
    ("type error", b'{"type":"error","message":"m"}', {"error": ("error", "m")}),
    ("detail", b'{"detail":"m"}', {"error": ("detail", "m")}),
    (
        "details",
        b'{"detail":[{"loc":["body",3],"msg":"m"},{"loc":7,"msg":"n"},"o"]}',
        {"error": ("detail", "body.3: m; n; o")},
    ),
    ("no error", b'{"error":null,"choices":[]}', {}),
    ("an empty error", b'{"error":{},"choices":[]}', {}),
    (
        "a fatal finish",
        chat({}, choice={"finish_reason": "abort"}),
        NOTHING
        | {"finish_reason": "abort", "error": ("abort", "the server ended the answer with finish_reason abort")},
    ),
    ("bad UTF-8", b'{"choices":[{"delta":{"content":"\xff"}}]}', TEXT | {"flags": ("bad_utf8",)}),
    ("no JSON", b"{oops", {"flags": ("bad_json",)}),
    ("not an object", b"[1]", {"flags": ("bad_json",)}),
]


@pytest.mark.parametrize(("name", "payload", "expected"), SHAPES, ids=[shape[0] for shape in SHAPES])
def test_each_shape_says_what_it_means(name, payload, expected):
    """One payload of every known shape, with the facts read from it by hand."""
    assert told(read(payload)) == expected


def test_the_common_chunks_cost_no_new_object():
    """Plain content, reasoning and empty deltas share their facts, so that a token allocates nothing for them."""
    assert read(chat({"content": "x"})) is CONTENT
    assert read(chat({"reasoning": "x"})) is REASONING
    assert read(chat({"role": "assistant"})) is EMPTY


DELTAS = st.fixed_dictionaries(
    {},
    optional={
        "content": st.sampled_from(["x", "", None]),
        "role": st.sampled_from(["assistant", None]),
        "reasoning_content": st.sampled_from(["y", "", None]),
        "reasoning": st.sampled_from(["y", "", None]),
        "refusal": st.sampled_from(["n", None]),
        "tool_calls": st.sampled_from([None, [], [{"function": {"name": "f"}}]]),
    },
)
CHUNKS = st.fixed_dictionaries(
    {
        "choices": st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "delta": st.none() | DELTAS,
                    "text": st.sampled_from(["z", "", None]),
                    "index": st.integers(0, 2),
                    "finish_reason": st.sampled_from([None, "stop", "error"]),
                    "logprobs": st.sampled_from([None, {"content": [1]}]),
                    "token_ids": st.sampled_from([None, [], [5, 6]]),
                },
            ),
            max_size=2,
        )
    },
    optional={
        "usage": st.sampled_from(
            [
                None,
                {},
                USAGE,
                {"completion_tokens": 0},
                {"completion_tokens": -1},
                {**USAGE, "completion_tokens_details": {"reasoning_tokens": 1}},
            ]
        ),
        "error": st.sampled_from([None, "boom"]),
        "timings": st.sampled_from([None, {"prompt_ms": 1.0}]),
    },
)


@settings(max_examples=500, deadline=None)
@given(CHUNKS)
def test_the_short_way_says_what_the_long_way_says(chunk):
    """The typed decoding of common chunks and the tolerant reading of any agree, whatever the mix of fields."""
    payload = json.dumps(chunk).encode()
    assert told(read(payload)) == told(deltas._read_any(payload))


KEYS = st.sampled_from(
    [
        "choices",
        "delta",
        "content",
        "usage",
        "error",
        "detail",
        "loc",
        "msg",
        "message",
        "timings",
        "cache_n",
        "completion_tokens",
        "prompt_tokens",
        "x_groq",
        "queue_time",
        "tool_calls",
        "function",
        "name",
        "object",
        "logprobs",
        "token_ids",
        "finish_reason",
        "index",
        "reasoning_details",
        "text",
        "type",
        "code",
    ]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "x", "error", "stop", 10**400, 1e308])
)
ANY = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=25
)


@settings(max_examples=500, deadline=None)
@given(ANY)
def test_no_json_makes_it_stumble(value):
    """Any JSON whatever, with known names in wrong places and of wrong types: facts that can be written down again."""
    payload = json.dumps(value).encode()
    facts = read(payload)
    assert isinstance(facts, Facts)
    assert all(number == number and abs(number) < float("inf") for number in (facts.timings or {}).values())  # noqa: PLR0124
    kind, text = deltas.error_text(payload)
    assert kind is None or isinstance(kind, str)
    assert isinstance(text, str)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_no_bytes_make_it_stumble(payload):
    """Bytes that are no JSON are said to be none."""
    try:
        known = isinstance(msgspec.json.decode(payload), dict)
    except (msgspec.DecodeError, UnicodeDecodeError):
        known = False
    if not known:
        assert "bad_json" in read(payload).flags


def test_deeply_nested_json_is_only_a_bad_payload():
    """A hundred thousand brackets neither crash nor hang."""
    assert "bad_json" in read(b"[" * 100_000).flags
    assert "bad_json" in read(b'{"choices":[{"delta":{"x":' + b"[" * 100_000).flags


BODIES = [
    (b'{"error":{"message":"m","type":"t"}}', ("t", "m")),
    (b'[{"error":{"message":"m","status":"RESOURCE_EXHAUSTED","code":429}}]', ("429", "m")),
    (b'{"message":"m"}', (None, "m")),
    (b'{"Message":"m"}', (None, "m")),
    (b'{"title":"m","status":400}', (None, "m")),
    (b'{"detail":[{"loc":["body","n"],"msg":"m"}]}', ("detail", "body.n: m")),
    (
        b"<html><style>p{}</style><body><h1>502 Bad  Gateway</h1><hr>nginx</body></html>",
        (None, "502 Bad Gateway nginx"),
    ),
    (b"upstream connect error", (None, "upstream connect error")),
    (b"\xff\xfe", (None, "\ufffd\ufffd")),
    (b"", (None, "")),
]


@pytest.mark.parametrize(("body", "expected"), BODIES)
def test_the_words_of_an_error_body(body, expected):
    """The message out of each shape of error body, and its type where it has one."""
    assert deltas.error_text(body) == expected
