"""The live screen of a recording: play, pause, speed, seek. No key can send load."""

from typing import ClassVar

from textual.binding import BindingType

from lpxtop import format
from lpxtop.metrics.view import ReplayView
from lpxtop.tui import keymap
from lpxtop.tui.panels import scrub
from lpxtop.tui.screens.live import LiveScreen, bindings

SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 0.0)
"""0 is as fast as it goes."""


class ReplayScreen(LiveScreen):
    """Asks the player; the view shows what came of it."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(keymap.REPLAY)
    MODE = keymap.REPLAY

    @property
    def _replay(self) -> ReplayView:
        return self.view.replay or ReplayView()

    def action_run_or_hold(self) -> None:
        """Play or pause; at the end, play again from the start."""
        replay = self._replay
        if replay.playing:
            self.control.pause()
        else:
            if replay.position_us >= replay.end_us and not replay.following:
                self.control.seek(replay.start_us)
            self.control.play()
        self.frame()

    def _seek(self, t_us: int) -> None:
        replay = self._replay
        self.control.seek(max(replay.start_us, min(replay.end_us, t_us)))
        self.frame()

    def action_seek(self, seconds: int) -> None:
        self._seek(self._replay.position_us + seconds * 1_000_000)

    def action_seek_to(self, end: int) -> None:
        self._seek(self._replay.end_us if end else self._replay.start_us)

    def action_sample(self, samples: int) -> None:
        """One sample on or back, standing still."""
        if self._replay.playing:
            self.control.pause()
        self.control.step(samples)
        self.frame()

    def action_mark_jump(self, direction: int) -> None:
        self._jump("C!m:", direction, "mark")

    def action_level_jump(self, direction: int) -> None:
        self._jump("C", direction, "load change")

    def _jump(self, glyphs: str, direction: int, what: str) -> None:
        found = scrub.next_mark(self._replay, glyphs, direction)
        if found is None:
            self.notify(f"no {what} {'after' if direction > 0 else 'before'} this", timeout=2)
        else:
            self._seek(found)

    def action_speed(self, direction: int) -> None:
        now = self._replay.speed
        place = SPEEDS.index(now) if now in SPEEDS else SPEEDS.index(1.0)
        self.control.set_speed(SPEEDS[max(0, min(len(SPEEDS) - 1, place + direction))])
        self.frame()

    def action_follow(self) -> None:
        self.control.follow(not self._replay.following)
        self.frame()

    def action_goto(self) -> None:
        """Type a place."""
        end = format.clock_time(self._replay.end_us - self._replay.start_us)
        self.entry.ask("go to", "", f"5:30, +30, -1m, 50%, C2, !1; up to {end}", self._go)

    def _go(self, text: str) -> str:
        if not text.strip():
            return ""
        try:
            t_us = scrub.parse(text, self._replay)
        except ValueError as error:
            return str(error)
        self._seek(t_us)
        return ""
