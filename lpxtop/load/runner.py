"""Sends what the schedule says is due, keeps what is in flight, and decides when the load ends.

Starts are paced, so that a burst does not stall the loop that reads the answers. Must not stamp or parse answers
(the client does), nor build events other than its own marks and phases (frames does).
"""

import asyncio
import logging
import time
from collections.abc import Callable

from lpxtop.events.commands import Start
from lpxtop.events.records import FRAME_US, Event, Finished, Mark, Phase
from lpxtop.load.client import Client, RequestSpec, Stream
from lpxtop.load.frames import Flight, Frames
from lpxtop.load.prompts import Prompts, session_mark
from lpxtop.load.schedule import ClosedLoop, OpenLoop, Schedule, Turn, share

STARTS_PER_TURN = 16
"""512 sends at once stall the loop for 110 ms; 16 at a time let it read between."""
PROBE_S = 0.01
TIMER_US = 1000
"""epoll rounds a timer up to a whole ms: lateness within it is not the loop's."""
_FATAL = frozenset({401, 402, 403, 404, 405})
_FATAL_IF_SAME = frozenset({400, 422})
"""Refusals that will not turn into answers; the latter only when the server gives the same reason each time."""
_FATAL_IN_A_ROW = 5
_NOT_FAILED = frozenset({"ok", "not_streamed", "cut", "cancelled"})
_log = logging.getLogger("lpxtop.load")


def make_schedule(start: Start) -> ClosedLoop | OpenLoop:
    """The schedule of this worker's share."""
    load = start.plan.load
    if load.mode == "closed":
        mine = share(load.concurrency, start.worker, start.workers)
        return ClosedLoop(mine, load.ramp_s, worker=start.worker, workers=start.workers)
    return OpenLoop(
        load.rate or 0.0, load.mode, seed=start.plan.prompts.seed, worker=start.worker, workers=start.workers
    )


