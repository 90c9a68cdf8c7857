"""The slider's arithmetic, its line, and its patience; and the scrub bar's."""

import msgspec
import pytest
from screen_fakes import LIVE, OPEN_LOOP, READY, REPLAY, FakeControl, S

from lpxtop.metrics.view import LoadView
from lpxtop.tui.dial import QUIET_S, Dial
from lpxtop.tui.look import Look
from lpxtop.tui.panels import scrub, slider
from lpxtop.tui.rows import plain, width_of

LOAD = LoadView(target=16, applied=16, in_flight=16, max_concurrency=64)
RATE = LoadView(mode="poisson", rate=5.0)


@pytest.mark.parametrize(
    ("text", "value", "note"),
    [
        ("32", 32, ""),
        (" +8 ", 24, ""),
        ("-4", 12, ""),
        ("x2", 32, ""),
        ("/2", 8, ""),
        ("/3", 5, ""),
        ("max", 64, ""),
        ("100", 64, "the most is 64"),
        ("-99", 1, "the least is 1"),
        ("0", 1, "the least is 1"),
    ],
)
def test_an_entry_means(text, value, note):
    """What can be typed, from 16 with at most 64; what was limited is said."""
    assert slider.parse(text, LOAD, 16) == (value, note)


@pytest.mark.parametrize("text", ["abc", "", "x0", "1.5", "x", "nan", "inf", "1e999", "--3"])
def test_a_bad_entry_says_why(text):
    """Never a silent guess."""
    with pytest.raises(ValueError, match=r"\w"):
        slider.parse(text, LOAD, 16)


def test_a_rate_may_have_a_fraction():
    """0.5 req/s is a rate; +0.1 moves it."""
    assert slider.parse("0.5", RATE, 5.0) == (0.5, "")
    assert slider.parse("+0.1", RATE, 5.0) == (5.1, "")


def test_concurrency_moves_by_one_within_its_range():
    """1 and the plan's limit hold."""
    assert slider.stepped(LOAD, 16, 1) == 17
    assert slider.stepped(LOAD, 1, -1) == 1
    assert slider.stepped(LOAD, 60, 10) == 64
    assert slider.scaled(LOAD, 5, 0.5) == 2
    assert slider.scaled(LOAD, 1, 0.5) == 1
    assert slider.scaled(LOAD, 40, 2) == 64


def test_a_rate_moves_by_a_part_of_itself_and_comes_back():
    """5 → 5.5 → 5; 1 → 1.1; 2 → 2.2; 10 → 9.5."""
    assert slider.stepped(RATE, 5.0, 1) == 5.5
    assert slider.stepped(RATE, 5.5, -1) == 5.0
    assert slider.stepped(RATE, 1.0, 1) == 1.1
    assert slider.stepped(RATE, 2.0, 1) == 2.2
    assert slider.stepped(RATE, 10.0, -1) == 9.5
    assert slider.stepped(RATE, 0.1, -1) == 0.1


def test_the_line_shows_the_exact_numbers():
    """Target, limit and in flight; the head is two thirds along the way from 1 to 64 (2⁴ of 2⁶)."""
    (row,) = slider.lines(LIVE, 80, 1, Look())
    text = plain(row)

    assert text.endswith(" 16 / 64  in flight 16 ")
    first, cells = slider.track_of(LIVE, 80, Look())
    assert text.index("●") == first + round((cells - 1) * 4 / 6)
    assert width_of(row) == 80


def test_three_values_where_they_differ():
    """Applied → target, and what is in flight."""
    view = msgspec.structs.replace(LIVE, load=msgspec.structs.replace(LIVE.load, target=32, applied=16, in_flight=21))

    assert plain(slider.lines(view, 80, 1, Look())[0]).endswith(" 16 → 32 / 64  in flight 21 ")
    assert plain(slider.lines(LIVE, 80, 1, Look(pending=48))[0]).endswith(" 16 → 48 / 64  in flight 16 ")


def test_a_ready_screen_says_how_to_start():
    """No load was sent yet, and the key that sends it is named."""
    assert "space starts the load" in plain(slider.lines(READY, 80, 1, Look())[0])
    assert "space starts" in plain(slider.lines(READY, 60, 1, Look())[0])


