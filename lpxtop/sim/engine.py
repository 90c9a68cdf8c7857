"""A continuous-batching engine as arithmetic: sequences in, tokens per step out. No clock, no I/O.

Every running sequence gets its token(s) at the end of the same step, as on a real engine. Waiting is first come,
first served; a sequence that runs out of KV blocks preempts the youngest and that one recomputes.
"""

import random
from collections import deque

import msgspec

from lpxtop.sim.presets import EngineConfig


class Sequence(msgspec.Struct, kw_only=True, eq=False):
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
        self.drafts = self.draft_tokens = self.accepted_tokens = 0
        self._random = random.Random(seed)
        self._cache: dict[int, None] = {}

    # --- sizes -------------------------------------------------------------------------------------------------

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.config.block_tokens)

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
        return sum(self._blocks(sequence.computed) for sequence in self.running) / self.config.blocks

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
        held = self._held_blocks
        while held > self.config.blocks and len(self.running) > 1:
            youngest = self.running[-1]
            held -= self._blocks(youngest.to_compute)
            self._preempt(youngest)
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
        free = self.config.blocks - self._held_blocks
        while self.waiting and budget > 0 and len(self.running) < self.config.max_sequences:
            sequence = self.waiting[0]
            if self._blocks(sequence.to_compute + 1) > free and self.running:
                break
            self.waiting.popleft()
            free -= self._blocks(sequence.to_compute)
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
            hits = self._lookup(sequence)
            # at least one token is always computed: the one whose logits start the answer
            sequence.computed = min(hits, sequence.to_compute - 1)
            if sequence.preemptions == 0:
                sequence.cached = sequence.computed
                self.prefix_queries += sequence.prompt_tokens
                self.prefix_hits += hits

    def _lookup(self, sequence: Sequence) -> int:
        """Tokens of the prompt that the cache knows; its blocks are remembered, and all forgotten when it is full."""
        hits = 0
        for block in sequence.blocks:
            if block not in self._cache:
                break
            hits += 1
        if len(self._cache) + len(sequence.blocks) > self.config.blocks:
            self._cache.clear()
        self._cache |= dict.fromkeys(sequence.blocks)
        return hits * self.config.block_tokens

    def _duration(self, decoding: int, prefill_tokens: int) -> float:
        config = self.config
        seconds = step_seconds(config, decoding, self.kv_used_tokens, prefill_tokens)
        return seconds / self.clock_factor * (1 + config.jitter * (2 * self._random.random() - 1))

    def _draw_tokens(self, sequence: Sequence) -> int:
        """Tokens of a decode step: one, and the drafts accepted before the first that is not."""
        drafted = self.config.tokens_per_step - 1
        if drafted == 0:
            return 1
        accepted = 0
        while accepted < drafted and self._random.random() < self.config.acceptance:
            accepted += 1
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        return min(1 + accepted, sequence.max_tokens - sequence.generated)


def step_seconds(config: EngineConfig, decoding: float, kv_tokens: float, prefill_tokens: float) -> float:
    """Length of a step at full clocks, without jitter: the formula of `EngineConfig`."""
    return (
        config.step_base_s
        + config.step_per_sequence_s * decoding
        + config.step_per_kv_token_s * kv_tokens
        + prefill_tokens / config.prefill_tokens_per_s
    )


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """A closed loop in its steady state. `step_s` is a mean step, `itl_s` the mean time per token that a decoding
    request sees, `queue_s` the mean wait for a place in the batch."""

    batch: int
    step_s: float
    itl_s: float
    output_tokens_per_s: float
    requests_per_s: float
    queue_s: float


def capacity(
    config: EngineConfig, concurrency: int, prompt_tokens: int, output_tokens: int, *, clock_factor: float = 1.0
) -> Capacity:
    """What `concurrency` users in a closed loop get, in the fluid limit: requests spread evenly over the steps, no
    jitter, a KV cache that holds the batch, no prefix hits.

    A request lives for its prefill steps and one step per accepted group of tokens; a step carries an equal share of
    everybody's decoding and prefill, except that the gaps of a request hold no prefill of its own. The wait for a place
    follows from Little's law: users = request rate × (wait + service).
    """
    batch = min(concurrency, config.max_sequences)
    per_step = sum(config.acceptance**accepted for accepted in range(config.tokens_per_step))
    decode_steps = (output_tokens - 1) / per_step
    steps = max(1.0, prompt_tokens / max(1, config.max_batched_tokens - batch)) + decode_steps
    kv_each = prompt_tokens + output_tokens / 2

    def length(decoding: float, prefilling: float) -> float:
        return step_seconds(config, decoding, decoding * kv_each, prefilling * prompt_tokens) / clock_factor

    step_s = length(batch * decode_steps / steps, batch / steps)
    gap_s = length(1 + (batch - 1) * decode_steps / steps, (batch - 1) / steps)
    requests_per_s = batch / (steps * step_s)
    return Capacity(
        batch=batch,
        step_s=step_s,
        itl_s=gap_s / per_step,
        output_tokens_per_s=requests_per_s * output_tokens,
        requests_per_s=requests_per_s,
        queue_s=concurrency / requests_per_s - steps * step_s,
    )