class Runner:
    """One worker's load, from `run` until it is over. Commands may come at any time while it runs."""

    def __init__(
        self,
        *,
        start: Start,
        client: Client,
        prompts: Prompts,
        emit: Callable[[Event], None],
        backlog: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._start, self._plan = start, start.plan
        self._client, self._prompts = client, prompts
        self.frames = Frames(client=client, src=start.src, origin_ns=start.origin_ns, emit=emit, backlog=backlog)
        self._schedule: Schedule = make_schedule(start)
        self._loop = asyncio.get_running_loop()
        self._requests_left = self._my(self._plan.stop.requests)
        self._warmup_left = self._my(self._plan.warmup.requests) or 0
        self._first_due_ns: int | None = None
        self._measure_from_ns: int | None = None
        self._next_id = 0
        self._request_id = f"lpx-{session_mark(start.origin_ns)}-{start.src}-"
        self._stopping = False
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pump_timer: asyncio.Handle | None = None
        self._deadline: asyncio.Handle | None = None
        self._deadline_ns: int | None = None
        self._cut_timer: asyncio.TimerHandle | None = None
        self._fatal: tuple[int, str | None] | None = None
        self._fatal_count = 0

    def _my(self, total: int | None) -> int | None:
        return None if total is None else share(total, self._start.worker, self._start.workers)

    # --- running -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Emit a frame every 250 ms until the load is over and everything sent has ended."""
        probe = asyncio.create_task(self._probe())
        period = FRAME_US / 1e6
        next_frame = self._loop.time() + period
        try:
            while not self._over.is_set():
                try:
                    async with asyncio.timeout_at(next_frame):
                        await self._over.wait()
                except TimeoutError:
                    self._frame()
                    next_frame += period * (1 + (self._loop.time() - next_frame) // period)
        finally:
            probe.cancel()
            for timer in (self._pump_timer, self._deadline, self._cut_timer):
                if timer is not None:
                    timer.cancel()
            self._frame()

    def _frame(self) -> None:
        schedule = self._schedule
        self.frames.frame(
            waiting=0 if self._stopping else schedule.waiting(time.monotonic_ns()),
            target=schedule.target if isinstance(schedule, ClosedLoop) else None,
            rate=schedule.rate / self._start.workers if isinstance(schedule, OpenLoop) else None,
        )

    async def _probe(self) -> None:
        """How late the loop is: what a timer comes too late, a read may too."""
        while True:
            due = self._loop.time() + PROBE_S
            await asyncio.sleep(PROBE_S)
            self.frames.loop_lag(max(0.0, (self._loop.time() - due) * 1e6 - TIMER_US))

    # --- commands ----------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Send load, for the first time or again."""
        self._schedule.resume(time.monotonic_ns())
        if self._requests_left == 0:
            self._stop_sending()
        self._kick()

    def pause(self) -> None:
        """Send nothing new; what is in flight goes on."""
        self._schedule.pause(time.monotonic_ns())

    def set_concurrency(self, n: int, ramp_s: float = 0.0) -> None:
        """Closed loop: keep `n` in flight from now on. Fewer: what is in flight ends by itself."""
        if isinstance(self._schedule, ClosedLoop):
            self._schedule.set_target(n, time.monotonic_ns(), ramp_s)
            self._kick()

    def set_rate(self, rate: float) -> None:
        """Open loop: this worker's requests per second from now on."""
        if isinstance(self._schedule, OpenLoop):
            self._schedule.set_rate(rate * self._start.workers, time.monotonic_ns())
            self._kick()

    def cancel(self) -> None:
        """End what is in flight now; the load goes on."""
        for stream in self.frames.streams():
            stream.cut("cancelled")

    def stop(self, drain_s: float) -> None:
        """Send nothing new; cut what is still in flight after `drain_s`. A second call can only shorten that."""
        when = self._loop.time() + drain_s
        if self._cut_timer is None or when < self._cut_timer.when():
            if self._cut_timer is not None:
                self._cut_timer.cancel()
            self._cut_timer = self._loop.call_at(when, self._cut)
        self._stop_sending()

    # --- sending -----------------------------------------------------------------------------------------------

    def _kick(self) -> None:
        """Something may be due earlier than the timer thinks."""
        if self._pump_timer is not None:
            self._pump_timer.cancel()
        self._pump_timer = self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send what is due, a few at a time; come back for the rest when the loop has read what is there."""
        self._pump_timer = None
        for _ in range(STARTS_PER_TURN):
            due_ns = self._next_due_ns()
            if due_ns is None:
                return
            if due_ns > time.monotonic_ns():
                self._pump_timer = self._loop.call_at(due_ns / 1e9, self._pump)
                return
            self._send(self._schedule.take())
        self._pump_timer = self._loop.call_soon(self._pump)

    def _next_due_ns(self) -> int | None:
        """When the next request is to be sent; None when none is, as what is due at the deadline or later is not."""
        due_ns = None if self._stopping else self._schedule.next_due_ns()
        late = due_ns is not None and self._deadline_ns is not None and due_ns >= self._deadline_ns
        return None if late else due_ns

    def _send(self, turn: Turn) -> None:
        warmup = self._is_warmup(turn.due_ns)
        if not warmup:
            self._measured(turn.due_ns)
        body = self._prompts.take()
        id = self._next_id
        self._next_id += 1
        spec = RequestSpec(
            id=id,
            slot=self.frames.slots.take(),
            due_ns=turn.due_ns,
            body=body.json,
            warmup=warmup,
            prompt_tokens=body.prompt_tokens,
            max_tokens=self._plan.sampling.max_tokens,
            request_id=f"{self._request_id}{id}",
        )
        flight = Flight(turn, Stream(spec, self._client))
        self.frames.began(flight)
        task = self._loop.create_task(self._one(flight))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _one(self, flight: Flight) -> None:
        try:
            finished = await self._client.send(flight.stream)
        except Exception as error:
            # A mistake of ours. The request must not vanish, nor hold its place for ever; its text may hold anything.
            _log.error("request %s: %s", flight.stream.spec.request_id, type(error).__name__)
            finished = self.frames.broken(flight, type(error).__name__)
        self._ended(flight, finished)

    def _ended(self, flight: Flight, finished: Finished) -> None:
        self.frames.ended(flight, finished)
        self._schedule.ended(flight.turn, self._end_ns(finished), finished.outcome in _NOT_FAILED)
        self._watch_fatal(finished)
        if self._stopping:
            self._end_if_idle()
        elif isinstance(self._schedule, ClosedLoop):
            self._kick()

    def _end_ns(self, finished: Finished) -> int:
        """When the answer ended, as stamped: a user is due then, not when this task got its turn."""
        now_ns = time.monotonic_ns()
        if finished.sent is None or finished.end_us is None:
            return now_ns
        return min(now_ns, self._start.origin_ns + (finished.sent + finished.end_us) * 1000)

    # --- phases and the end ------------------------------------------------------------------------------------

    def _is_warmup(self, due_ns: int) -> bool:
        if self._first_due_ns is None:
            self._first_due_ns = due_ns
        if self._warmup_left > 0:
            self._warmup_left -= 1
            return True
        seconds = self._plan.warmup.duration_s
        return seconds is not None and due_ns < self._first_due_ns + round(seconds * 1e9)

    def _measured(self, due_ns: int) -> None:
        """Count a measured request; the first one begins the measurement, the last one ends the sending."""
        if self._measure_from_ns is None:
            self._measure_from_ns = due_ns
            if self._plan.warmup.requests or self._plan.warmup.duration_s:
                self._phase("measure", due_ns)
            if self._plan.stop.duration_s is not None:
                self._deadline_ns = due_ns + round(self._plan.stop.duration_s * 1e9)
                self._deadline = self._loop.call_at(self._deadline_ns / 1e9, self._time_is_up)
        if self._requests_left is not None:
            self._requests_left -= 1
            if self._requests_left == 0:
                self._stopping = True

    def _phase(self, name: str, at_ns: int) -> None:
        """Worker 0 speaks for all; which level it is, the session knows."""
        if self._start.worker == 0:
            self.frames.event(Phase(t=self.frames.session_us(at_ns), name=name, level=0))

    def _time_is_up(self) -> None:
        """The measurement ends; what was due before and is still being paced goes out first."""
        if self._next_due_ns() is not None:
            self._deadline = self._loop.call_soon(self._time_is_up)
            return
        self._phase("drain", self._deadline_ns or time.monotonic_ns())
        self.stop(self._plan.stop.drain_s)

    def _stop_sending(self) -> None:
        self._stopping = True
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._stopping and not self.frames.in_flight:
            self._over.set()

    def _cut(self) -> None:
        for stream in self.frames.streams():
            stream.cut("cut")

    def _watch_fatal(self, finished: Finished) -> None:
        """The same refusal of the first requests one after the other will not turn into an answer: stop asking."""
        if self._fatal_count < 0 or finished.outcome in ("cut", "cancelled"):
            return
        status = finished.status or 0
        reason = status, finished.error if status in _FATAL_IF_SAME else None
        if status not in _FATAL | _FATAL_IF_SAME or (self._fatal_count and reason != self._fatal):
            self._fatal_count = -1
            return
        self._fatal = reason
        self._fatal_count += 1
        if self._fatal_count == _FATAL_IN_A_ROW:
            text = f"stopped: the first {_FATAL_IN_A_ROW} requests all ended with HTTP {status}: {finished.error}"
            self.frames.event(Mark(t=self.frames.now_us(), text=text, level="error", code="aborted"))
            self.stop(0.0)
