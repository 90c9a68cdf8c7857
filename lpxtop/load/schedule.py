"""When requests are due: closed loop (so many users), open loop (constant or Poisson). Arithmetic only.

Must not read a clock, sleep or send: whoever owns a schedule passes the time in, as nanoseconds of a monotonic clock.
A due time, once it has passed, never slips; a late sender finds out by how much it is late.
"""

import heapq
import random
from collections import deque
from typing import Literal, Protocol

SECOND_NS = 1_000_000_000
BACKOFF_FIRST_NS = 50_000_000
BACKOFF_LIMIT_NS = SECOND_NS


def share(total: int, worker: int, workers: int) -> int:
    """The part of a whole number that falls to `worker` of `workers`; the parts sum to exactly `total`."""
    return total // workers + (worker < total % workers)


def backoff_ns(failures: int) -> int:
    """How long a user waits after that many failures in a row: not after one, then 50 ms doubling up to 1 s."""
    if failures < 2:
        return 0
    return min(BACKOFF_LIMIT_NS, BACKOFF_FIRST_NS << min(failures - 2, 10))


class Turn:
    """One request that is due. Whoever takes it hands it back to `ended`; `failures` is its user's, in a row."""

    __slots__ = ("due_ns", "failures")

    def __init__(self, due_ns: int, failures: int = 0) -> None:
        self.due_ns, self.failures = due_ns, failures

    def __lt__(self, other: "Turn") -> bool:
        return self.due_ns < other.due_ns


class Schedule(Protocol):
    """What a runner asks of either kind. Nothing is due before the first `resume`, nor during a pause."""

    def next_due_ns(self) -> int | None:
        """When the next request is due; None: never, unless something else happens first."""
        ...

    def take(self) -> Turn:
        """The next due request. Only when `next_due_ns` is not None."""
        ...

    def ended(self, turn: Turn, end_ns: int, ok: bool) -> None:
        """The request of `turn` ended at `end_ns`, well or not."""
        ...

    def waiting(self, now_ns: int) -> int:
        """How many requests are due by `now_ns` and not taken."""
        ...

    def pause(self, now_ns: int) -> None: ...

    def resume(self, now_ns: int) -> None: ...


class ClosedLoop:
    """`target` users with at most one request in flight each; an idle user is due when its last request ended.

    Going up adds users, evenly over a ramp; of several workers, number i starts its users i/n of a step later, so
    that all together climb evenly. Going down removes idle users, then each user whose request ends, never one in
    flight. A user whose requests keep failing backs off and stays a user.
    """

    def __init__(self, target: int, ramp_s: float = 0.0, *, worker: int = 0, workers: int = 1) -> None:
        self.target = target
        self._ramp_s = ramp_s
        self._phase = worker / workers
        self._idle: list[Turn] = []
        self._busy = 0
        self._started = False
        self._paused = True

    def set_target(self, target: int, now_ns: int, ramp_s: float = 0.0) -> None:
        """Keep `target` in flight from now on. Before the first `resume` it is only noted."""
        self.target = target
        if not self._started:
            self._ramp_s = ramp_s
            return
        missing = target - self._busy - len(self._idle)
        if missing < 0:
            self._idle.sort()
            del self._idle[max(0, len(self._idle) + missing) :]
        for index in range(missing):
            step_ns = ramp_s * SECOND_NS / missing
            heapq.heappush(self._idle, Turn(now_ns + round((index + self._phase) * step_ns)))

    def next_due_ns(self) -> int | None:
        return self._idle[0].due_ns if self._idle and not self._paused else None

    def take(self) -> Turn:
        self._busy += 1
        return heapq.heappop(self._idle)

    def ended(self, turn: Turn, end_ns: int, ok: bool) -> None:
        self._busy -= 1
        if self._busy + len(self._idle) < self.target:
            failures = 0 if ok else turn.failures + 1
            heapq.heappush(self._idle, Turn(end_ns + backoff_ns(failures), failures))

    def waiting(self, now_ns: int) -> int:
        return 0 if self._paused else sum(turn.due_ns <= now_ns for turn in self._idle)

    def pause(self, now_ns: int) -> None:
        self._paused = True

    def resume(self, now_ns: int) -> None:
        """Idle users are due from now on: the pause is nobody's delay."""
        if not self._started:
            self._started = True
            self.set_target(self.target, now_ns, self._ramp_s)
        if self._paused:
            self._paused = False
            self._idle = sorted(Turn(max(turn.due_ns, now_ns), turn.failures) for turn in self._idle)


