"""Keyframes: the screen after a seek is the screen of a whole fold."""

import random

import msgspec
import pytest
from metrics_streams import header, session

from lpxtop.errors import RecordingError
from lpxtop.events import codec
from lpxtop.events.records import KEYFRAME_US, Event, Keyframe
from lpxtop.metrics.state import RunState

CHAIN = 31
"""Keyframes that cover the chart's 300 s."""


def through_file(keyframe: Keyframe) -> Keyframe:
    back = codec.decode(codec.encode(keyframe))
    assert isinstance(back, Keyframe)
    return back


def folded_with_keyframes(events: list[Event]) -> tuple[list[tuple[int, Keyframe]], RunState]:
    """(events before it, keyframe) of a live fold that writes one every 10 s."""
    state, keyframes, due = RunState(), [], KEYFRAME_US
    for index, event in enumerate(events):
        state.apply(event)
        if event.t >= due:
            due = event.t - event.t % KEYFRAME_US + KEYFRAME_US
            keyframes.append((index + 1, through_file(Keyframe(t=event.t, state=state.snapshot()))))
    return keyframes, state


@pytest.mark.parametrize("seed", range(8))
def test_restore_and_the_rest_equals_folding_everything(seed: int) -> None:
    """From every keyframe on, at several moments after it, a restored state shows what a whole fold shows."""
    events = session(seed)
    keyframes, _ = folded_with_keyframes(events)
    assert len(keyframes) >= 7
    rng = random.Random(seed)
    for place, (applied, _) in enumerate(keyframes):
        chain = [keyframe for _, keyframe in keyframes[max(0, place + 1 - CHAIN) : place + 1]]
        restored = RunState.restore(chain, header=events[0])
        stops = sorted({applied, *rng.choices(range(applied, len(events) + 1), k=2), len(events)})
        whole = RunState(exact=False)
        for event in events[:applied]:
            whole.apply(event)
        done = applied
        for stop in stops:
            for event in events[done:stop]:
                whole.apply(event)
                restored.apply(event)
            done = stop
            assert msgspec.to_builtins(restored.view()) == msgspec.to_builtins(whole.view()), (seed, place, stop)


def test_long_session_restores_from_the_last_chain() -> None:
    """After more than 300 s the chain of the last keyframes is enough, though older ones are not given."""
    events = session(3, seconds=400, workers=1, streams=2)
    keyframes, state = folded_with_keyframes(events)
    applied, _ = keyframes[-1]
    restored = RunState.restore([keyframe for _, keyframe in keyframes[-CHAIN:]], header=events[0])
    for event in events[applied:]:
        restored.apply(event)
    assert msgspec.to_builtins(restored.view()) == msgspec.to_builtins(state.view())


def test_exact_counts_do_not_change_the_screen() -> None:
    """A live state (exact) and a replayed one (not) show the same."""
    live, replayed = RunState(exact=True), RunState(exact=False)
    for event in session(11, seconds=40):
        live.apply(event)
        replayed.apply(event)
    assert live.view() == replayed.view()


def test_a_keyframe_in_the_stream_changes_nothing() -> None:
    """Replay meets the keyframes that the live state never saw: the views stay equal."""
    events = session(5, seconds=30)
    plain, keyed = RunState(), RunState()
    for event in events:
        plain.apply(event)
        keyed.apply(event)
        keyed.apply(Keyframe(t=event.t + 5 * KEYFRAME_US, seq=999, state={"v": 1}))
    assert plain.view() == keyed.view()


def test_a_snapshot_does_not_move_with_the_state() -> None:
    """What a writer encodes later is what was true when the snapshot was taken."""
    events = session(2, seconds=20)
    state = RunState()
    for event in events[: len(events) // 2]:
        state.apply(event)
    snapshot = state.snapshot()
    before = msgspec.json.encode(snapshot)
    for event in events[len(events) // 2 :]:
        state.apply(event)
    assert msgspec.json.encode(snapshot) == before


def test_restoring_does_not_change_the_keyframe() -> None:
    """The same keyframe can be sought to again and again."""
    events = session(2, seconds=30)
    keyframes, _ = folded_with_keyframes(events)
    chain = [keyframe for _, keyframe in keyframes]
    first = RunState.restore(chain, header=events[0])
    for event in events[keyframes[-1][0] :]:
        first.apply(event)
    assert RunState.restore(chain, header=events[0]).view() == RunState.restore(chain, header=events[0]).view()


def test_a_keyframe_of_another_version_is_refused() -> None:
    """A reader falls back to folding from the start instead of showing a wrong screen."""
    with pytest.raises(RecordingError):
        RunState.restore([Keyframe(t=0, state={"v": 99})], header=header())
    with pytest.raises(RecordingError):
        RunState.restore([], header=header())
