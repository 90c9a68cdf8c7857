"""The Textual application: one timer that shows one view per frame, and an end that closes the session first.

Frames are left out while the terminal is behind, and come once a second when it stays behind. Must not import what
measures: it is handed a `RunControl`.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from textual import events
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.driver import Driver
from textual.screen import Screen

from lpxtop import figures
from lpxtop.errors import EXIT_INTERRUPTED, EXIT_OK
from lpxtop.events.stream import RunControl
from lpxtop.tui import keymap, theme
from lpxtop.tui.look import Look
from lpxtop.tui.paint import Paint
from lpxtop.tui.panels.states import RUNNING, running
from lpxtop.tui.screens.help import HelpScreen
from lpxtop.tui.screens.live import LiveScreen
from lpxtop.tui.screens.load import LoadScreen, WatchScreen
from lpxtop.tui.screens.replay import ReplayScreen

BEHIND = 2
"""A terminal with more writes waiting than this is behind: the frame is left out."""
SLOW_AFTER, SLOW_S = 4, 10.0
INTERRUPT_S = 2.0
SIGNAL_DRAIN_S, CUT_S = 2.0, 5.0

Session = Callable[[], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the screen looks and starts; `color` and `glyphs` are decided, not `auto` (color may still be)."""

    title: str = "lpxtop"
    theme: str | None = None
    color: str = "auto"
    glyphs: str = "braille"
    fps: int = 4
    user_themes: Path | None = None
    start: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)


