"""The first line: what this is, in which state, of which endpoint, since when, recording and errors. One row.

What must be seen at any width comes first: state, errors, recording; the endpoint's name gets what is left.
"""

from lpxtop import format
from lpxtop.metrics.view import RecordingView, RunView
from lpxtop.tui.look import Look
from lpxtop.tui.panels.states import failures, mode_of, state_word
from lpxtop.tui.rows import Row, Span, crop, line, spread, width_of


def lines(view: RunView, width: int, height: int, look: Look) -> list[Row]:
    """One row of `width` cells."""
    left: Row = line((" lpxtop ", "title"), " ", _word(state_word(view)), *_extra(view, look))
    right = _right(view, width)
    room = width - width_of(left) - width_of(right) - 3
    name = _name(view, room)
    return [spread((*left, *line("  ", (crop(name, room), "value"))) if room >= 6 else left, right, width)][:height]


def _word(word: Span) -> Span:
    return (f" {word[0]} ", word[1])


def _extra(view: RunView, look: Look) -> list[str | Span]:
    """States that come on top: simulated, frozen, a slow link."""
    found: list[str | Span] = []
    if view.simulated:
        found += [" ", (" SIM ", "sim")]
    if look.frozen_s is not None:
        found += [" ", (f" FROZEN {look.frozen_s} s ", "state-paused")]
    if look.link:
        found += [" ", (look.link, "warn")]
    return found


def _name(view: RunView, room: int) -> str:
    """Model and endpoint, as much of them as there is room for; of a recording its file."""
    model = format.clean(view.model)
    short = view.target_url.removeprefix("http://").removeprefix("https://").removesuffix("/v1")
    if view.replay is not None:
        path = format.clean(view.replay.path)
        name = path.rsplit("/", 1)[-1]
        return f"{name}  {model} @ {short}" if room > 50 and model else name
    if room > len(model) + len(view.target_url) + 20 and view.server:
        return f"{model} @ {view.target_url}  {format.clean(view.server)}"
    names = [part for part in (model, short) if part]
    return format.clean(" @ ".join(names)) or format.clean(view.title)


def _right(view: RunView, width: int) -> Row:
    failed = failures(view)
    parts: list[str | Span] = [(format.clock_time(view.t), "value")]
    if view.replay is None:
        parts += ["  ", *_recording(view.recording, width)]
    if mode_of(view) != "watch":
        style = "error" if failed else "label"
        parts += ["  ", (f"err {format.count(failed)}", style)]
    return line(*parts, " ")


def _recording(recording: RecordingView, width: int) -> list[str | Span]:
    if recording.state == "failed":
        return [("X REC STOPPED", "error")]
    if recording.state != "on":
        return [("no rec", "label")]
    name = ""
    if recording.path and width >= 110:
        name = crop(format.clean(recording.path).rsplit("/", 1)[-1], 34) + " "
    return [("■ REC ", "rec"), (f"{name}{format.bytes_iec(recording.bytes)}", "label")]
