"""Every key, once: bindings, footer, help, palette and the README's table come from this list.

Single printable keys with ids, so that all can be rebound; arrows and vim's letters do the same. Never ctrl+a, ctrl+b,
ctrl+s, alt or function keys. Must not act: an action is a name that the screen implements.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LIVE, WATCH, REPLAY = "live", "watch", "replay"
ALL = frozenset({LIVE, WATCH, REPLAY})


@dataclass(frozen=True)
class Key:
    """`keys` are Textual's names, comma-separated; `footer` is the rank on the last line, 0 for never there."""

    id: str
    keys: str
    action: str
    label: str
    help: str
    modes: frozenset[str] = ALL
    footer: int = 0
    group: str = "view"


def _load(name: str, keys: str, action: str, label: str, text: str, *, footer: int = 0) -> Key:
    return Key(name, keys, action, label, text, frozenset({LIVE}), footer, "load")


def _replay(name: str, keys: str, action: str, label: str, text: str, *, footer: int = 0) -> Key:
    return Key(name, keys, action, label, text, frozenset({REPLAY}), footer, "replay")


KEYS: tuple[Key, ...] = (
    _load("load.toggle", "space", "run_or_hold", "start/pause", "send requests, or send no new ones", footer=1),
    _load("conc.down", "minus,underscore,left,h", "step(-1)", "less", "one request in flight less"),
    _load("conc.up", "plus,equals_sign,right,l", "step(1)", "load", "one more", footer=3),
    _load("conc.down10", "H,pagedown", "step(-10)", "10 less", "ten less"),
    _load("conc.up10", "L,pageup", "step(10)", "10 more", "ten more"),
    _load("conc.half", "left_curly_bracket", "scale(0.5)", "half", "half the load"),
    _load("conc.double", "right_curly_bracket", "scale(2.0)", "double", "twice the load"),
    _load("conc.edit", "c", "edit", "set", "type the load: 32, +8, -4, x2, /2, max", footer=4),
    _load("load.cancel", "x", "cancel", "cancel", "cancel the requests in flight (asks first)"),
    _replay("replay.toggle", "space", "run_or_hold", "pause", "play or pause", footer=1),
    _replay("replay.back", "left,h", "seek(-1)", "-1 s", "one second back", footer=4),
    _replay("replay.forward", "right,l", "seek(1)", "+1 s", "one second on", footer=5),
    _replay("replay.back10", "H,pagedown", "seek(-10)", "-10 s", "ten seconds back"),
    _replay("replay.forward10", "L,pageup", "seek(10)", "+10 s", "ten seconds on"),
    _replay("replay.step_back", "comma", "sample(-1)", "sample back", "one sample back"),
    _replay("replay.step", "full_stop", "sample(1)", "sample on", "one sample on"),
    _replay("replay.mark_back", "left_square_bracket", "mark_jump(-1)", "mark back", "the mark before"),
    _replay("replay.mark_next", "right_square_bracket", "mark_jump(1)", "mark on", "the next mark", footer=7),
    _replay("replay.level_back", "left_curly_bracket", "level_jump(-1)", "level back", "the load change before"),
    _replay("replay.level_next", "right_curly_bracket", "level_jump(1)", "level on", "the next load change"),
    _replay("replay.slower", "less_than_sign", "speed(-1)", "slower", "half the speed"),
    _replay("replay.faster", "greater_than_sign", "speed(1)", "speed", "twice the speed, up to max", footer=6),
    _replay("replay.start", "home", "seek_to(0)", "start", "to the start"),
    _replay("replay.end", "end,G", "seek_to(1)", "end", "to the end"),
    _replay("replay.goto", "g", "goto", "go to", "type a place: 5:30, +30, -1m, 50%, 14:02:11, C2, !1", footer=8),
    _replay("replay.follow", "F", "follow", "follow", "stay at the end of a file that is still written"),
    Key("panel.latency", "1", "panel('latency')", "panel", "per-token latency over time", footer=6),
    Key("panel.ttft", "2", "panel('ttft')", "TTFT", "TTFT histogram"),
    Key("panel.throughput", "3", "panel('throughput')", "tok/s", "throughput and requests in flight"),
    Key("panel.gpu", "4", "panel('gpu')", "GPU", "GPUs"),
    Key("panel.server", "5", "panel('server')", "server", "the server's own metrics"),
    Key("panel.requests", "6", "panel('requests')", "requests", "requests in flight, oldest first"),
    Key("panel.events", "7", "panel('events')", "events", "events and verdicts"),
    Key("panel.levels", "8", "panel('levels')", "levels", "the load levels visited; zoomed, the knee"),
    Key("panel.next", "tab", "cycle(1)", "next", "next panel"),
    Key("panel.previous", "shift+tab", "cycle(-1)", "previous", "previous panel"),
    Key("panel.zoom", "z", "zoom", "zoom", "the chosen panel alone; z or esc goes back", footer=7),
    Key("panel.back", "escape", "back", "back", "back from zoom or help"),
    Key("list.down", "j,down", "scroll(1)", "down", "down in the chosen list"),
    Key("list.up", "k,up", "scroll(-1)", "up", "up in the chosen list"),
    Key("view.freeze", "f", "freeze", "freeze", "hold the picture; load and recording go on", footer=9),
    Key("view.window", "w", "window", "window", "what figures cover: 10 s, 30 s, 60 s, 5 min"),
    Key("view.scale", "y", "log", "log scale", "latency axis linear or logarithmic"),
    Key("view.theme", "t", "app.theme", "theme", "next theme"),
    Key("mark.add", "m", "note", "note", "write a note into the recording", frozenset({LIVE, WATCH}), 8),
    Key("help", "question_mark", "app.help", "help", "this page", footer=2, group="general"),
    Key("palette", "colon,ctrl+p", "app.command_palette", "palette", "every command by name", group="general"),
    Key("quit", "q", "app.quit_run", "quit", "quit, asks while load runs; ctrl+c stops the load, again quits", footer=2,
        group="general"),
)  # fmt: skip

