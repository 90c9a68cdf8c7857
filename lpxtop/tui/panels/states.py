"""The words for what the screen is in: one place, so that header, slider and footer never disagree. No drawing."""

from typing import Literal

from lpxtop import format
from lpxtop.metrics.view import RunView
from lpxtop.tui.rows import Span

Mode = Literal["live", "watch", "replay"]

RUNNING = frozenset({"warmup", "measure"})
_PHASES: dict[str, Span] = {
    "ready": ("○ READY", "state-ready"),
    "warmup": ("● WARM-UP", "state-live"),
    "measure": ("● LIVE", "state-live"),
    "paused": ("○ PAUSED", "state-paused"),
    "drain": ("○ DRAINING", "state-paused"),
    "ended": ("■ ENDED", "state-paused"),
}


def mode_of(view: RunView) -> Mode:
    """Which of the three screens this is."""
    if view.replay is not None:
        return "replay"
    return "watch" if view.kind == "watch" else "live"


def ended(view: RunView) -> bool:
    """Whether nothing more will come."""
    return view.ended is not None or view.phase == "ended"


def running(view: RunView) -> bool:
    """Whether requests are being sent or are still in flight."""
    return not ended(view) and (view.phase in RUNNING or view.load.in_flight > 0)


def state_word(view: RunView) -> Span:
    """The header's word, with a glyph."""
    if view.replay is not None:
        return _replay_word(view)
    if ended(view):
        return _PHASES["ended"]
    if mode_of(view) == "watch":
        return ("● WATCH", "state-live")
    return _PHASES.get(view.phase, (view.phase.upper(), "state-ready"))


def _replay_word(view: RunView) -> Span:
    assert view.replay is not None
    if not view.replay.playing:
        return ("■ REPLAY paused", "state-paused")
    return (f"▶ REPLAY {speed_word(view.replay.speed)}", "state-replay")


def speed_word(speed: float) -> str:
    """x1, x0.25, max."""
    return f"x{speed:g}" if speed > 0 else "max"


def failures(view: RunView) -> int:
    """Requests that failed since the start."""
    return sum(n for outcome, n in view.load.done.items() if outcome not in ("ok", "cut", "cancelled"))


def load_word(concurrency: int | None, rate: float | None) -> str:
    """A level's load in a word: 16, or 5.0 req/s."""
    return format.with_unit(rate, "req/s") if rate is not None and concurrency is None else format.count(concurrency)
