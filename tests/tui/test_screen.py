"""The screen as a whole, driven by keys: what is asked of the run, what is shown, at any size."""

import asyncio
from dataclasses import replace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from screen_fakes import LIVE, NO_GPU, OPEN_LOOP, READY, REPLAY, VIEWS, WATCH, FakeControl, LivelyControl, S
from textual import events
from textual.geometry import Size

from lpxtop.errors import LpxtopError
from lpxtop.tui.application import LpxtopApp, Settings
from lpxtop.tui.screens.help import HelpScreen

FAST = Settings(fps=10)


def app_of(view, *, session=None, **changes) -> tuple[LpxtopApp, FakeControl]:
    """An application on a pretended run."""
    control = FakeControl(view)
    return LpxtopApp(control, replace(FAST, **changes), session), control


def shown(app: LpxtopApp) -> str:
    """The panels' lines, from top to bottom."""
    panels = sorted((p for p in app.main._panels.values() if p.display), key=lambda p: (p.region.y, p.region.x))
    return "\n".join(line for panel in panels for line in panel.text())


async def quiet(pilot) -> None:
    """Longer than the slider waits."""
    await pilot.pause(0.25)


async def test_a_ready_screen_sends_nothing_until_told():
    """Opening asks nothing of the run; space starts it, space again pauses, and again resumes."""
    app, control = app_of(READY)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.3)
        assert control.calls == []
        assert "space starts the load" in shown(app)
        await pilot.press("space", "space", "space")
        await pilot.pause()

        assert control.calls == [("start",), ("pause",), ("start",)]


async def test_start_is_asked_for_once_when_wanted():
    """`start=True` sends load after the first paint."""
    app, control = app_of(READY, start=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)

        assert control.calls == [("start",)]


@pytest.mark.parametrize(
    ("keys", "concurrency"),
    [
        (["plus"], 17),
        (["equals_sign"], 17),
        (["right"], 17),
        (["l"], 17),
        (["minus"], 15),
        (["underscore", "h", "left"], 13),
        (["L"], 26),
        (["H"], 6),
        (["right_curly_bracket"], 32),
        (["left_curly_bracket", "left_curly_bracket"], 4),
        (["plus"] * 9, 25),
        (["right_curly_bracket", "right_curly_bracket", "right_curly_bracket"], 64),
    ],
)
async def test_the_slider_keys(keys, concurrency):
    """One request to the run however many keys, with the last target; the target is on screen at once."""
    app, control = app_of(LIVE)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press(*keys)
        assert f"16 → {concurrency} / 64" in shown(app)
        assert control.calls == []
        await quiet(pilot)

        assert control.calls == [("concurrency", concurrency)]


async def test_number_entry():
    """c opens it in the slider's row; a bad text stays with the reason; enter applies; the panels' digits wait."""
    app, control = app_of(LIVE)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("c", "4", "x", "enter")
        await pilot.pause()
        assert app.main.entry.display
        assert "a number like 32" in app.main.entry.render_line(0).text
        assert "4x" in app.main.entry.render_line(0).text
        await pilot.press("backspace", "8", "enter")
        await pilot.pause()

        assert not app.main.entry.display
        assert control.calls == [("concurrency", 48)]
        assert app.look.chosen == "latency"


async def test_an_entry_can_be_left():
    """Escape and an empty text change nothing."""
    app, control = app_of(LIVE)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("c", "9", "escape", "c", "enter")
        await quiet(pilot)

        assert control.calls == []
        assert not app.main.entry.display


async def test_an_entry_is_limited_with_a_message():
    """99 becomes 64, and the screen says so."""
    app, control = app_of(LIVE)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("c", *"99", "enter")
        await pilot.pause()

        assert control.calls == [("concurrency", 64)]
        assert [note.message for note in app._notifications] == ["the most is 64"]


async def test_the_rate_moves_in_open_loop():
    """+ asks for a rate."""
    app, control = app_of(OPEN_LOOP)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("plus")
        await quiet(pilot)

        assert control.calls == [("rate", 5.5)]


