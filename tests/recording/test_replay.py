"""The player: pacing by a clock that is handed in, and jumps that equal playing from the start."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lpxtop.events import codec
from lpxtop.events.records import Control, Finished, Header, Keyframe, LoadSample, Mark
from lpxtop.recording.reader import Recording
from lpxtop.recording.replay import Player

HEADER = Header(t=0, schema=(1, 0), session="s", wall_ns=1, mono_ns=1, lpxtop="0")
S = 1_000_000


def recorded(path, events, keyframe_every=None):
    """A recording of these events; keyframes hold how many events came before them."""
    data, offset_of_last = codec.encode(HEADER), None
    for count, event in enumerate(events, 1):
        data += codec.encode(event)
        if keyframe_every and count % keyframe_every == 0:
            keyframe = Keyframe(t=event.t, state={"count": count}, offset=len(data), prev=offset_of_last)
            offset_of_last = len(data)
            data += codec.encode(keyframe)
    path.write_bytes(data)
    return Recording.open(str(path))


@pytest.fixture
def play():
    """Makes players and closes them afterwards."""
    players = []

    def make(recording):
        players.append(Player(recording))
        return players[-1]

    yield make
    for player in players:
        player.close()


def marks(times):
    return [Mark(t=t, text=str(number)) for number, t in enumerate(times)]


def test_events_come_when_they_are_due(tmp_path, play):
    """At speed 1 the events of the first 2.5 s come in 2.5 s; at speed 4 the next 4 s in one."""
    player = play(recorded(tmp_path / "a", marks([S, 2 * S, 3 * S, 4 * S, 6 * S, 9 * S])))
    player.play()
    player.advance(0)

    first = player.advance(int(2.5e9))
    player.speed = 4.0
    second = player.advance(int(3.5e9))

    assert [event.t for event in first] == [S, 2 * S]
    assert [event.t for event in second] == [3 * S, 4 * S, 6 * S]
    assert player.position_us == 6_500_000


def test_pause_holds_the_playhead(tmp_path, play):
    """While paused nothing is due, and the pause is not caught up afterwards."""
    player = play(recorded(tmp_path / "a", marks([S, 2 * S, 3 * S])))
    player.play()
    player.advance(0)
    player.advance(int(1.5e9))
    player.pause()

    assert player.advance(int(60e9)) == []
    player.play()
    player.advance(int(61e9))
    assert [event.t for event in player.advance(int(61.6e9))] == [2 * S]


def test_late_events_stay_in_file_order(tmp_path, play):
    """An event older than its predecessor comes after it, as written."""
    player = play(recorded(tmp_path / "a", marks([S, 3 * S, 2 * S, 4 * S])))
    player.play()
    player.speed = 0

    assert [event.t for event in player.advance(0)][1:] == [S, 3 * S, 2 * S, 4 * S]


def test_idle_time_is_skipped_with_a_note(tmp_path, play):
    """A hole of 100 s is cut to one second, and the note says how much was skipped."""
    player = play(recorded(tmp_path / "a", marks([S, 101 * S])))
    player.play()
    player.advance(0)
    player.advance(int(1.2e9))

    assert player.position_us == 100 * S
    assert "99 s" in player.note
    assert [event.t for event in player.advance(int(2.3e9))] == [101 * S]


def test_at_the_end_it_stops(tmp_path, play):
    """Past the last event the player is paused at the end, and says so."""
    player = play(recorded(tmp_path / "a", marks([S, 2 * S])))
    player.play()
    player.advance(0)
    player.advance(int(10e9))

    assert (player.playing, player.position_us) == (False, 2 * S)
    assert "end" in player.note


def test_a_step_is_one_load_sample(tmp_path, play):
    """Stepping goes on to the next frame of the load process."""
    events = [
        Mark(t=1, text=""),
        LoadSample(t=250_000),
        Mark(t=300_000, text=""),
        LoadSample(t=500_000),
        Mark(t=S, text=""),
    ]
    player = play(recorded(tmp_path / "a", events))

    assert [event.t for event in player.step(1)] == [0, 1, 250_000]
    assert [event.t for event in player.step(1)] == [300_000, 500_000]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 3 * S), min_size=1, max_size=60),
    st.integers(1, 9),
    st.lists(st.integers(0, 90 * S), min_size=1, max_size=6),
    st.booleans(),
)
def test_a_jump_equals_playing_from_the_start(tmp_path, play, steps, keyframe_every, targets, trusted):
    """The count restored from keyframes plus the events after them is the count of a fold from the start."""
    times = [sum(steps[: index + 1]) for index in range(len(steps))]
    recording = recorded(tmp_path / "a", marks(times), keyframe_every)
    if not trusted:  # a comment shifts every offset: the chain does not hold, the player must scan
        data = recording.path.read_bytes()
        recording.path.write_bytes(b"# moved\n" + data)
    player = play(recording)

    for target in targets:
        found = player.seek(target)
        before = found.keyframes[-1].state["count"] if found.keyframes else 0
        marks_after = [event for event in found.events if isinstance(event, Mark)]
        assert before + len(marks_after) == sum(t <= target for t in times)
        assert player.position_us == min(target, times[-1])
        rest = [event for event in drain(player) if isinstance(event, Mark)]
        assert [event.t for event in rest] == [t for t in times if t > target]


def drain(player):
    player.speed = 0
    player.play()
    events = []
    while got := player.advance(0):
        events += got
    return events


def test_only_the_keyframes_of_the_chart_window_are_restored(tmp_path, play):
    """Of keyframes every second for 20 minutes, a jump reads those of the last 310 s."""
    player = play(recorded(tmp_path / "a", marks([n * S for n in range(1, 1200)]), 1))

    found = player.seek(1000 * S)

    assert len(found.keyframes) == 310
    assert found.keyframes[-1].state["count"] == 1000


def test_following_goes_on_as_the_file_grows(tmp_path, play):
    """With follow on, what is appended comes at once; a half-written line waits for its rest."""
    path = tmp_path / "a"
    player = play(recorded(path, marks([S, 2 * S])))
    player.follow = True
    assert [event.t for event in player.advance(0)] == [0, S, 2 * S]

    line = codec.encode(Mark(t=5 * S, text="later"))
    with path.open("ab") as file:
        file.write(line[:10])
        file.flush()
        assert player.advance(1) == []
        file.write(line[10:])
        file.flush()
        assert [event.t for event in player.advance(2)] == [5 * S]


def test_marks_tell_changes_notes_trouble_and_gaps(tmp_path, play):
    """C for a change of load, m for a note, ! for failures (one a second at most), : for a gap."""
    events = [
        Control(t=S, what="concurrency", before=1, after=2),
        Mark(t=2 * S, text="note"),
        Finished(t=3 * S, id=0, slot=0, due=0, outcome="ok"),
        Finished(t=4 * S, id=1, slot=0, due=0, outcome="http_5xx"),
        Finished(t=4 * S + 10, id=2, slot=0, due=0, outcome="http_5xx"),
        LoadSample(t=5 * S),
        Mark(t=60 * S, text="hot", level="error"),
    ]
    player = play(recorded(tmp_path / "a", events))
    for _ in player.scan_marks():
        pass

    assert player.marks == [(S, "C"), (2 * S, "m"), (4 * S, "!"), (5 * S, ":"), (60 * S, "!")]
