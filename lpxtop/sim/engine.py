"""A continuous-batching engine as arithmetic: sequences in, tokens per step out. No clock, no I/O.

Every running sequence gets its token(s) at the end of the same step, as on a real engine. Waiting is first come,
first served; a sequence that runs out of KV blocks preempts the youngest and that one recomputes.
"""

import random
from collections import deque

import msgspec

from lpxtop.sim.presets import EngineConfig


class Sequence(msgspec.Struct, kw_only=True):
    """One request inside the engine. `blocks` are hashes of its prompt's whole blocks, for the prefix cache."""

    id: int
    prompt_tokens: int
    max_tokens: int
    arrived_s: float
    blocks: tuple[int, ...] = ()
    computed: int = 0  # tokens whose KV is there
    generated: int = 0
    cached: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    preemptions: int = 0
    aborted: bool = False

    @property
    def to_compute(self) -> int:
        """Tokens that must be in the KV cache before the next one can be generated."""
        return self.prompt_tokens + self.generated


class Step(msgspec.Struct, frozen=True):
    """What a step did: how long it takes, who gets how many tokens at its end, and who was preempted in it."""

    duration_s: float
    emitted: list[tuple[Sequence, int]]
    prefill_tokens: int
    decoding: int
    preempted: int


class Engine:
    """The scheduler's state. `clock_factor` (1 = full clocks) scales the speed; the simulated GPU sets it."""

    def __init__(self, config: EngineConfig, seed: int = 0) -> None:
        self.config = config
        self.clock_factor = 1.0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefix_queries = self.prefix_hits = 0
        self._random = random.Random(seed)
        self._cache: dict[int, None] = {}

    # --- sizes -------------------------------------------------------------------------------------------------

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.config.block_tokens)

    @property
    def _capacity_blocks(self) -> int:
        return self.config.kv_tokens // self.config.block_tokens

    @property
    def _held_blocks(self) -> int:
        """What running sequences need for all their tokens so far, those still to be computed included."""
        return sum(self._blocks(sequence.to_compute) for sequence in self.running)

    @property
    def kv_used_tokens(self) -> int:
        return sum(sequence.computed for sequence in self.running)

    @property
    def kv_usage(self) -> float:
        """Blocks in use over blocks there are, 0..1."""
        return sum(self._blocks(sequence.computed) for sequence in self.running) / self._capacity_blocks

    # --- requests ----------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a request. Its prompt and answer must fit the KV cache (the server refuses longer ones)."""
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> None:
        """The client went away: free what it held."""
        sequence.aborted = True
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    # --- a step ------------------------------------------------------------------------------------------------

    def step(self, now_s: float) -> Step:
        """Plan and account one step that begins at `now_s`; its tokens come out when it ends."""
        decoding, preempted = self._grow()
        budget = self.config.max_batched_tokens - len(decoding)
        prefilled = self._prefill(budget, now_s)
        prefill_tokens = sum(tokens for _, tokens in prefilled)
        duration = self._duration(len(decoding), prefill_tokens)
        emitted = [(sequence, self._draw_tokens(sequence)) for sequence in decoding]
        for sequence, tokens in prefilled:
            sequence.computed += tokens
            if sequence.computed >= sequence.to_compute:
                emitted.append((sequence, 1))
        for sequence, tokens in emitted:
            sequence.generated += tokens
            if sequence.first_token_s is None:
                sequence.first_token_s = now_s + duration
        self.running = [s for s in self.running if s.generated < s.max_tokens]
        return Step(duration, emitted, prefill_tokens, len(decoding), preempted)

    def _grow(self) -> tuple[list[Sequence], int]:
        """Room for the tokens that decoding sequences put into the cache in this step; the youngest give way."""
        preempted = 0
        while self._held_blocks > self._capacity_blocks and len(self.running) > 1:
            self._preempt(self.running[-1])
            preempted += 1
        decoding = [sequence for sequence in self.running if self._is_decoding(sequence)]
        for sequence in decoding:
            sequence.computed = sequence.to_compute
        return decoding, preempted

    def _is_decoding(self, sequence: Sequence) -> bool:
        """All but the newest token is in the cache (a recomputing sequence has more to do)."""
        return sequence.generated > 0 and sequence.to_compute - sequence.computed <= self.config.tokens_per_step

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _prefill(self, budget: int, now_s: float) -> list[tuple[Sequence, int]]:
        """Chunks of prompts: those begun first, then as many waiting ones as fit."""
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self.running:
            left = 0 if self._is_decoding(sequence) else sequence.to_compute - sequence.computed
            if left > 0 and budget > 0:
                chunks.append((sequence, min(left, budget)))
                budget -= min(left, budget)
        while self.waiting and budget > 0 and len(self.running) < self.config.max_sequences:
            sequence = self.waiting[0]
            needed = self._blocks(sequence.to_compute + 1)
            if needed > self._capacity_blocks - self._held_blocks and self.running:
                break
            self.waiting.popleft()
            self._admit(sequence, now_s)
            tokens = min(sequence.to_compute - sequence.computed, budget)
            chunks.append((sequence, tokens))
            budget -= tokens
        return chunks

    def _admit(self, sequence: Sequence, now_s: float) -> None:
        self.running.append(sequence)
        if sequence.scheduled_s is None:
            sequence.scheduled_s = now_s
        if self.config.prefix_cache:
            sequence.cached = self._lookup(sequence)
            # at least one token is always computed: the one whose logits start the answer
            sequence.computed = min(sequence.cached, sequence.to_compute - 1)

    def _lookup(self, sequence: Sequence) -> int:
        hits = 0
        for block in sequence.blocks:
            if block not in self._cache:
                break
            hits += 1
        if len(self._cache) + len(sequence.blocks) > self._capacity_blocks:
            self._cache.clear()
        self._cache |= dict.fromkeys(sequence.blocks)
        cached = hits * self.config.block_tokens
        self.prefix_queries += sequence.prompt_tokens
        self.prefix_hits += cached
        return cached

    def _duration(self, decoding: int, prefill_tokens: int) -> float:
        config = self.config
        seconds = step_seconds(config, decoding, self.kv_used_tokens, prefill_tokens)
        return seconds / self.clock_factor * (1 + config.jitter * (2 * self._random.random() - 1))

    def _draw_tokens(self, sequence: Sequence) -> int:
        tokens = 1
        while tokens < self.config.tokens_per_step and self._random.random() < self.config.acceptance:
            tokens += 1
        return min(tokens, sequence.max_tokens - sequence.generated)


def step_seconds(config: EngineConfig, decoding: int, kv_tokens: float, prefill_tokens: float) -> float:
    """Length of a step at full clocks, without jitter: the formula of `EngineConfig`."""
    return (
        config.step_base_s
        + config.step_per_sequence_s * decoding
        + config.step_per_kv_token_s * kv_tokens
        + prefill_tokens / config.prefill_tokens_per_s
    )


def steady_throughput(config: EngineConfig, concurrency: int, prompt_tokens: int, output_tokens: int) -> float:
    """Output tokens/s in closed loop at full clocks, from the balance of a request's work (fluid limit).

    Each request costs `output_tokens` decode slots and `prompt_tokens` of prefill; with b sequences decoding, a step
    yields b tokens and carries on average b/output_tokens prompts.
    """
    batch = min(concurrency, config.max_sequences)
    kv = batch * (prompt_tokens + output_tokens / 2)
    prefill = batch * prompt_tokens / output_tokens
    return batch / step_seconds(config, batch, kv, prefill)
