"""A live session: joins the sources, applies each event to the state, hands it to the sinks. Owns every task and the
order of shutting down. Must not draw, format or know how a source gets its events.

The order in which events pass through here is the session's one order: applied, then written, in it.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from lpxtop.clock import Clock, session_us
from lpxtop.events import commands
from lpxtop.events.records import (
    KEYFRAME_US,
    AnyEvent,
    Control,
    End,
    Event,
    Header,
    Keyframe,
    Mark,
    Phase,
    Source,
)
from lpxtop.events.stream import EventSink, EventSource, merge
from lpxtop.metrics.state import RunState
from lpxtop.metrics.summary import summary
from lpxtop.metrics.view import RecordingView, RunView
from lpxtop.plan import Plan
from lpxtop.workers import Fleet

STOP_GRACE_S = 3.0
"""How long after its drain a load process may take to say goodbye."""


class Session:
    """One run against one endpoint, or a watch without load. Implements `RunControl` for a screen."""

    def __init__(
        self,
        *,
        plan: Plan,
        header: Header,
        state: RunState,
        clock: Clock,
        origin_ns: int,
        fleet: Fleet | None = None,
        probes: Sequence[EventSource] = (),
        open_sinks: Sequence[Callable[[Header], Awaitable[EventSink]]] = (),
        recording: Callable[[], RecordingView] = RecordingView,
        autostart: bool = False,
    ) -> None:
        self.plan = plan
        self.state = state
        self.reason = "done"
        self.summary: dict[str, Any] | None = None
        self.problem: str | None = None
        self._header, self._clock, self._origin_ns = header, clock, origin_ns
        self._fleet, self._probes = fleet, list(probes)
        self._open_sinks, self._sinks = open_sinks, list[EventSink]()
        self._recording = recording
        self._autostart = autostart
        self._level = 0
        self._load_changed = False
        self._seq = 0
        self._concurrency, self._rate = plan.load.concurrency, plan.load.rate
        self._paused = not autostart
        self._begun = asyncio.Event()
        self._running_load = len(fleet.workers) if fleet else 0
        self._next_keyframe_us = KEYFRAME_US
        self._stopping: asyncio.Event = asyncio.Event()
        self._stop_drain_s: float | None = None
        self._ended: asyncio.Event = asyncio.Event()

    # --- running -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Run until load is done, or `stop`. Always closes what it opened and computes `summary`.

        A sink that cannot be opened (it is handed the header first) ends the session before any load is sent.
        """
        for open_sink in self._open_sinks:
            self._sinks.append(await open_sink(self._header))
        self.state.apply(self._header)
        self._emit(Phase(t=self.now_us(), name="ready", level=0, concurrency=self._concurrency, rate=self._rate))
        stopper = asyncio.create_task(self._stop_when_told())
        timer = asyncio.create_task(self._stop_after_duration() if self._fleet is None else self._follow_profile())
        try:
            if self._fleet:
                await self._fleet.start()
                if self._autostart:
                    self.start()
            await self._pump()
        finally:
            timer.cancel()
            stopper.cancel()
            await self._shut_down()

    async def _pump(self) -> None:
        sources = [*(self._fleet.workers if self._fleet else ()), *self._probes]
        async with contextlib.aclosing(merge(sources)) as events:
            async for event in events:
                self._take(self._of_this_session(event))
                if self._is_over(event):
                    return

    def _of_this_session(self, event: AnyEvent) -> AnyEvent:
        """A load process knows when its warm-up ends, not which level the session is at."""
        if isinstance(event, Phase):
            return msgspec.structs.replace(event, level=self._level, concurrency=self._concurrency, rate=self._rate)
        return event

    def _is_over(self, event: AnyEvent) -> bool:
        """Whether the last load process is gone. One that ends first takes the others along: a process with no share
        of the load never reaches its own deadline, and half a fleet is not the load that was asked for."""
        if isinstance(event, Source) and event.kind == "load" and event.state in ("left", "failed"):
            self._running_load -= 1
            if event.state == "failed":
                self.reason, self.problem = "failed", event.text
            if self._fleet is not None and (event.state == "failed" or self.plan.stop.duration_s is not None):
                self._fleet.send(commands.Stop(drain_s=self.plan.stop.drain_s))
        return self._fleet is not None and self._running_load <= 0

    async def _stop_after_duration(self) -> None:
        """A watch ends after the plan's duration; a load ends itself, since its duration is the measured one."""
        if self.plan.stop.duration_s is not None:
            await asyncio.sleep(self.plan.stop.duration_s)
            await self.stop()

    async def _follow_profile(self) -> None:
        """Move the load step by step, once it has been started; a person may move it in between."""
        steps = self.plan.load.profile
        if not steps:
            return
        await self._begun.wait()
        for step in steps:
            if step.rate is not None:
                self.set_rate(step.rate, by="profile")
            elif step.concurrency is not None:
                self.set_concurrency(step.concurrency, by="profile")
            await asyncio.sleep(step.duration_s)
        await self.stop()

    async def _stop_when_told(self) -> None:
        await self._stopping.wait()
        if self._fleet is None:
            await self._close_probes()
            return
        drain_s = self.plan.stop.drain_s if self._stop_drain_s is None else self._stop_drain_s
        self._fleet.send(commands.Stop(drain_s=drain_s))
        await asyncio.sleep(drain_s + STOP_GRACE_S)
        await self._fleet.close()

    async def _shut_down(self) -> None:
        """Load first, then probes, then the recording: nothing measured is lost, nothing is left running."""
        if self._fleet:
            await self._fleet.close()
        await self._close_probes()
        end = End(t=self.now_us(), seq=self._next_seq(), reason=self.reason)
        self.state.apply(end)
        self.summary = summary(self.state)
        full = msgspec.structs.replace(end, summary=self.summary, verdicts=self.summary.get("verdicts", []))
        self._to_sinks(full)
        for sink in self._sinks:
            await sink.close()
        self._ended.set()

    async def _close_probes(self) -> None:
        await asyncio.gather(*(probe.close() for probe in self._probes), return_exceptions=True)

    # --- events ------------------------------------------------------------------------------------------------

    def now_us(self) -> int:
        return session_us(self._clock.monotonic_ns(), self._origin_ns)

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq - 1

    def _emit(self, event: Event) -> None:
        self._take(msgspec.structs.replace(event, seq=self._next_seq()))

    def _take(self, event: AnyEvent) -> None:
        self.state.apply(event)
        self._to_sinks(event)
        if event.t >= self._next_keyframe_us:
            self._write_keyframe(event.t)

    def _write_keyframe(self, t: int) -> None:
        """Keyframes go to the recording only: they are the state, not news to it."""
        self._next_keyframe_us = t - t % KEYFRAME_US + KEYFRAME_US
        if self._sinks:
            self._to_sinks(Keyframe(t=t, seq=self._next_seq(), state=self.state.snapshot()))

    def _to_sinks(self, event: AnyEvent) -> None:
        for sink in self._sinks:
            sink.event(event)

    # --- RunControl --------------------------------------------------------------------------------------------

    def can(self, what: str) -> bool:
        return {"load": self._fleet is not None, "mark": True}.get(what, False)

    def view(self) -> RunView:
        return msgspec.structs.replace(self.state.view(), recording=self._recording())

    def start(self) -> None:
        """Send load, for the first time or again after a pause."""
        if self._fleet is None or not (self._paused or not self._begun.is_set()):
            return
        self._fleet.send(commands.Resume())
        if self._begun.is_set():
            self._emit(Control(t=self.now_us(), what="resume"))
        first = not self._begun.is_set() and (self.plan.warmup.requests or self.plan.warmup.duration_s)
        self._begun.set()
        self._paused = False
        self._emit_phase("warmup" if first else "measure")

    def pause(self) -> None:
        if self._fleet is None or self._paused:
            return
        self._paused = True
        self._fleet.send(commands.Pause())
        self._emit(Control(t=self.now_us(), what="pause"))
        self._emit_phase("paused")

    def set_concurrency(self, n: int, by: str = "key") -> None:
        n = max(1, min(n, self.plan.load.max_concurrency))
        if self._fleet is None or n == self._concurrency:
            return
        self._fleet.set_concurrency(n, self.plan.load.ramp_s)
        self._emit(Control(t=self.now_us(), what="concurrency", before=self._concurrency, after=n, by=by))
        self._concurrency = n
        self._new_level()

    def set_rate(self, rate: float, by: str = "key") -> None:
        if self._fleet is None or rate <= 0 or rate == self._rate:
            return
        self._fleet.set_rate(rate)
        self._emit(Control(t=self.now_us(), what="rate", before=self._rate, after=rate, by=by))
        self._rate = rate
        self._new_level()

    def _new_level(self) -> None:
        self._level += 1
        self._emit_phase(
            "paused" if self._paused and self._begun.is_set() else "measure" if self._begun.is_set() else "ready"
        )

    def _emit_phase(self, name: str) -> None:
        self._emit(Phase(t=self.now_us(), name=name, level=self._level, concurrency=self._concurrency, rate=self._rate))

    def cancel_requests(self) -> None:
        if self._fleet is not None:
            self._fleet.send(commands.Cancel())
            self._emit(Control(t=self.now_us(), what="cancel"))

    def mark(self, text: str) -> None:
        self._emit(Mark(t=self.now_us(), text=text))

    def set_window(self, seconds: float) -> None:
        self.state.window_s = seconds

    def play(self) -> None: ...

    def set_speed(self, speed: float) -> None: ...

    def seek(self, t_us: int) -> None: ...

    def step(self, samples: int) -> None: ...

    def follow(self, on: bool) -> None: ...

    async def stop(self, reason: str = "done", drain_s: float | None = None) -> None:
        """Ask for the end: no new requests, a drain of `drain_s` (the plan's when None), then everything is closed."""
        if not self._stopping.is_set():
            self.reason = reason if self.reason == "done" else self.reason
            self._stop_drain_s = drain_s
            self._emit(Control(t=self.now_us(), what="stop", by=reason))
            if self._fleet is not None and self._begun.is_set():
                self._emit_phase("drain")
            self._stopping.set()
        elif self._fleet is not None and drain_s is not None:
            self._fleet.send(commands.Stop(drain_s=drain_s))

    async def wait(self) -> None:
        await self._ended.wait()
