"""Recordings from the command line: choose one, replay it on the screen, fold it into a summary. Must not send load."""

import sys
from pathlib import Path
from typing import Any

import click

from lpxtop import __version__, format
from lpxtop.clock import SystemClock
from lpxtop.config import Environment
from lpxtop.errors import RecordingError, UsageError
from lpxtop.launch import Screen
from lpxtop.metrics.state import RunState
from lpxtop.metrics.summary import summary
from lpxtop.playback import Playback
from lpxtop.recording import catalogue
from lpxtop.recording.reader import Recording


def fold(path: str) -> dict[str, Any]:
    """The summary of a recording, by the same fold as the live run's. Notes about damage go to stderr."""
    recording = Recording.open(path)
    state = RunState(exact=True)
    for event in recording:
        state.apply(event)
    for problem in recording.problems:
        click.echo(f"lpxtop: {path}: {problem}", err=True)
    return summary(state)


def choose(environment: Environment) -> str:
    """Ask which recording, newest first. Raises UsageError with the list when nobody can answer."""
    entries = catalogue.recordings(environment.state_directory() / "recordings")
    if not entries:
        raise RecordingError("there are no recordings yet", "make one: lpxtop demo")
    for number, entry in enumerate(entries, 1):
        click.echo(
            f"{number:3d}  {format.clean(entry.title, 60):60s}  {format.bytes_iec(entry.bytes):>7s}  {entry.path}"
        )
    if not sys.stdin.isatty():
        raise UsageError("which recording?", "lpxtop replay FILE, with a path from the list above")
    click.echo("number: ", nl=False)
    answer = sys.stdin.readline().strip()
    if not answer.isdigit() or not 1 <= int(answer) <= len(entries):
        raise UsageError(f"{format.clean(answer, 20)!r} is not a number of the list")
    return str(entries[int(answer) - 1].path)


def replay(path: str, screen: Screen, environment: Environment, *, follow: bool) -> int:
    """The live screen, from a recording. `-` reads a stream from stdin; the keys then come from the terminal."""
    from lpxtop.tui.app import run_app

    recording = Recording.open(path)
    playback = Playback(recording, SystemClock(), follow=follow or path == "-")
    code = run_app(
        playback,
        title=f"lpxtop {__version__}  {Path(path).name}",
        theme=screen.theme,
        color=screen.color,
        glyphs=screen.glyphs,
        fps=screen.fps,
        mouse=screen.mouse,
        user_themes=environment.config_directory() / "themes",
        session=playback.run,
    )
    if path != "-":
        click.echo(f"the summary of all of it: lpxtop report {path}", err=True)
    return code
