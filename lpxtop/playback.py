"""A recording on the live screen: joins the paced player to a state and answers a screen's `RunControl`.

Nothing below knows that it is a replay; the state folds the same events in the same order. Must not send load.
"""

import asyncio

import msgspec

from lpxtop.clock import Clock
from lpxtop.events.records import Keyframe
from lpxtop.metrics.state import RunState
from lpxtop.metrics.view import RecordingView, ReplayView, RunView
from lpxtop.recording.reader import Recording
from lpxtop.recording.replay import Player

TICK_S = 0.05
SCAN_SLICE_S = 0.01


class Playback:
    """Plays `recording` until `stop`. The state never holds exact counts: memory does not grow with the file."""

    def __init__(self, recording: Recording, clock: Clock, *, window_s: float = 30.0, follow: bool = False) -> None:
        self._recording, self._clock, self._window_s = recording, clock, window_s
        self._player = Player(recording)
        self._player.follow = follow
        self._state = self._fresh()
        self._stopped = asyncio.Event()

    def _fresh(self) -> RunState:
        state = RunState(exact=False, window_s=self._window_s)
        state.apply(self._recording.header)
        return state

    async def run(self) -> None:
        """Apply what is due, 20 times a second, until stopped."""
        self._player.play()
        scan = asyncio.create_task(self._scan_marks())
        try:
            while not self._stopped.is_set():
                for event in self._player.advance(self._clock.monotonic_ns()):
                    self._state.apply(event)
                await asyncio.sleep(TICK_S)
        finally:
            scan.cancel()
            self._player.close()

    async def _scan_marks(self) -> None:
        """Marks for the scrub bar, gathered in slices short enough for the screen not to notice."""
        deadline = self._clock.monotonic_ns()
        for _ in self._player.scan_marks():
            if self._clock.monotonic_ns() > deadline:
                await asyncio.sleep(SCAN_SLICE_S)
                deadline = self._clock.monotonic_ns() + int(SCAN_SLICE_S * 1e9)

    # --- RunControl: replay ------------------------------------------------------------------------------------

    def can(self, what: str) -> bool:
        return what == "replay"

    def view(self) -> RunView:
        player = self._player
        replay = ReplayView(
            path=self._recording.name,
            position_us=player.position_us,
            start_us=player.start_us,
            end_us=player.end_us,
            speed=player.speed,
            playing=player.playing,
            following=player.follow,
            wall_ns=self._recording.header.wall_ns,
            marks=tuple(player.marks),
            note=player.note,
        )
        return msgspec.structs.replace(self._state.view(), replay=replay, recording=RecordingView())

    def play(self) -> None:
        self._player.play()

    def pause(self) -> None:
        self._player.pause()

    def set_speed(self, speed: float) -> None:
        self._player.speed = speed

    def seek(self, t_us: int) -> None:
        """Restore the keyframes before `t_us` and fold what lies between."""
        found = self._player.seek(t_us)
        keyframes: list[Keyframe] = found.keyframes
        if keyframes:
            self._state = RunState.restore(keyframes, window_s=self._window_s, header=self._recording.header)
        else:
            self._state = self._fresh()
        for event in found.events:
            self._state.apply(event)

    def step(self, samples: int) -> None:
        """Forward: apply the next samples. Backward: seek."""
        if samples > 0:
            for event in self._player.step(samples):
                self._state.apply(event)
        else:
            self.seek(max(self._player.start_us, self._player.position_us + samples * 250_000))

    def follow(self, on: bool) -> None:
        self._player.follow = on

    def set_window(self, seconds: float) -> None:
        self._window_s = seconds
        self._state.window_s = seconds

    # --- RunControl: what only a live session can do -----------------------------------------------------------

    def start(self) -> None:
        self.play()

    def set_concurrency(self, n: int, by: str = "key") -> None: ...

    def set_rate(self, rate: float, by: str = "key") -> None: ...

    def cancel_requests(self) -> None: ...

    def mark(self, text: str) -> None: ...

    async def stop(self, reason: str = "done") -> None:
        self._stopped.set()

    async def wait(self) -> None:
        await self._stopped.wait()