class OpenLoop:
    """Arrivals at `rate` requests per second (of all workers together), whatever becomes of them.

    Arrivals are the points 0, 1, 2, … (constant) or those of a unit Poisson process, on an axis that advances by
    `rate` per second and stands still in a pause: point S is due at anchor + (S − axis at the anchor) / rate. The
    anchor moves only when the rate changes, so no error accumulates. Worker i of n takes every n-th point of one
    sequence, so n workers together make exactly the arrivals that one would.
    """

    def __init__(
        self,
        rate: float,
        kind: Literal["constant", "poisson"] = "poisson",
        *,
        seed: int = 0,
        worker: int = 0,
        workers: int = 1,
    ) -> None:
        self.rate = rate
        self._random = random.Random(f"arrivals {seed}") if kind == "poisson" else None
        self._workers = workers
        self._point = 0.0
        self._anchor_ns, self._axis = 0, 0.0
        self._overdue: deque[int] = deque()
        self._paused_ns: int | None = 0
        self._advance(worker if self._random is None else worker + 1)

    def _advance(self, points: int) -> None:
        if self._random is None:
            self._point += points
        else:
            self._point += sum(self._random.expovariate(1.0) for _ in range(points))

    def _point_due_ns(self) -> int | None:
        if self._paused_ns is not None or self.rate <= 0:
            return None
        return self._anchor_ns + round((self._point - self._axis) * SECOND_NS / self.rate)

    def _collect(self, now_ns: int) -> None:
        """What is due by now is due for good, whatever happens to the rate."""
        while (due_ns := self._point_due_ns()) is not None and due_ns <= now_ns:
            self._overdue.append(due_ns)
            self._advance(self._workers)

    def _move_anchor(self, now_ns: int) -> None:
        self._axis += (now_ns - self._anchor_ns) * self.rate / SECOND_NS
        self._anchor_ns = now_ns

    def set_rate(self, rate: float, now_ns: int) -> None:
        """From now on; what lies ahead comes sooner or later in proportion."""
        if self._paused_ns is None:
            self._collect(now_ns)
            self._move_anchor(now_ns)
        self.rate = rate

    def next_due_ns(self) -> int | None:
        if self._overdue and self._paused_ns is None:
            return self._overdue[0]
        return self._point_due_ns()

    def take(self) -> Turn:
        if self._overdue:
            return Turn(self._overdue.popleft())
        due_ns = self._point_due_ns()
        assert due_ns is not None
        self._advance(self._workers)
        return Turn(due_ns)

    def ended(self, turn: Turn, end_ns: int, ok: bool) -> None:
        """The next arrival does not care."""

    def waiting(self, now_ns: int) -> int:
        self._collect(now_ns)
        return 0 if self._paused_ns is not None else len(self._overdue)

    def pause(self, now_ns: int) -> None:
        if self._paused_ns is None:
            self._collect(now_ns)
            self._move_anchor(now_ns)
            self._paused_ns = now_ns

    def resume(self, now_ns: int) -> None:
        """The axis goes on where it stood; what was overdue is later by the pause, which is nobody's delay."""
        if self._paused_ns is not None:
            pause_ns = now_ns - self._paused_ns
            self._overdue = deque(due_ns + pause_ns for due_ns in self._overdue)
            self._anchor_ns, self._paused_ns = now_ns, None
