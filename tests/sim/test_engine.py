"""The engine model: arithmetic by hand, and what must hold whatever is asked of it."""

import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpxtop.sim.engine import Engine, Sequence, capacity
from lpxtop.sim.presets import PRESETS, EngineConfig

PLAIN = EngineConfig(
    max_sequences=4, max_batched_tokens=100, kv_tokens=1600, block_tokens=16, prefill_tokens_per_s=1000.0,
    step_base_s=0.01, step_per_sequence_s=0.001, step_per_kv_token_s=0.00001, jitter=0.0,
)  # fmt: skip


def sequence(number, prompt=50, tokens=3, at=0.0, **more):
    return Sequence(id=number, prompt_tokens=prompt, max_tokens=tokens, arrived_s=at, **more)


def test_a_lone_request_step_by_step():
    """Prefill 50 tokens: 10 ms + 50/1000 s + 0 KV; then two decode steps with 51 and 52 tokens in the cache."""
    engine = Engine(PLAIN)
    engine.add(sequence(1))

    steps = [engine.step(0.0) for _ in range(3)]

    assert [round(step.duration_s, 6) for step in steps] == [0.06, 0.01151, 0.01152]
    assert [[tokens for _, tokens in step.emitted] for step in steps] == [[1], [1], [1]]
    assert engine.idle


def test_prompts_are_prefilled_in_chunks_of_the_step_budget():
    """A prompt of 250 tokens takes three steps of 100, 100 and 50 and then gives its first token."""
    engine = Engine(PLAIN)
    engine.add(sequence(1, prompt=250))

    steps = [engine.step(0.0) for _ in range(3)]

    assert [step.prefill_tokens for step in steps] == [100, 100, 50]
    assert [len(step.emitted) for step in steps] == [0, 0, 1]


def test_all_running_requests_get_their_token_in_the_same_step():
    """Three decoding sequences each get one token per step, together."""
    engine = Engine(PLAIN)
    for number in range(3):
        engine.add(sequence(number, prompt=10, tokens=5))
    engine.step(0.0)

    step = engine.step(0.1)

    assert sorted(s.id for s, _ in step.emitted) == [0, 1, 2]
    assert step.decoding == 3


def test_the_batch_is_bounded_and_the_rest_waits_in_order():
    """Of six requests four run; the others wait, first come first served."""
    engine = Engine(PLAIN)
    for number in range(6):
        engine.add(sequence(number, prompt=10, tokens=2))
    engine.step(0.0)

    assert [s.id for s in engine.running] == [0, 1, 2, 3]
    assert [s.id for s in engine.waiting] == [4, 5]


def test_the_youngest_is_preempted_when_the_cache_is_full_and_ends_with_all_its_tokens():
    """Two requests that outgrow the cache together: one recomputes, both get exactly their tokens."""
    engine = Engine(EngineConfig(**{**_fields(PLAIN), "kv_tokens": 160}))
    first, second = sequence(1, prompt=60, tokens=40), sequence(2, prompt=60, tokens=40)
    engine.add(first)
    engine.add(second)
    for _ in range(300):
        if engine.idle:
            break
        engine.step(0.0)

    assert engine.idle
    assert (first.generated, second.generated) == (40, 40)
    assert first.preemptions == 0
    assert second.preemptions >= 1
    assert engine.preemptions == second.preemptions


def test_a_preempted_request_is_the_next_to_run():
    """It goes before everybody who was waiting already."""
    engine = Engine(EngineConfig(**{**_fields(PLAIN), "kv_tokens": 160}))
    for number in (1, 2, 3):
        engine.add(sequence(number, prompt=60, tokens=40))
    while not engine.preemptions:
        engine.step(0.0)

    assert [s.id for s in engine.running] == [1]
    assert [s.id for s in engine.waiting] == [2, 3]


