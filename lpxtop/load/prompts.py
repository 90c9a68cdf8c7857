"""Request bodies: synthetic prompts of about so many tokens, each unique, or the entries of a file. As bytes.

A body is put together from parts encoded beforehand, so that taking one costs microseconds also for long prompts.
Must not send anything, and must not know what the server answers (the pre-flight passes in what it found).
"""

import hashlib
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lpxtop.errors import UsageError
from lpxtop.load.prompt_files import Entry, read_entries
from lpxtop.plan import Negotiated, Plan

WORDS = (  # noqa: SIM905 - a hundred quoted words read worse
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education foot boy age policy music market sense nation plan college "
    "interest death experience effect use class control field development role light voice"
).split()
"""Common nouns: with their leading space each is one token of nearly every vocabulary."""

TOKENS_PER_WORD = 1.0
MARK_TOKENS = 12
CHAT_TEMPLATE_TOKENS = 10
SYSTEM_TOKENS_PER_WORD = 1.3
"""Guesses, until the pre-flight has measured a prompt on this server."""
_POOL_WORDS = 16_384
_SPREAD = 2_654_435_761  # a large odd number: consecutive prompts begin far apart in the pool
_HOLE = "(the prompt 7d1c4f0e goes here)"
_RESERVED = {
    "model": "-m",
    "messages": "--prompts",
    "prompt": "--prompts",
    "stream": "--no-stream",
    "max_tokens": "--max-tokens",
    "max_completion_tokens": "--max-tokens",
}
_encode = msgspec.json.Encoder().encode


def session_mark(origin_ns: int) -> str:
    """Six digits that tell this session's prompts and requests from another's; the same for all of its workers."""
    return f"{origin_ns // 1000 % 16**6:06x}"


class Body(NamedTuple):
    """One request's JSON, and about how many tokens its prompt has; None when nobody can tell."""

    json: bytes
    prompt_tokens: int | None


class Prompts:
    """An endless supply of bodies. Worker i of n takes its own part of the set, so no two send the same prompt.

    `mark` goes into each synthetic prompt beside its number: two runs with the same seed have the same words, but not
    the same beginning, or the second would find the first one's prefixes in the server's cache. Entries of a file are
    sent as they are, in order, over and over. Raises UsageError for a bad file or `extra_body`.
    """

    def __init__(
        self, plan: Plan, negotiated: Negotiated, *, mark: str = "", worker: int = 0, workers: int = 1
    ) -> None:
        self._plan, self._negotiated = plan, negotiated
        self._mark, self._number, self._step = mark, worker, workers
        whole = _encode(request_fields(plan, negotiated, _HOLE))
        self._head, _, self._tail = whole.partition(_HOLE.encode())
        self._entries: list[Entry] | None = None
        if plan.prompts.path is not None:
            self._entries = read_entries(Path(plan.prompts.path), plan.target.api)
        else:
            self.synthetic = Synthetic(plan, negotiated)

    def take(self) -> Body:
        """The next body."""
        number = self._number
        self._number += self._step
        if self._entries is not None:
            return Body(self._fill(self._entries[number % len(self._entries)]), None)
        mark = f"{number}-{self._mark}" if self._mark else str(number)
        return Body(self._head + self.synthetic.text(number, mark) + self._tail, self.synthetic.tokens)

    def probe(self) -> bytes:
        """A body that no worker sends, so that probing warms no cache: the last entry of a file, if there is one."""
        if self._entries is not None:
            return self._fill(self._entries[-1])
        return self._head + self.synthetic.text(0, f"probe-{self._mark}") + self._tail

    def _fill(self, entry: Entry) -> bytes:
        if isinstance(entry, str):
            return self._head + _encode(entry)[1:-1] + self._tail
        return _encode(request_fields(self._plan, self._negotiated, entry))

    def describe(self) -> dict[str, Any]:
        """For the recording's header: where the prompts come from, how long they are, and a hash of the set."""
        system = self._plan.prompts.system
        if self._entries is not None:
            digest = hashlib.sha256(_encode([system, self._entries]))
            return {"source": "file", "entries": len(self._entries), "sha256": digest.hexdigest()}
        digest = hashlib.sha256(_encode([system, self.synthetic.words]) + self.synthetic.pool)
        return {
            "source": "synthetic",
            "tokens": self.synthetic.tokens,
            "words": self.synthetic.words,
            "sha256": digest.hexdigest(),
        }


