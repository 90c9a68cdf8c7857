"""One request while it is under way: the sink of its exchange, and what the runner reads from it at each frame.

Arrivals are kept in ticks since `sent`, each rounded by itself, so rounding never accumulates. Must not do I/O.
"""

import asyncio
import itertools
import statistics
import time
from typing import Protocol

import msgspec

from lpxtop.clock import session_us
from lpxtop.events.buckets import bucket
from lpxtop.events.records import TICK_US, Arrivals, Request
from lpxtop.load.answers import Answer
from lpxtop.load.exchange import Timing
from lpxtop.plan import Limits

STALL_LEAST_S = 30.0
STALL_GAPS = 20
CLOSE_S = 5.0
"""After [DONE] a server has this long to end the answer."""
_TICK_NS = TICK_US * 1000
_HALF_TICK_NS = _TICK_NS // 2
_DELAY_BUCKETS = tuple(bucket(delay) for delay in range(4096))


class RequestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is due. `slot` is its short number in `arrivals`, `request_id` goes out as X-Request-Id."""

    id: int
    slot: int
    due_ns: int
    body: bytes
    request_id: str
    warmup: bool = False
    prompt_tokens: int | None = None
    max_tokens: int | None = None


class Health(msgspec.Struct):
    """What reading cost in one frame. `read_delay_us` are log buckets of kernel stamp to reader, of stamped reads.

    A read counts when it brought a piece of some answer's body.
    """

    reads: int = 0
    events: int = 0
    coalesced: int = 0
    user_stamps: int = 0
    read_delay_us: dict[int, int] = {}
    timestamp_source: str | None = None


class ArrivalsFrame:
    """Gathers the columns of one `arrivals` event from the streams."""

    def __init__(self) -> None:
        self.slot: list[int] = []
        self.n: list[int] = []
        self.gap: list[int] = []
        self.tokens: list[tuple[int, int]] = []
        self.same: list[int] = []
        self.reasoning: list[int] = []

    def event(self, t: int, src: str, seq: int) -> Arrivals:
        return Arrivals(
            t=t, src=src, seq=seq, slot=self.slot, n=self.n, gap=self.gap,
            tokens=self.tokens, same=self.same, reasoning=self.reasoning,
        )  # fmt: skip


class Owner(Protocol):
    """What a stream needs of the client that sends it."""

    streamed: bool
    health: Health
    origin_ns: int
    src: str


class Stream:
    """The live facts of one request. The transport calls the sink's four methods, the runner the others."""

    def __init__(self, spec: RequestSpec, client: Owner) -> None:
        self.spec = spec
        self.sent_ns: int | None = None
        self.timing: Timing | None = None
        self.forced: str | None = None  # cut, cancelled, stall, timeout: we ended it
        self.answer = Answer(streamed=client.streamed)
        self.task: asyncio.Task[object] | None = None
        self._health, self._origin_ns, self._src = client.health, client.origin_ns, client.src
        self._body_ns = 0  # user stamp of the last read of the body
        self._read_ns = 0  # and of the one that brought the last chunk
        self._tick = 0
        self._gaps: list[int] = []
        self._tokens: list[tuple[int, int]] = []
        self._same: list[int] = []
        self._reasoning = False
        self._recent_ns: list[int] = []  # arrivals of the first chunks, for the stall limit

    # --- the sink ----------------------------------------------------------------------------------------------

    def sent(self, sent_ns: int, timing: Timing) -> None:
        self.sent_ns, self.timing = sent_ns, timing

    def head(self, status: int, headers: list[tuple[bytes, bytes]], kernel_ns: int, user_ns: int) -> None:
        self.answer.head(status, headers, kernel_ns)

    def body(self, data: bytes, kernel_ns: int, user_ns: int) -> None:
        if user_ns != self._body_ns:  # another read, not the next HTTP chunk of the same one
            self._body_ns = user_ns
            health = self._health
            health.reads += 1
            if kernel_ns == user_ns:
                health.user_stamps += 1
                self.answer.user_stamps += 1
            else:
                delay = (user_ns - kernel_ns) // 1000
                index = _DELAY_BUCKETS[delay] if delay < 4096 else bucket(delay)
                health.read_delay_us[index] = health.read_delay_us.get(index, 0) + 1
        for tokens in self.answer.feed(data, kernel_ns):
            self._arrived(tokens, kernel_ns, user_ns)

    def end(self, error: Exception | None, user_ns: int) -> None:
        """The rest of the stream was held back until now: an event without its last blank line still counts."""
        if error is None:
            for tokens in self.answer.end():
                self._arrived(tokens, self.answer.last_read_ns or user_ns, self._body_ns)
        self.answer.ended_ns = user_ns

    def _arrived(self, tokens: int, kernel_ns: int, user_ns: int) -> None:
        """A token-bearing chunk is complete. `tokens`: 1 when the payload does not say, 0 when it is not known."""
        if self.sent_ns is None:
            return
        health, answer, gaps = self._health, self.answer, self._gaps
        tick = (kernel_ns - self.sent_ns + _HALF_TICK_NS) // _TICK_NS
        if user_ns == self._read_ns:
            self._same.append(len(gaps))
            health.coalesced += 1
            answer.coalesced += 1
        elif answer.chunks <= 16:
            self._recent_ns.append(kernel_ns)
        if tokens != 1:
            self._tokens.append((len(gaps), tokens))
        gaps.append(tick - self._tick)
        self._tick = tick
        self._read_ns = user_ns
        self._reasoning = answer.in_reasoning
        health.events += 1

    # --- the runner's side -------------------------------------------------------------------------------------

    def request_event(self) -> Request:
        """The request's line, timed when it was sent (now, while it is not); to be repeated once it is sent."""
        spec, timing = self.spec, self.timing
        return Request(
            t=session_us(self.sent_ns if self.sent_ns is not None else time.monotonic_ns(), self._origin_ns),
            src=self._src, id=spec.id, slot=spec.slot,
            due=session_us(spec.due_ns, self._origin_ns),
            sent=None if self.sent_ns is None else session_us(self.sent_ns, self._origin_ns),
            warmup=spec.warmup,
            connection=timing.connection if timing else None,
            connect_us=timing.connect_us if timing else None,
            tls_us=timing.tls_us if timing else None,
            prompt_tokens=spec.prompt_tokens, max_tokens=spec.max_tokens,
        )  # fmt: skip

    def take_arrivals(self, frame: ArrivalsFrame) -> None:
        """Move the chunks since the last call into the frame."""
        if not self._gaps:
            return
        base = len(frame.gap)
        frame.slot.append(self.spec.slot)
        frame.n.append(len(self._gaps))
        frame.gap += self._gaps
        self._gaps = []
        if self._tokens:
            frame.tokens += [(base + index, tokens) for index, tokens in self._tokens]
            self._tokens = []
        if self._same:
            frame.same += [base + index for index in self._same]
            self._same = []
        if self._reasoning:
            frame.reasoning.append(self.spec.slot)

    def cut(self, outcome: str) -> None:
        """End it now, from our side: `cut` (the window ended) or `cancelled`. Nothing happens once it has ended."""
        if self.forced is None and self.answer.ended_ns is None:
            self.forced = outcome
            if self.task is not None:
                self.task.cancel()

    # --- time-outs ---------------------------------------------------------------------------------------------

    def overdue(self, now_ns: int, limits: Limits) -> str | None:
        """`timeout` or `stall` when a limit has passed. Comments and empty deltas do not count as progress."""
        sent, answer = self.sent_ns, self.answer
        if sent is None:
            return None
        if limits.total_s is not None and now_ns - sent > limits.total_s * 1e9:
            return "timeout"
        if answer.done:
            return "stall" if now_ns - (answer.last_read_ns or sent) > CLOSE_S * 1e9 else None
        if answer.last_token_ns is None:
            return "timeout" if now_ns - sent > limits.first_token_s * 1e9 else None
        silent_s = (now_ns - answer.last_token_ns) / 1e9
        least_s = STALL_LEAST_S if limits.stall_s is None else limits.stall_s
        return "stall" if silent_s > least_s and silent_s > self._stall_s(limits) else None

    def _stall_s(self, limits: Limits) -> float:
        times = self._recent_ns
        if limits.stall_s is not None or len(times) < 3:
            return limits.stall_s or 0.0
        return STALL_GAPS * statistics.median(b - a for a, b in itertools.pairwise(times)) / 1e9
