"""The door to the screen: checks the terminal before anything heavy is loaded, runs the application, gives back the
terminal whatever happened. Must not print.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lpxtop.events.stream import RunControl
from lpxtop.tui import guard

if TYPE_CHECKING:
    from lpxtop.tui.application import LpxtopApp


def run_app(
    control: RunControl,
    *,
    title: str,
    theme: str | None,
    color: str,
    glyphs: str,
    fps: int = 4,
    mouse: bool = False,
    user_themes: Path | None = None,
    start: bool = False,
    session: Callable[[], Awaitable[None]] | None = None,
    keys: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> int:
    """Show the screen until it is quit; 0, 130 after ctrl+c, or 128 + the number of a signal.

    `session` runs in the screen's event loop and is closed before the terminal is given back; what it raises is
    raised here. `color` is auto, truecolor, 256, 16 or mono, `glyphs` auto, braille, block or ascii; `keys` rebinds
    keys by id; fd 2 goes to `log` meanwhile. Raises UsageError where no screen can be.
    """
    guard.check_terminal()
    from lpxtop.tui.application import LpxtopApp, Settings

    settings = Settings(
        title=title, theme=theme, color=guard.color_of(color), glyphs=guard.glyphs_of(glyphs), fps=max(1, min(10, fps)),
        user_themes=user_themes, start=start, keys=dict(keys or {}),
    )  # fmt: skip

    async def main() -> "LpxtopApp":
        app = LpxtopApp(control, settings, session)
        with guard.on_signals(asyncio.get_running_loop(), app.on_signal):
            await app.run_async(mouse=mouse)
            await app.finish()
        return app

    with guard.own_terminal(log):
        app = asyncio.run(main())
    if app.failure is not None:
        raise app.failure
    return app.exit_code
