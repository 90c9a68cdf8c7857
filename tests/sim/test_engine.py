"""The engine model: arithmetic by hand, and what must hold whatever is asked of it."""

from hypothesis import given
from hypothesis import strategies as st

from lpxtop.sim.engine import Engine, Sequence, steady_throughput, step_seconds
from lpxtop.sim.presets import EngineConfig

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


def test_throughput_in_closed_loop_is_the_formulas():
    """Eight users on a batch of four: simulated tokens/s within 6 % of the fluid limit."""
    engine = Engine(EngineConfig(**{**_fields(PLAIN), "kv_tokens": 100_000, "max_batched_tokens": 10_000}))
    now, tokens, number = 0.0, 0, 0
    while now < 60:
        while len(engine.running) + len(engine.waiting) < 8:
            number += 1
            engine.add(sequence(number, prompt=40, tokens=50, at=now))
        step = engine.step(now)
        now += step.duration_s
        tokens += sum(n for _, n in step.emitted)

    expected = steady_throughput(engine.config, 8, 40, 50)
    assert abs(tokens / now / expected - 1) < 0.06
    assert step_seconds(engine.config, 4, 0, 0) == 0.014


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
            assert len(engine.running) <= config.max_sequences
        assert engine.idle
        assert [item.generated for item in asked] == [tokens for _, tokens in requests]
        runs.append(durations)
    assert runs[0] == runs[1]


def _fields(config: EngineConfig) -> dict:
    return {name: getattr(config, name) for name in config.__struct_fields__}