_DISPLAY = {
    "minus": "-", "plus": "+", "equals_sign": "=", "underscore": "_", "left_curly_bracket": "{",
    "right_curly_bracket": "}", "left_square_bracket": "[", "right_square_bracket": "]", "comma": ",",
    "full_stop": ".", "less_than_sign": "<", "greater_than_sign": ">", "question_mark": "?", "colon": ":",
    "left": "←", "right": "→", "up": "↑", "down": "↓", "escape": "esc", "pagedown": "pgdn", "pageup": "pgup",
}  # fmt: skip
_PAIRS = {"conc.up": "+/-", "replay.back": "←", "replay.forward": "→", "panel.latency": "1-8"}


def shown(key: str) -> str:
    """A key's name as people write it."""
    return _DISPLAY.get(key, key)


def display(key: Key) -> str:
    """The key on the last line."""
    return _PAIRS.get(key.id) or shown(key.keys.split(",")[0])


def all_shown(key: Key) -> str:
    """Every key of an entry, for the help."""
    return " ".join(shown(name) for name in key.keys.split(","))


def of_mode(mode: str) -> list[Key]:
    """The keys of one kind of screen."""
    return [key for key in KEYS if mode in key.modes]


def effective(overrides: Mapping[str, str]) -> list[Key]:
    """The list with the user's keys in place of ours."""
    return [
        Key(key.id, overrides.get(key.id, key.keys), key.action, key.label, key.help, key.modes, key.footer, key.group)
        for key in KEYS
    ]


def problems(overrides: Mapping[str, str]) -> list[str]:
    """What is wrong with a user's keys: unknown ids, and one key for two things in the same screen."""
    known = {key.id for key in KEYS}
    found = [f"keymap: there is no {name!r}" for name in overrides if name not in known]
    keys = effective(overrides)
    for mode in sorted(ALL):
        found += [text for text in _clashes(key for key in keys if mode in key.modes) if text not in found]
    return found


def _clashes(keys: Iterable[Key]) -> list[str]:
    owner: dict[str, str] = {}
    found = []
    for key in keys:
        for name in key.keys.split(","):
            if name in owner:
                found.append(f"keymap: {shown(name)!r} is both {owner[name]} and {key.id}")
            owner.setdefault(name, key.id)
    return found