def test_a_known_prefix_is_not_computed_again():
    """The second request with the same 48-token prefix computes only the rest."""
    engine = Engine(EngineConfig(**{**_fields(PLAIN), "prefix_cache": True}))
    engine.add(sequence(1, prompt=50, tokens=1, blocks=(11, 22, 33)))
    engine.step(0.0)
    engine.add(sequence(2, prompt=50, tokens=1, blocks=(11, 22, 33)))

    step = engine.step(1.0)

    assert step.prefill_tokens == 2
    assert (engine.prefix_queries, engine.prefix_hits) == (100, 48)


def test_clocks_scale_the_step():
    """At half clocks a step takes twice as long."""
    engine = Engine(PLAIN)
    engine.clock_factor = 0.5
    engine.add(sequence(1))

    assert round(engine.step(0.0).duration_s, 6) == 0.12


def closed_loop(config, users, prompt, tokens, seconds=60.0, seed=1):
    """Run `users` who ask again as soon as they are answered, begun one after the other, their answers of ±20 % length
    so that they do not march in step. Yields of the second half: tokens/s, TTFTs and mean ITLs of whole requests."""
    engine, draw = Engine(config, seed), random.Random(seed)
    now, number, got = 0.0, 0, 0
    ttft, itl = [], []
    while now < seconds:
        while len(engine.running) + len(engine.waiting) < min(users, 1 + int(now * 50)):
            number += 1
            engine.add(sequence(number, prompt, round(tokens * draw.uniform(0.8, 1.2)), at=now))
        step = engine.step(now)
        now += step.duration_s
        if now > seconds / 2:
            got += sum(n for _, n in step.emitted)
            for item in {id(s): s for s, _ in step.emitted}.values():
                if item.generated >= item.max_tokens and item.arrived_s > seconds / 2:
                    ttft.append(item.first_token_s - item.arrived_s)
                    itl.append((now - item.first_token_s) / (item.max_tokens - 1))
    return got / (seconds / 2), ttft, itl


@pytest.mark.parametrize(
    ("users", "more"),
    [(1, {}), (3, {}), (4, {}), (8, {}), (8, {"tokens_per_step": 4, "acceptance": 0.6})],
)
def test_a_closed_loop_is_what_the_formula_says(users, more):
    """Below, at and above the batch limit, plain and speculative: throughput, ITL and the wait within 5 %."""
    roomy = {"kv_tokens": 100_000, "max_batched_tokens": 10_000}
    config = EngineConfig(**{**_fields(PLAIN), **roomy, **more})

    expected = capacity(config, users, 40, 50)
    tokens_per_s, ttft, itl = closed_loop(config, users, 40, 50)

    assert tokens_per_s == pytest.approx(expected.output_tokens_per_s, rel=0.05)
    assert mean(itl) == pytest.approx(expected.itl_s, rel=0.05)
    # a first token takes the wait for a place and then the step of its own prompt
    own_step = expected.step_s + 40 / config.prefill_tokens_per_s
    assert mean(ttft) == pytest.approx(expected.queue_s + own_step, rel=0.15)


def test_the_formula_by_hand():
    """One user, 40 + 50 tokens: one step of prefill and 49 of decoding; 11 ms + KV + its share of 40 ms of prefill."""
    found = capacity(PLAIN, 1, 40, 50)

    # 49 of 50 steps decode: 0.98 sequences and 0.98 × 65 tokens of KV on average, and 40/50 of a token of prompt
    step = 0.01 + 0.001 * 0.98 + 0.00001 * 65 * 0.98 + 0.8 / 1000
    assert found.step_s == pytest.approx(step)
    assert found.output_tokens_per_s == pytest.approx(1 / step)
    assert found.queue_s == pytest.approx(0)
    # its own gaps are decode steps only
    assert found.itl_s == pytest.approx(0.01 + 0.001 + 0.00001 * 65)
    assert capacity(PLAIN, 1, 40, 50, clock_factor=0.5).step_s == pytest.approx(2 * step)
    # eight users on four places wait as long as they are served
    assert capacity(PLAIN, 8, 40, 50).queue_s == pytest.approx(50 * capacity(PLAIN, 4, 40, 50).step_s)


