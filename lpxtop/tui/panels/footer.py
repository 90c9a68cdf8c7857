"""The last line: the keys that matter now, labelled with what they will do. At most nine. Pure lines."""

from lpxtop.metrics.view import RunView
from lpxtop.tui import keymap
from lpxtop.tui.look import Look
from lpxtop.tui.panels.states import ended, mode_of
from lpxtop.tui.rows import Row, Span, line, width_of

_MOST = 9


def lines(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """One row: as many of the most important keys as fit, in the keymap's order."""
    shown: list[tuple[int, Row]] = []
    used = 1
    keys = [key for key in keymap.KEYS if mode_of(view) in key.modes and key.footer]
    for key in sorted(keys, key=lambda key: key.footer)[:_MOST]:
        row = line((keymap.display(key), "key"), f" {label_now(key, view, look)}  ")
        if used + width_of(row) <= width + 2:
            shown.append((keymap.KEYS.index(key), row))
            used += width_of(row)
    spans: list[Span] = [(" ", "text")]
    for _, row in sorted(shown, key=lambda found: found[0]):
        spans += row
    return [tuple(spans)][:height]


def label_now(key: keymap.Key, view: RunView, look: Look) -> str:
    """What the key will do in this state."""
    match key.id:
        case "load.toggle":
            return {"ready": "start", "paused": "resume"}.get(view.phase, "ended" if ended(view) else "pause")
        case "replay.toggle":
            return "pause" if view.replay is not None and view.replay.playing else "play"
        case "view.freeze":
            return "unfreeze" if look.frozen_s is not None else key.label
        case "panel.zoom":
            return "back" if look.zoomed else key.label
    return key.label
