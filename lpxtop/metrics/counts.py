"""Requests counted since the start: due, sent, by outcome, and the tokens they had. Warm-up is kept apart.

A fixed handful of numbers, whatever the length of the session. Must not hold times or distributions.
"""

from typing import Any

import msgspec

from lpxtop.events.records import Finished
from lpxtop.metrics import definitions
from lpxtop.metrics.quality import Answers

_PER_CHUNK = frozenset({"continuous_usage", "token_ids", "logprobs"})
"""Token sources that tell how many tokens each chunk held."""
TRUSTED_SHARE = 0.02


def mostly_known(unknown: int, chunks: int) -> bool:
    """Whether so few chunks of unknown tokens (counted as one each) leave the token figures standing."""
    return unknown <= TRUSTED_SHARE * chunks


class RequestCounts(msgspec.Struct, kw_only=True):
    """Measured requests. `longest_tokens` is the most that one of them may need, prompt and answer together;
    `surplus_tokens` is how far final usage and chunks are apart, one token per request allowed
    (an end-of-sequence token has no chunk)."""

    due: int = 0
    sent: int = 0
    warmup_due: int = 0
    warmup_ended: int = 0
    good: int = 0
    by_outcome: dict[str, int] = {}
    input_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    cached_tokens: int | None = None
    token_sources: dict[str, int] = {}
    usage_tokens: int = 0
    usage_chunks: int = 0
    surplus_tokens: int = 0
    per_chunk: int = 0
    chunks: int = 0
    unknown_chunks: int = 0
    buffered: int = 0
    limited: int = 0
    over_limit: int = 0
    stopped_early: int = 0
    first_chunk_assumed: int = 0
    longest_tokens: int | None = None
    first_due: int | None = None
    last_end: int | None = None

    @property
    def ended(self) -> int:
        return sum(self.by_outcome.values())

    @property
    def ok(self) -> int:
        return self.by_outcome.get("ok", 0)

    @property
    def failed(self) -> int:
        return sum(n for outcome, n in self.by_outcome.items() if outcome not in definitions.NOT_FAILURES)

    @property
    def trusted(self) -> bool:
        """Whether the tokens of each chunk are known: told by the server, or one each by final usage within 2 %.

        True until the first answer says otherwise.
        """
        if not mostly_known(self.unknown_chunks, self.chunks) or self.token_sources.get("chunks", 0) > self.per_chunk:
            return False
        return self.surplus_tokens <= TRUSTED_SHARE * self.usage_tokens

    @property
    def token_source(self) -> str | None:
        """Where most token counts came from."""
        return max(self.token_sources, key=self.token_sources.__getitem__, default=None)

    def due_at(self, due: int) -> None:
        self.due += 1
        self.first_due = due if self.first_due is None else min(self.first_due, due)

    def finished(self, request: Finished, end: int, streamed: bool, good: bool) -> None:
        """Count a measured request that ended."""
        self.by_outcome[request.outcome] = self.by_outcome.get(request.outcome, 0) + 1
        self.last_end = end if self.last_end is None else max(self.last_end, end)
        self.good += good
        self.buffered += request.outcome == "ok" and not streamed
        for name in ("input_tokens", "output_tokens", "reasoning_tokens", "cached_tokens"):
            value = getattr(request, name)
            if value is not None:
                before = getattr(self, name)
                setattr(self, name, value if before is None else before + value)
        if request.output_tokens is not None and request.token_source is not None:
            self._count_source(request, request.output_tokens, request.token_source)
        if request.outcome == "ok":
            self._limits(request)
            self._longest(request)

    def _count_source(self, request: Finished, output_tokens: int, source: str) -> None:
        self.token_sources[source] = self.token_sources.get(source, 0) + 1
        if source in _PER_CHUNK:
            self.per_chunk += 1
        if request.chunks == 0 or source == "chunks" or request.outcome != "ok":
            return
        self.usage_tokens += output_tokens
        self.usage_chunks += request.chunks
        if source not in _PER_CHUNK:
            self.surplus_tokens += max(0, abs(output_tokens - request.chunks) - 1)

    def _longest(self, request: Finished) -> None:
        answer = request.max_tokens if request.max_tokens is not None else request.output_tokens
        if request.input_tokens is not None and answer is not None:
            needed = request.input_tokens + answer
            self.longest_tokens = needed if self.longest_tokens is None else max(self.longest_tokens, needed)

    def _limits(self, request: Finished) -> None:
        self.first_chunk_assumed += definitions.first_chunk_assumed(request)
        if request.max_tokens is None or request.output_tokens is None or request.token_source == "chunks":
            return
        self.limited += 1
        self.over_limit += request.output_tokens > request.max_tokens
        self.stopped_early += request.output_tokens < request.max_tokens and request.finish_reason != "length"

    def answers(self, ignore_eos: bool) -> Answers:
        """What the quality rules look at."""
        return Answers(
            ok=self.ok,
            not_streamed=self.by_outcome.get("not_streamed", 0),
            buffered=self.buffered,
            limited=self.limited,
            over_limit=self.over_limit,
            stopped_early=self.stopped_early,
            usage_tokens=self.usage_tokens,
            usage_chunks=self.usage_chunks,
            token_sources=self.token_sources,
            first_chunk_assumed=self.first_chunk_assumed,
            ignore_eos=ignore_eos,
        )

    def snapshot(self) -> dict[str, Any]:
        state = msgspec.to_builtins(self)
        return {name: value for name, value in state.items() if value not in (0, None, {})}