def test_from_4_to_64_users_the_demos_engine_bends():
    """The default preset with the demo's prompts: ITL grows by more than a third, TTFT at least tenfold."""
    engine = PRESETS["h100-8b"].engine

    few = closed_loop(engine, 4, 128, 128, seconds=12)
    many = closed_loop(engine, 64, 128, 128, seconds=12)

    assert mean(many[2]) > 1.35 * mean(few[2])
    assert mean(many[1]) > 10 * mean(few[1])
    assert many[0] > 5 * few[0]


REQUESTS = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 60)), min_size=1, max_size=12)


@given(REQUESTS, st.integers(1, 4), st.integers(0, 1000))
def test_whatever_is_asked_everybody_gets_exactly_their_tokens(requests, tokens_per_step, seed):
    """Every request ends with its tokens; the cache never holds more than there is; runs are reproducible."""
    config = EngineConfig(
        max_sequences=5, max_batched_tokens=64, kv_tokens=480, prefill_tokens_per_s=1000.0, step_base_s=0.01,
        tokens_per_step=tokens_per_step, acceptance=0.7,
    )  # fmt: skip
    runs = []
    for _ in range(2):
        engine = Engine(config, seed)
        asked = [sequence(number, prompt, tokens) for number, (prompt, tokens) in enumerate(requests)]
        for item in asked:
            engine.add(item)
        durations = []
        for _ in range(20_000):
            if engine.idle:
                break
            durations.append(engine.step(0.0).duration_s)
            assert engine.kv_usage <= 1.0
            assert engine.kv_used_tokens <= config.kv_tokens
            assert len(engine.running) <= config.max_sequences
        assert engine.idle
        assert [item.generated for item in asked] == [tokens for _, tokens in requests]
        runs.append(durations)
    assert runs[0] == runs[1]


@given(REQUESTS, st.integers(0, 1000))
def test_nobody_is_overtaken_on_the_way_to_a_first_token(requests, seed):
    """First tokens come in the order of arrival, however full the cache is."""
    config = EngineConfig(max_sequences=5, max_batched_tokens=64, kv_tokens=480, prefill_tokens_per_s=1000.0)
    engine = Engine(config, seed)
    for number, (prompt, tokens) in enumerate(requests):
        engine.add(sequence(number, prompt, tokens))
    first = []
    while not engine.idle:
        first += [s.id for s, _ in engine.step(0.0).emitted if s.id not in first]

    assert first == sorted(first)


def test_a_preempted_request_keeps_what_it_had_from_the_cache():
    """Its cached tokens and the cache's counters are those of its first admission."""
    engine = Engine(EngineConfig(**{**_fields(PLAIN), "prefix_cache": True, "kv_tokens": 160}))
    engine.add(sequence(1, prompt=60, tokens=40, blocks=(1, 2, 3)))
    second = sequence(2, prompt=60, tokens=40, blocks=(4, 5, 6))
    engine.add(second)
    while not engine.idle:
        engine.step(0.0)

    assert second.preemptions >= 1
    assert second.cached == 0
    assert (engine.prefix_queries, engine.prefix_hits) == (120, 0)


def test_drafts_are_counted_as_accepted_or_not():
    """Three drafts a step, all accepted: 12 tokens are the first and then 4, 4, 3 of 4."""
    engine = Engine(EngineConfig(**{**_fields(PLAIN), "tokens_per_step": 4, "acceptance": 1.0}))
    engine.add(sequence(1, prompt=10, tokens=12))
    emitted = []
    while not engine.idle:
        emitted += [tokens for _, tokens in engine.step(0.0).emitted]

    assert emitted == [1, 4, 4, 3]
    assert (engine.drafts, engine.draft_tokens, engine.accepted_tokens) == (3, 9, 9)


def _fields(config: EngineConfig) -> dict:
    return {name: getattr(config, name) for name in config.__struct_fields__}