async def test_a_note():
    """m takes a line; an empty one is none."""
    app, control = app_of(LIVE)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("m", *"ab c", "enter", "m", "enter")
        await pilot.pause()

        assert control.calls == [("mark", "ab c")]


async def test_pasted_text_goes_into_the_entry_cleaned():
    """Line ends and escape codes of a paste do not get in."""
    app, control = app_of(LIVE)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("m")
        app.main.post_message(events.Paste("two\nlines\x1b[31m"))
        await pilot.press("enter")
        await pilot.pause()

        assert control.calls == [("mark", "two lines [31m")]


async def test_cancelling_asks():
    """x asks; only yes cancels."""
    app, control = app_of(LIVE)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("x", "n", "x", "y")
        await pilot.pause()

        assert control.calls == [("cancel",)]


@pytest.mark.parametrize(
    ("keys", "calls"),
    [
        (["space"], [("pause",)]),
        (["right"], [("seek", 121 * S)]),
        (["h"], [("seek", 119 * S)]),
        (["L"], [("seek", 130 * S)]),
        (["H"], [("seek", 110 * S)]),
        (["home"], [("seek", 0)]),
        (["G"], [("seek", 720 * S)]),
        (["full_stop"], [("pause",), ("step", 1)]),
        (["comma"], [("pause",), ("step", -1)]),
        (["right_square_bracket"], [("seek", 300 * S)]),
        (["left_square_bracket"], [("seek", 95 * S)]),
        (["right_curly_bracket"], [("seek", 301 * S)]),
        (["left_curly_bracket"], [("seek", 72 * S)]),
        (["greater_than_sign"], [("speed", 4.0)]),
        (["less_than_sign"], [("speed", 1.0)]),
        (["F"], [("follow", True)]),
        (["g", *"5", "colon", *"30", "enter"], [("seek", 330 * S)]),
        (["g", *"C2", "enter"], [("seek", 72 * S)]),
    ],
)
async def test_the_replay_keys(keys, calls):
    """The player is asked, and nothing else."""
    app, control = app_of(REPLAY)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press(*keys)
        await quiet(pilot)

        assert control.calls == calls


async def test_no_key_of_a_replay_sends_load():
    """Every key of the live screen, pressed on a replay."""
    app, control = app_of(REPLAY)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("plus", "minus", "c", "x", "m", "equals_sign", "underscore")
        await quiet(pilot)

        assert control.calls == []


async def test_at_the_end_of_a_replay_play_begins_again():
    """space at the end goes to the start."""
    at_end = msgspec.structs.replace(REPLAY.replay, position_us=720 * S, playing=False)
    app, control = app_of(msgspec.structs.replace(REPLAY, replay=at_end))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("space")
        await pilot.pause()

        assert control.calls == [("seek", 0), ("play",)]


async def test_watching_has_no_slider():
    """Keys of the load do nothing, notes can be made."""
    app, control = app_of(WATCH)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("space", "plus", "c", "m", "a", "enter")
        await quiet(pilot)

        assert control.calls == [("mark", "a")]
        assert "watching: no load is sent" in shown(app)


async def test_panels_by_digit_tab_and_zoom():
    """A digit shows a panel, tab the next, z makes it large and z or escape small again."""
    app, _ = app_of(LIVE)
    async with app.run_test(size=(80, 24)) as pilot:
        for key, title in (("2", "2 TTFT ms"), ("6", "6 requests in flight"), ("8", "8 load levels")):
            await pilot.press(key)
            assert f"▸ {title}" in shown(app)
        await pilot.press("tab")
        assert "▸ 1 ITL ms" in shown(app)
        await pilot.press("shift+tab", "z")
        await pilot.pause()
        assert app.main._panels["levels"].region.height == 24 - 3
        assert "GPU0" not in shown(app)
        await pilot.press("escape")
        await pilot.pause()
        assert "GPU0" in shown(app)


