"""What is shown when the terminal is too small for panels: the size it needs, the state, and that keys still work."""

from lpxtop import format
from lpxtop.metrics.view import RunView
from lpxtop.tui.look import Look
from lpxtop.tui.panels.states import failures, mode_of, state_word
from lpxtop.tui.panels.tiles import per_token
from lpxtop.tui.rows import Row, line

LEAST = (60, 16)


def lines(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """As many of the lines as fit, the most important first."""
    _, gaps = per_token(view)
    target = format.count(view.load.target if look.pending is None else round(look.pending))
    rows = [
        line((state_word(view)[0], state_word(view)[1]), f" {format.clock_time(view.t)}"),
        line(("conc ", "label"), (f"{target} ({format.count(view.load.in_flight)} in flight)", "value")),
        line(("err ", "label"), (format.count(failures(view)), "error" if failures(view) else "value"),
             ("  REC " if view.recording.state == "on" else "  no rec", "label")),
        line(("TTFT p50 ", "label"), (format.latency(view.window.ttft.p50), "value")),
        line(("ITL p50 ", "label"), (format.latency(gaps.p50), "value")),
        line((f"{width}x{height}: need {LEAST[0]}x{LEAST[1]}", "warn")),
        line(("space - + q work", "label")),
    ]  # fmt: skip
    if mode_of(view) != "live":
        del rows[1]
    return rows[:height]
