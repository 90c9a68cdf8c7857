"""A level reached from above: its figures begin when the requests of the higher one are gone."""

from lpxtop.events.records import Header, LoadSample, Phase
from lpxtop.metrics.state import RunState

S = 1_000_000


def test_a_level_settles_only_after_it_has_drained():
    """From 8 to 2 at 10 s, with 8 in flight until 13 s: the level's figures begin at 13 s plus the settle time."""
    state = RunState(exact=True)
    state.apply(Header(t=0, schema=(1, 0), session="s", wall_ns=0, mono_ns=0, lpxtop="0", plan={"settle_s": 2.0}))
    state.apply(Phase(t=0, name="measure", level=0, concurrency=8))
    state.apply(LoadSample(t=9 * S, src="load0", target=8, in_flight=8))
    state.apply(Phase(t=10 * S, name="measure", level=1, concurrency=2))
    for quarter in range(1, 13):
        state.apply(LoadSample(t=10 * S + quarter * S // 4, src="load0", target=2, in_flight=8))
    state.apply(LoadSample(t=14 * S, src="load0", target=2, in_flight=2))
    state.apply(LoadSample(t=20 * S, src="load0", target=2, in_flight=2))

    high, low = state.view().levels

    assert (high.from_us, high.to_us) == (2 * S, 10 * S)
    assert low.from_us == 15 * S