def _system_tokens(plan: Plan) -> int:
    return round(len((plan.prompts.system or "").split()) * SYSTEM_TOKENS_PER_WORD)


def usual_overhead(plan: Plan) -> int:
    """About how many tokens a synthetic prompt has beside its words: mark, chat template, system prompt."""
    return MARK_TOKENS + CHAT_TEMPLATE_TOKENS * (plan.target.api == "chat") + _system_tokens(plan)


class Synthetic:
    """Texts of `words` common words behind a unique mark: slices of one long seeded sequence.

    `tokens` is what the whole prompt is expected to have, system prompt and chat template included.
    """

    def __init__(self, plan: Plan, negotiated: Negotiated) -> None:
        per_word = TOKENS_PER_WORD if negotiated.tokens_per_word is None else negotiated.tokens_per_word
        overhead = usual_overhead(plan) if negotiated.prompt_overhead is None else negotiated.prompt_overhead
        own = max(0, overhead - _system_tokens(plan))  # a system prompt comes on top of what was asked for
        self.words = max(1, round((plan.prompts.tokens - own) / per_word))
        self.tokens = round(overhead + self.words * per_word)
        seeded = random.Random(f"prompts {plan.prompts.seed}")
        chosen = seeded.choices(WORDS, k=max(_POOL_WORDS, 2 * self.words))
        self.pool = " ".join(chosen).encode()
        self._starts = array("L", _starts(chosen))
        self._places = len(chosen) - self.words

    def text(self, number: int, mark: str) -> bytes:
        """The text of prompt `number` as the inside of a JSON string: plain ASCII, nothing to escape."""
        first = number * _SPREAD % self._places
        words = self.pool[self._starts[first] : self._starts[first + self.words] - 1]
        return b"[%b] %b" % (mark.encode(), words)


def _starts(words: Sequence[str]) -> list[int]:
    """Where each word begins in the text, and where one more would."""
    starts, at = [], 0
    for word in words:
        starts.append(at)
        at += len(word) + 1
    return [*starts, at]


def request_fields(plan: Plan, negotiated: Negotiated, prompt: Entry) -> dict[str, Any]:
    """The JSON object of a request. Raises UsageError when `extra_body` wants what a flag of its own decides."""
    sampling = plan.sampling
    for name in sampling.extra_body.keys() & _RESERVED.keys():
        raise UsageError(f"--extra-body may not set {name!r}", f"{_RESERVED[name]} decides it")
    fields: dict[str, Any] = {} if plan.target.model is None else {"model": plan.target.model}
    fields |= _prompt_fields(plan, prompt)
    fields[negotiated.limit_parameter] = sampling.max_tokens
    fields["temperature"] = sampling.temperature
    if sampling.top_p is not None:
        fields["top_p"] = sampling.top_p
    if negotiated.ignore_eos:
        fields["ignore_eos"] = True
    if negotiated.min_tokens:
        fields["min_tokens"] = sampling.max_tokens
    fields["stream"] = sampling.stream
    if sampling.stream and negotiated.include_usage:
        usage = {"include_usage": True}
        fields["stream_options"] = usage | ({"continuous_usage_stats": True} if negotiated.continuous_usage else {})
    return fields | sampling.extra_body


def _prompt_fields(plan: Plan, prompt: Entry) -> dict[str, Any]:
    system = plan.prompts.system
    if plan.target.api == "completions":
        return {"prompt": prompt if system is None else f"{system}\n\n{prompt}"}
    if isinstance(prompt, str):
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    else:
        messages = prompt
    if system is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return {"messages": messages}