async def test_freezing_holds_the_picture_and_nothing_else():
    """No view is taken while frozen, the header says since when; unfreezing takes one at once."""
    app, control = app_of(LIVE)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("f")
        views = control.views
        control.change(t=500 * S)
        await pilot.pause(0.3)
        assert control.views == views
        assert "FROZEN 0 s" in shown(app)
        assert "00:02:00" in shown(app)
        await pilot.press("f")
        assert "00:08:20" in shown(app)
        assert "FROZEN" not in shown(app)


async def test_windows_go_round():
    """30 s → 60 s → 5 min → 10 s."""
    app, control = app_of(LIVE)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("w", "w", "w")

        assert control.calls == [("window", 60.0), ("window", 300.0), ("window", 10.0)]


async def test_a_log_axis():
    """y: the axis begins at a decade instead of zero."""
    app, _ = app_of(LIVE)
    async with app.run_test(size=(80, 24)) as pilot:
        assert "     0┤" in shown(app)
        await pilot.press("y")
        assert "     1┤" in shown(app)


async def test_help_and_back():
    """? shows the keys, any way out leads back."""
    app, _ = app_of(LIVE)
    async with app.run_test(size=(80, 24)) as pilot:
        for way_out in ("q", "escape", "question_mark"):
            await pilot.press("question_mark")
            assert isinstance(app.screen, HelpScreen)
            await pilot.press("j", "pagedown", "end", "home", way_out)
            await pilot.pause()
            assert app.screen is app.main


async def test_the_palette_runs_what_it_lists():
    """Choosing an entry does what its key does."""
    app, control = app_of(LIVE)
    async with app.run_test(size=(80, 24)) as pilot:
        commands = {command.title: command for command in app.get_system_commands(app.screen)}
        commands["start/pause  (space)"].callback()
        await pilot.pause()
        assert control.calls == [("pause",)]
        await pilot.press("colon")
        await pilot.pause()
        assert app.screen is not app.main


async def test_themes_go_round_and_a_bad_one_is_told(tmp_path):
    """t changes the colours; an unknown name and a bad file are told, and the default kept."""
    (tmp_path / "bad.toml").write_text("nonsense")
    app, _ = app_of(LIVE, theme="no-such", user_themes=tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        assert app.theme == "lpxtop-colour-blind-safe"
        told = " ".join(note.message for note in app._notifications)
        assert "bad.toml" in told
        assert "no theme 'no-such'" in told
        before = app.main.paint
        await pilot.press("t")
        assert app.theme == "lpxtop-dark"
        assert app.main.paint is not before


async def test_keys_can_be_rebound():
    """A user's key replaces ours."""
    app, control = app_of(LIVE, keys={"load.toggle": "s"})
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("space")
        assert control.calls == []
        await pilot.press("s")
        assert control.calls == [("pause",)]


async def test_a_clash_is_told_and_our_keys_kept():
    """Both names, and the keymap stays whole."""
    app, control = app_of(LIVE, keys={"view.freeze": "space"})
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        assert "'space' is both load.toggle and view.freeze" in " ".join(n.message for n in app._notifications)
        await pilot.press("space")
        assert control.calls == [("pause",)]


async def test_the_end_of_the_session_leaves_the_screen_up():
    """When load ends by itself the figures stay; q then quits without asking."""
    app, control = app_of(LIVE, session=lambda: asyncio.sleep(0))
    async with app.run_test(size=(80, 24)) as pilot:
        control.change(phase="ended", ended="done", load=msgspec.structs.replace(LIVE.load, in_flight=0))
        await pilot.pause(0.3)
        assert "■ ENDED" in shown(app)
        await pilot.press("q")
        await pilot.pause(0.2)

    assert app.exit_code == 0
    assert control.calls == [("stop", "done")]


async def test_a_failed_session_ends_the_screen_with_its_error():
    """The exception is kept for the caller."""

    async def fails() -> None:
        raise LpxtopError("gone")

    app, _ = app_of(READY, session=fails)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.3)

    assert str(app.failure) == "gone"


