"""The request shape: what to try first with a server, what to change when it names a field, what a counted prompt says.

Decisions only (reference/wire-metrics-stats.md, A.3): must not send anything.
"""

import re
from collections.abc import Callable
from typing import Any

import msgspec

from lpxtop.load.deltas import error_text
from lpxtop.load.prompts import MARK_TOKENS
from lpxtop.plan import Negotiated, Sampling

_NO_CONTINUOUS_USAGE = frozenset({"llama.cpp", "TGI", "Ollama", "LMDeploy"})
_NO_IGNORE_EOS = frozenset({"TGI", "Ollama"})
_NO_MIN_TOKENS = _NO_IGNORE_EOS | {"llama.cpp"}
_LEAST_PER_WORD, _MOST_PER_WORD = 0.5, 10.0


def first_shape(sampling: Sampling, kind: str | None, version: str | None) -> Negotiated:
    """What the plan wants, without what this kind of server is known not to have."""
    return Negotiated(
        include_usage=sampling.stream,
        continuous_usage=sampling.stream and kind not in _NO_CONTINUOUS_USAGE,
        ignore_eos=sampling.ignore_eos and kind not in _NO_IGNORE_EOS,
        min_tokens=sampling.ignore_eos and kind not in _NO_MIN_TOKENS,
        server_kind=kind,
        server_version=version,
    )


_Change = tuple[str, Callable[[Negotiated], bool], Callable[[Negotiated], Negotiated]]


def _without(**fields: Any) -> Callable[[Negotiated], Negotiated]:
    return lambda shape: msgspec.structs.replace(shape, **fields)


_CHANGES: tuple[_Change, ...] = (
    ("continuous_usage_stats", lambda s: s.continuous_usage, _without(continuous_usage=False)),
    ("include_usage", lambda s: s.include_usage, _without(include_usage=False, continuous_usage=False)),
    ("stream_options", lambda s: s.include_usage, _without(include_usage=False, continuous_usage=False)),
    ("min_tokens", lambda s: s.min_tokens, _without(min_tokens=False)),
    ("ignore_eos", lambda s: s.ignore_eos, _without(ignore_eos=False)),
    (
        "max_tokens",
        lambda s: s.limit_parameter == "max_tokens",
        _without(limit_parameter="max_completion_tokens"),
    ),
)
"""What to change when the server names a field: most special first, each only while it is sent."""


def named_in(body: bytes) -> list[str]:
    """The places of an error where a server names a field: its parameter, its message, the location; never its echo
    of the input, which names everything."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        data = None
    error = data.get("error") if isinstance(data, dict) else None
    parameter = error.get("param") if isinstance(error, dict) else None
    return [parameter if isinstance(parameter, str) else "", error_text(body)[1]]


def change_for(shape: Negotiated, named: list[str]) -> tuple[str, Negotiated] | None:
    """(field, shape without it) for the first field that is sent and that the server named; None when it named none."""
    for field, applies, change in _CHANGES:
        if applies(shape) and any(re.search(rf"(?<![A-Za-z_]){field}(?![A-Za-z_])", text) for text in named):
            return field, change(shape)
    return None


def calibrate(tokens: int, words: int, usual: int) -> tuple[float, int] | None:
    """(tokens per word, overhead) from one counted prompt of `words` words; None when the count cannot be true.

    Each of the words is one token of nearly every vocabulary, so what remains is the overhead (mark, chat template,
    system prompt). Where that would be far from the `usual` overhead, the vocabulary is another one: then the overhead
    is taken as usual and the words are what differs. A server that counts too few (without what it had cached, or
    always the same) must not blow the prompts up.
    """
    if abs(tokens - words - usual) <= MARK_TOKENS + 0.15 * words:
        return 1.0, max(0, tokens - words)
    per_word = round((tokens - usual) / words, 4)
    return (per_word, usual) if _LEAST_PER_WORD <= per_word <= _MOST_PER_WORD else None