class LpxtopApp(App[None], inherit_bindings=False):
    """Runs a `LiveScreen` on a control; `exit_code` and `failure` say how it ended."""

    CSS = "SearchIcon { display: none; }"
    ENABLE_COMMAND_PALETTE = True
    COMMAND_PALETTE_BINDING = "ctrl+p"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "interrupt", "stop the load, then quit", show=False, priority=True),
        Binding("ctrl+q", "quit_run", "quit", show=False, priority=True),
    ]

    def __init__(self, control: RunControl, settings: Settings, session: Session | None = None) -> None:
        mono = settings.color == "mono"
        super().__init__(ansi_color=True if mono else None)
        self.control, self.settings = control, settings
        self.exit_code = EXIT_OK
        self.failure: BaseException | None = None
        self._session = session
        self._session_task: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._interrupted_at = float("-inf")
        self._left_out, self._slow_until, self._next_slow_frame = 0, 0.0, 0.0
        self.animation_level = "none"
        self._set_colors(settings.color)
        self._themes, self._theme_problems = theme.load_all(theme.directories(settings.user_themes))
        self._chosen = self._choose_theme(theme.MONO if mono else settings.theme)
        for found in self._themes.values():
            self.register_theme(found.theme)
        self.theme = self._themes[self._chosen].theme.name
        self.look = Look(glyphs=settings.glyphs, figures_ready="plotext" in sys.modules)

    def _set_colors(self, choice: str) -> None:
        """Fewer colours than the terminal says it has, or none at all."""
        if choice == "mono":
            from textual.filter import NoColor

            if not any(isinstance(found, NoColor) for found in self._filters):
                self._filters.append(NoColor())
        elif choice in ("truecolor", "256", "16"):
            from rich.console import COLOR_SYSTEMS

            self.console._color_system = COLOR_SYSTEMS["standard" if choice == "16" else choice]

    def _choose_theme(self, wanted: str | None) -> str:
        if wanted is None or wanted in self._themes:
            return wanted or theme.DEFAULT
        self._theme_problems.append(f"there is no theme {wanted!r}; there are {', '.join(sorted(self._themes))}")
        return theme.DEFAULT

    def get_driver_class(self) -> type[Driver]:
        if sys.platform == "win32":
            return super().get_driver_class()
        from lpxtop.tui.driver import TerminalDriver

        return TerminalDriver

    # --- life --------------------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        self.title = self.settings.title
        paint = Paint(self._themes[self._chosen].styles, self.settings.glyphs)
        self.main = self._screen_class()(self.control, self.look, paint)
        self.push_screen(self.main)
        self.set_interval(1 / self.settings.fps, self._frame)
        self.call_after_refresh(self._begin)

    def _screen_class(self) -> type[LiveScreen]:
        if self.control.can("replay"):
            return ReplayScreen
        return LoadScreen if self.control.can("load") else WatchScreen

    def _begin(self) -> None:
        """After the first paint: the session, what takes long to import, and what was wrong with the set-up."""
        if self._session is not None:
            self._session_task = asyncio.ensure_future(self._run_session())
        if self.settings.start:
            self.control.start()
        if not self.look.figures_ready:
            self.run_worker(self._load_figures(), exit_on_error=False)
        clashes = keymap.problems(self.settings.keys)
        if self.settings.keys and not clashes:
            self.set_keymap(dict(self.settings.keys))
        for problem in (*self._theme_problems, *clashes):
            self.notify(problem, severity="warning", timeout=10, markup=False)

    async def _load_figures(self) -> None:
        await asyncio.to_thread(figures.load)
        self.look.figures_ready = True

    async def _run_session(self) -> None:
        assert self._session is not None
        try:
            await self._session()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.failure = error
            self.exit()

    def _frame(self) -> None:
        """One view, unless the terminal is behind or another screen is up."""
        if not self._main_is_up() or not self._terminal_keeps_up():
            return
        with self.batch_update():
            if getattr(self._driver, "lost", False):
                self._driver.lost = False  # type: ignore[union-attr]
                self.main.repaint()
            self.main.frame()

    def _main_is_up(self) -> bool:
        """Whether no help or palette lies over it; and not while the application goes down, without any screen."""
        return self.is_running and bool(self._screen_stack) and self.screen is self.main

    def _terminal_keeps_up(self) -> bool:
        now = asyncio.get_running_loop().time()
        backlog = getattr(self._driver, "backlog", None)
        if backlog is not None and backlog() > BEHIND:
            self._left_out += 1
            if self._left_out >= SLOW_AFTER:
                self._slow_until = now + SLOW_S
            return False
        self._left_out = 0
        slow = now < self._slow_until
        self.look.link = "slow link 1 Hz" if slow else ""
        if slow and now < self._next_slow_frame:
            return False
        self._next_slow_frame = now + 1.0
        return True

    # --- the end -----------------------------------------------------------------------------------------------

    def action_quit_run(self) -> None:
        """Quit; while load runs, ask. While the run closes: do not wait for what is in flight."""
        if self._ending is not None:
            self._hurry.set()
        elif self._main_is_up() and self.control.can("load") and running(self.main.view):
            flying = self.main.view.load.in_flight
            text = f"{flying} requests in flight: stop the load and quit? y (or q) quits, any other key goes on"
            self.main.entry.question(text, self.close_run, also="q")
        else:
            self.close_run()

    def action_interrupt(self) -> None:
        """The first ctrl+c stops the load, a second within two seconds quits."""
        now = asyncio.get_running_loop().time()
        if self._ending is not None:
            self._hurry.set()
        elif now - self._interrupted_at < INTERRUPT_S or not self._load_runs():
            self.close_run("interrupted", EXIT_INTERRUPTED, drain_s=SIGNAL_DRAIN_S)
        else:
            self._interrupted_at = now
            self.control.pause()
            self.notify("load stopped; ctrl+c again quits, space goes on", timeout=INTERRUPT_S + 1)

    def _load_runs(self) -> bool:
        return self.control.can("load") and self.control.view().phase in RUNNING

    def on_signal(self, number: int) -> None:
        """Close the session, briefly, and exit with 128 + the signal's number. A second signal does not wait."""
        if self._ending is not None:
            self._hurry.set()
        self.close_run("interrupted", 128 + number, drain_s=SIGNAL_DRAIN_S)

    def on_hang_up(self) -> None:
        """The terminal is gone."""
        self.on_signal(1)

    def close_run(self, reason: str = "done", code: int = EXIT_OK, drain_s: float | None = None) -> None:
        """Stop the session, wait until it has closed its recording, then give the terminal back."""
        if self._ending is None:
            self.exit_code = code
            self._ending = asyncio.ensure_future(self._close(reason, drain_s))

    async def _close(self, reason: str, drain_s: float | None) -> None:
        ticker = self.set_interval(0.25, self._tell_closing)
        self._tell_closing()
        try:
            await close_session(self.control, self._session_task, reason, self._hurry, drain_s)
        finally:
            ticker.stop()
            self.exit()

    async def finish(self) -> None:
        """After the screen is down: whatever way it went, the session is closed and has been waited for."""
        if self._ending is not None:
            await self._ending
        elif self._session_task is not None and not self._session_task.done():
            self._hurry.set()
            await close_session(self.control, self._session_task, "interrupted", self._hurry)

    def _tell_closing(self) -> None:
        flying = self.control.view().load.in_flight
        self.look.closing = f"stopping: {flying} requests are still in flight; q cuts them" if flying else "stopping"
        if self._main_is_up():
            self.main.frame()

    def _handle_exception(self, error: Exception) -> None:
        """End without printing: Textual's own report shows local variables, and with them keys and prompts."""
        self._return_code = 1
        self.failure = self.failure or error
        if self._exception is None:
            self._exception = error
            self._exception_event.set()
        self._close_messages_no_wait()

    def on_key(self, event: events.Key) -> None:
        """Keys belong to the entry while it is open."""
        if self._main_is_up() and self.main.entry.display:
            event.prevent_default()
            self.main.entry.key(event)

    # --- view --------------------------------------------------------------------------------------------------

    def action_help(self) -> None:
        self.push_screen(HelpScreen(self.main.MODE, self.main.paint))

    def action_theme(self) -> None:
        """The next theme; without colours there is only one."""
        if self.settings.color == "mono":
            return
        names = [name for name in self._themes if name != theme.MONO]
        place = names.index(self._chosen) if self._chosen in names else -1
        self._chosen = names[(place + 1) % len(names)]
        chosen = self._themes[self._chosen]
        self.theme = chosen.theme.name
        self.main.repaint(Paint(chosen.styles, self.settings.glyphs))
        self.notify(f"theme {self._chosen}", timeout=2, markup=False)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The palette lists every key of the screen."""
        for key in keymap.of_mode(self.main.MODE):
            if key.id != "palette":
                yield SystemCommand(f"{key.label}  ({keymap.all_shown(key)})", key.help, self._runs(key.action))

    def _runs(self, action: str) -> Callable[[], None]:
        def run() -> None:
            self.call_later(self.main.run_action, action)

        return run


async def close_session(
    control: RunControl,
    task: asyncio.Task[None] | None,
    reason: str,
    hurry: asyncio.Event,
    drain_s: float | None = None,
) -> None:
    """Ask a session to stop and wait for it: as long as it drains, or `drain_s`, or until `hurry`; then what is in
    flight is cancelled, and after `CUT_S` more the task itself."""
    await control.stop(reason)
    if task is None:
        return
    hurried = asyncio.ensure_future(hurry.wait())
    await asyncio.wait({task, hurried}, timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not task.done():
        control.cancel_requests()
        await asyncio.wait({task}, timeout=CUT_S)
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CUT_S)