def test_open_loop_moves_the_rate():
    """The rate with its unit, and how many are late."""
    assert plain(slider.lines(OPEN_LOOP, 80, 1, Look())[0]).endswith("5.00 req/s  in flight 23  late 7 ")


def test_the_mouse_points_at_values():
    """The ends of the track are the ends of the range, the head's cell the target."""
    assert slider.at_cell(LOAD, 0, 40) == 1
    assert slider.at_cell(LOAD, 39, 40) == 64
    assert slider.at_cell(LOAD, 26, 40) == 16


class Waiting:
    """Time that passes when told."""

    def __init__(self):
        self.timers = []

    def __call__(self, seconds, then):
        timer = Timer(seconds, then)
        self.timers.append(timer)
        return timer

    def pass_quietly(self):
        for timer in list(self.timers):
            if not timer.stopped:
                timer.stopped = True
                timer.then()


class Timer:
    def __init__(self, seconds, then):
        self.seconds, self.then, self.stopped = seconds, then, False

    def stop(self):
        self.stopped = True


def test_holding_a_key_gives_one_change():
    """Ten steps within the quiet time are one request to the session, at the last target."""
    control, look, wait = FakeControl(LIVE), Look(), Waiting()
    dial = Dial(control, look, wait)
    for _ in range(10):
        dial.step(LOAD, 1)

    assert look.pending == 26
    assert control.calls == []
    assert {timer.seconds for timer in wait.timers} == {QUIET_S}
    wait.pass_quietly()
    assert control.calls == [("concurrency", 26)]
    assert look.pending is None
    dial.apply()
    assert control.calls == [("concurrency", 26)]


def test_a_rate_is_asked_for_as_a_rate():
    """Open loop."""
    control, wait = FakeControl(OPEN_LOOP), Waiting()
    Dial(control, Look(), wait).step(RATE, 1)
    wait.pass_quietly()

    assert control.calls == [("rate", 5.5)]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5:30", 330),
        ("90", 90),
        ("90s", 90),
        ("2m", 120),
        ("+30", 150),
        ("-1m", 60),
        ("-5m", 0),
        ("50%", 360),
        ("C2", 72),
        ("c3", 301),
        ("!1", 300),
        ("m1", 95),
        ("0:11:59", 719),
    ],
)
def test_a_place_to_go_to(text, seconds):
    """From the start, from here, a share, or a numbered mark; beyond the ends is the end."""
    assert scrub.parse(text, REPLAY.replay) == seconds * S


def test_a_time_of_day_is_a_place_when_it_is_no_position():
    """1 800 000 000 is 08:00:00 UTC; 08:03:00 is three minutes in."""
    assert scrub.parse("08:03:00", REPLAY.replay) == 180 * S
    with pytest.raises(ValueError, match="not within"):
        scrub.parse("12:00:00", REPLAY.replay)


@pytest.mark.parametrize(("text", "why"), [("C9", "3 marks C"), ("soon", "like 5:30"), ("!2", "1 marks !")])
def test_a_bad_place_says_why(text, why):
    """The reason, and what can be typed."""
    with pytest.raises(ValueError, match=why):
        scrub.parse(text, REPLAY.replay)


def test_the_bar_shows_head_and_marks():
    """Position and length at the ends; the head at a sixth; errors win over a load change in the same cell."""
    (row,) = scrub.lines(REPLAY, 80, 1, Look())
    text = plain(row)
    bar = text[text.index("├") + 1 : text.index("┤")]

    assert text.startswith(" 00:02:00.0 ├")
    assert text.endswith("┤ 00:12:00.0 ")
    assert bar.index("●") == 120 * (len(bar) - 1) // 720
    assert bar[300 * (len(bar) - 1) // 720] == "!"
    assert bar.count("C") == 2


def test_jumping_from_mark_to_mark():
    """The next one after the head, the last one before it; one just passed is not "before"."""
    replay = REPLAY.replay
    assert scrub.next_mark(replay, "C!m:", 1) == 300 * S
    assert scrub.next_mark(replay, "C!m:", -1) == 95 * S
    assert scrub.next_mark(replay, "C", -1) == 72 * S
    at_mark = msgspec.structs.replace(replay, position_us=95 * S + 100_000)
    assert scrub.next_mark(at_mark, "C!m:", -1) == 72 * S
