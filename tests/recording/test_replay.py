"""The player: pacing by a clock that is handed in, and jumps that equal playing from the start."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lpxtop.events import codec
from lpxtop.events.records import Control, End, Finished, Gpu, Header, Keyframe, LoadSample, Mark, Source
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


def test_marks_go_on_with_what_the_file_gains(tmp_path, play):
    """Scanned again after it grew, the marks are those of one scan of all of it; a line torn at first counts once."""
    path = tmp_path / "a"
    player = play(recorded(path, marks([S, 2 * S])))
    more = codec.encode(Source(t=3 * S, kind="gpu", state="failed")) + codec.encode(Mark(t=4 * S, text="x"))
    with path.open("ab") as file:
        for piece in (more[:20], more[20:-5], more[-5:]):
            file.write(piece)
            file.flush()
            for _ in player.scan_marks():
                pass

    assert player.marks == [(S, "m"), (2 * S, "m"), (3 * S, "!"), (4 * S, "m")]


def test_a_step_through_a_watched_node_is_short(tmp_path, play):
    """Without a load process a step does not run to the end of the recording."""
    player = play(recorded(tmp_path / "a", [Gpu(t=n * S) for n in range(1, 400)]))
    player.seek(10 * S)

    stepped = [event.t for event in player.step(1)]

    assert stepped
    assert stepped[-1] <= 12 * S


def test_a_keyframe_larger_than_a_block_is_restored(tmp_path, play):
    """A keyframe of 5 MB (thousands of streams) is read whole, and the events behind it too."""
    first = codec.encode(HEADER)
    big = codec.encode(Keyframe(t=S, state={"count": 0, "x": "y" * 5_000_000}, offset=len(first)))
    path = tmp_path / "a"
    path.write_bytes(first + big + b"".join(map(codec.encode, marks([2 * S, 3 * S]))))

    found = play(Recording.open(str(path))).seek(2 * S)

    assert len(found.keyframes) == 1
    assert [event.t for event in found.events] == [2 * S]


def test_a_chain_that_points_at_itself_is_not_followed(tmp_path, play):
    """A forged or damaged `prev` cannot make a jump hang: the file is scanned instead."""
    data = codec.encode(HEADER)
    data += codec.encode(Keyframe(t=S, state={"count": 0}, offset=len(data), prev=len(data)))
    path = tmp_path / "a"
    path.write_bytes(data)

    assert [keyframe.t for keyframe in play(Recording.open(str(path))).seek(S).keyframes] == [S]


@pytest.mark.parametrize("trusted", [True, False])
def test_keyframes_of_a_growing_file_are_found_as_they_come(tmp_path, play, trusted):
    """Jumping in a file that is written on in arbitrary pieces restores the same as in the finished one."""
    whole = tmp_path / "whole"
    recorded(whole, marks([n * S for n in range(1, 60)]), 3)
    data = (b"" if trusted else b"# moved\n") + whole.read_bytes()
    draw = random.Random(3)
    path = tmp_path / "growing"
    done = data.index(b"}\n") + 2
    path.write_bytes(data[:done])
    player = play(Recording.open(str(path)))
    while done < len(data):
        piece = draw.randint(1, 400)
        with path.open("ab") as file:
            file.write(data[done : done + piece])
        done += piece
        found = player.seek(draw.randint(0, 60) * S)
        count = found.keyframes[-1].state["count"] if found.keyframes else 0
        assert count + sum(isinstance(event, Mark) for event in found.events) == player.position_us // S

    assert [k.state["count"] for k in player.seek(59 * S).keyframes] == list(range(3, 60, 3))


def test_damaged_recordings_are_played_as_far_as_they_go(tmp_path, play):
    """300 recordings with bytes flipped, cut out, doubled or zeroed behind the header: nothing raises, and a jump to
    the end gives the same keyframes and events as reading does."""
    whole = tmp_path / "whole"
    recorded(whole, [*marks([n * S for n in range(1, 30)]), LoadSample(t=31 * S), End(t=32 * S, reason="done")], 4)
    header, data = whole.read_bytes().split(b"\n", 1)
    draw = random.Random(11)
    path = tmp_path / "damaged"
    for _ in range(300):
        body = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            at, length = draw.randrange(len(body)), draw.randint(1, 60)
            kind = draw.randrange(4)
            if kind == 0:
                body[at] ^= 1 << draw.randrange(8)
            elif kind == 1:
                del body[at : at + length]
            elif kind == 2:
                body[at:at] = body[at : at + length]
            else:
                body[at : at + length] = bytes(len(body[at : at + length]))
        path.write_bytes(header + b"\n" + body)
        recording = Recording.open(str(path))
        player = play(recording)
        read = [event for event in recording if not isinstance(event, Keyframe)]
        for _ in player.scan_marks():
            pass
        player.seek(player.end_us // 2)
        player.step(2)
        player.seek(0)
        player._go_to(0)

        assert drain(player) == read


def test_the_end_of_a_followed_recording_is_the_end(tmp_path, play):
    """Following stops by itself once `end` has been read, and says so."""
    path = tmp_path / "a"
    player = play(recorded(path, marks([S])))
    player.follow = True
    player.advance(0)
    assert player.follow

    with path.open("ab") as file:
        file.write(codec.encode(End(t=2 * S, reason="done")))

    assert [event.t for event in player.advance(1)] == [2 * S]
    assert (player.follow, player.playing, player.note) == (False, False, "end of the recording")