async def test_quitting_waits_for_the_session_and_a_second_q_cuts_it():
    """The header says what it waits for; q again cancels what is in flight."""
    ended = asyncio.Event()
    app, control = app_of(LIVE, session=ended.wait)
    control.cancel_requests = lambda: (control.calls.append(("cancel",)), ended.set())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause(0.2)
        await pilot.press("q", "y")
        await pilot.pause(0.3)
        assert "stopping: 16 requests are still in flight; q cuts them" in shown(app)
        await pilot.press("q")
        await pilot.pause(0.3)

    assert control.calls == [("stop", "done"), ("cancel",)]


SIZES = [(1, 1), (200, 60), (2, 40), (59, 24), (60, 16), (79, 15), (80, 24), (200, 16), (120, 40), (110, 60), (180, 39)]


@pytest.mark.parametrize("name", ["eight", "replay", "watch", "storm"])
async def test_every_size_without_exception(name):
    """Sizes from 1x1 to 200x60, resized while it runs, with every row as wide as its panel."""
    control = FakeControl(VIEWS[name])
    app = LpxtopApp(control, FAST)
    async with app.run_test(size=(80, 24)) as pilot:
        for size in SIZES:
            app.post_message(events.Resize(Size(*size), Size(*size)))
            await pilot.pause()
            app.main.redraw()
            for panel_name, place in app.main._places.items():
                panel = app.main._panels[panel_name]
                assert len(panel.text()) == place.height
                assert {strip.cell_length for strip in panel._strips} <= {place.width}
        assert app.size == SIZES[-1]


async def test_an_unchanged_view_redraws_nothing():
    """Idle means no bytes: no region is refreshed when nothing changed."""
    app, _ = app_of(READY)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause(0.3)
        refreshed = []
        for panel in app.main._panels.values():
            panel.refresh = lambda *regions, panel=panel, **_: refreshed.append((panel.id, regions))
        await pilot.pause(0.35)

        assert refreshed == []


async def test_a_changed_figure_redraws_its_cells_only():
    """One more second on the clock: one cell of the first line."""
    app, control = app_of(READY)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause(0.3)
        refreshed = []
        for panel in app.main._panels.values():
            panel.refresh = lambda *regions, panel=panel, **_: refreshed.append((panel.id, regions))
        control.change(t=READY.t + S)
        await pilot.pause(0.35)

        assert [(name, region.height, region.width) for name, (region,) in refreshed] == [("status", 1, 1)]


async def test_a_reason_instead_of_a_gpu():
    """The sentence of the view."""
    app, _ = app_of(NO_GPU)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("4")
        assert "libnvidia-ml) was not found" in shown(app)


KEYS = st.sampled_from(
    [*"abcdefghijklmnoprstuvwxyzFGHL123456789", "space", "plus", "minus", "tab", "shift+tab", "escape", "enter",
     "colon", "question_mark", "left", "right", "up", "down", "home", "end", "pageup", "pagedown", "backspace", "comma",
     "full_stop", "left_square_bracket", "right_square_bracket", "left_curly_bracket", "right_curly_bracket"]
)  # fmt: skip


@pytest.mark.parametrize("view", [LIVE, REPLAY, WATCH], ids=["live", "replay", "watch"])
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(keys=st.lists(KEYS, min_size=150, max_size=200))
async def test_random_keys_never_crash(view, keys):
    """Any keys in any order, faster than they can be handled one by one; only what quits is left out."""
    control = LivelyControl(view)
    app = LpxtopApp(control, FAST)
    async with app.run_test(size=(80, 24)) as pilot:
        for place, key in enumerate(keys):
            app.post_message(events.Key(key, key if len(key) == 1 else None))
            if place % 10 == 9:
                await pilot.pause()
        await pilot.pause()
        assert app.is_running
        assert app._exception is None
