"""The list of keys: no clash, nothing that a multiplexer swallows, and one list for bindings, help and footer."""

import pytest
from screen_fakes import VIEWS

from lpxtop.tui import keymap
from lpxtop.tui.look import Look
from lpxtop.tui.panels import footer
from lpxtop.tui.rows import plain
from lpxtop.tui.screens import help as help_screen


def test_the_list_has_no_clash():
    """Each key does one thing in each kind of screen, and ids are unique."""
    assert keymap.problems({}) == []
    assert len({key.id for key in keymap.KEYS}) == len(keymap.KEYS)


def test_a_users_clash_is_named():
    """Both sides are named, and an unknown id too."""
    assert keymap.problems({"view.freeze": "z"}) == ["keymap: 'z' is both panel.zoom and view.freeze"]
    assert keymap.problems({"view.melt": "u"}) == ["keymap: there is no 'view.melt'"]
    assert keymap.problems({"view.freeze": "u"}) == []


def test_no_key_that_terminals_keep_for_themselves():
    """No alt, no function keys, no ctrl+a, ctrl+b, ctrl+s, ctrl+z, and escape is never the only way."""
    for key in keymap.KEYS:
        names = key.keys.split(",")
        assert not any(name.startswith(("alt+", "f1", "shift+left")) for name in names)
        assert not {"ctrl+a", "ctrl+b", "ctrl+s", "ctrl+z"} & set(names)
    assert {"panel.zoom", "panel.back"} <= {key.id for key in keymap.KEYS}


def test_no_key_of_a_replay_or_a_watch_can_send_load():
    """Their actions are none of a load's."""
    load = {key.action for key in keymap.KEYS if key.group == "load"} - {"run_or_hold"}
    for mode in (keymap.REPLAY, keymap.WATCH):
        assert not load & {key.action for key in keymap.of_mode(mode)}
    assert "run_or_hold" not in {key.action for key in keymap.of_mode(keymap.WATCH)}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_footer_fits_and_always_has_quit_and_help(name, width):
    """At most nine labels, whole ones, help and quit among them."""
    text = plain(footer.lines(VIEWS[name], width, 1, Look())[0]).rstrip()

    assert len(text) <= width
    assert "? help" in text
    assert "q quit" in text


def test_labels_say_what_the_key_will_do():
    """space starts, pauses, resumes or plays, by state; freezing is undone by the same key."""
    labels = {
        name: plain(footer.lines(VIEWS[name], 120, 1, Look())[0]).split("  ")[0].strip()
        for name in ("ready", "live", "paused", "replay")
    }

    assert labels == {"ready": "space start", "live": "space pause", "paused": "space resume", "replay": "space pause"}
    assert "f unfreeze" in plain(footer.lines(VIEWS["live"], 120, 1, Look(frozen_s=3))[0])


@pytest.mark.parametrize("mode", sorted(keymap.ALL))
def test_help_names_every_key(mode):
    """Each entry of the list with all its keys and its sentence."""
    page = "\n".join(plain(row) for row in help_screen.lines(mode, 100))

    for key in keymap.of_mode(mode):
        assert keymap.all_shown(key) in page
        assert key.help in page
    assert "TTFT" in page
