"""The state of a run as a fold of its events: the one writer of everything that screens and summaries show.

`apply` reads no clock: time moves only through events, so live, replayed and offline folds of the same events give
the same numbers. `view()` makes the frozen record of a frame; `snapshot()`/`restore` carry the screen's part through
a keyframe. Exact counts, which only the summary needs, are kept when `exact` is True.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lpxtop.errors import UsageError
from lpxtop.events.records import (
    AnyEvent,
    Arrivals,
    Control,
    End,
    Finished,
    Gpu,
    Header,
    Keyframe,
    LoadSample,
    Mark,
    Phase,
    Request,
    Server,
    ServerChanged,
    Source,
    Unknown,
)
from lpxtop.metrics import definitions, picture, screen, slo
from lpxtop.metrics.arrivals import Cell, into_cells
from lpxtop.metrics.client import ClientTotals, LoadSources
from lpxtop.metrics.counts import RequestCounts
from lpxtop.metrics.diagnosis import diagnose
from lpxtop.metrics.distribution import count_all, merge, split_correction, tick_bucket
from lpxtop.metrics.eventlog import EventLog
from lpxtop.metrics.evidence import of_screen
from lpxtop.metrics.exact import Exact
from lpxtop.metrics.gpus import GpuSource
from lpxtop.metrics.levels import Timeline
from lpxtop.metrics.servers import ServerSource
from lpxtop.metrics.slots import KEPT, SLOT_US, Ring, Slot
from lpxtop.metrics.streams import Stream, Streams, is_buffered
from lpxtop.metrics.sums import ServerSums, Sums
from lpxtop.metrics.view import RunView

_DEFAULT_SETTLE_S = 2.0


class RunState:
    """Everything known of one run. Only `apply` changes it; `window_s` may be set at any time (1 to 300)."""

    def __init__(self, exact: bool = True, window_s: float = 30.0) -> None:
        self.window_s = window_s
        self.exact = Exact() if exact else None
        self.client_totals = ClientTotals() if exact else None
        self.sums: dict[int | None, Sums] = {}
        self.header: Header | None = None
        self.plan: dict[str, dict[str, Any]] = {}
        self.slo: tuple[slo.Term, ...] = ()
        self.t = 0
        self.reason: str | None = None
        self.target: int | None = None
        self.rate: float | None = None
        self.unknown_events = self.late_events = 0
        self.gpu_note: str | None = None
        self.ring = Ring()
        self.timeline = Timeline(round(_DEFAULT_SETTLE_S * 1e6))
        self.streams = Streams()
        self.counts = RequestCounts()
        self.log = EventLog()
        self.load = LoadSources()
        self.gpus: dict[str, GpuSource] = {}
        self.servers: dict[str, ServerSource] = {}
        self.second = 0
        self._folds: dict[type, Callable[[Any], None]] = {
            Header: self._header, Source: self._source, Phase: self._phase, Control: self._control,
            Request: self._request, Arrivals: self._arrivals, Finished: self._finished, LoadSample: self._load_sample,
            Gpu: self._gpu, Server: self._server, Mark: self.log.mark, ServerChanged: self.log.server_changed,
            End: self._end,
        }  # fmt: skip

    # --- the fold -------------------------------------------------------------------------------------------------

    def apply(self, event: AnyEvent) -> None:
        """Fold one event. Keyframes are the state's own picture and change nothing; unknown kinds are counted."""
        if type(event) is Keyframe:
            return
        if event.src != "session" and self.load.number(event.src, event.seq):
            self.streams.hole(event.src)
        if isinstance(event, Unknown):
            self.unknown_events += 1
            return
        self._advance(event.t)
        fold = self._folds.get(type(event))
        if fold is not None:
            fold(event)

    def _advance(self, t: int) -> None:
        """Time moves on with the newest event; a late one moves nothing."""
        if t <= self.t:
            return
        self.t = t
        second = t // SLOT_US
        if second == self.second:
            return
        self.second = second
        self.ring.touch(second)
        self.timeline.forget(t - KEPT * SLOT_US)
        for level in self.timeline.to_freeze(t):
            level.freeze(t, self.counts.trusted, screen.steady(self, level.index))

    def _header(self, event: Header) -> None:
        self.header = event
        self.plan = {name: part for name, part in event.plan.items() if isinstance(part, dict)}
        self.slo = _terms(event.slo)
        settle_s = event.plan.get("settle_s")
        if isinstance(settle_s, int | float):
            self.timeline.settle_us = max(0, round(settle_s * 1e6))
        load = self.plan.get("load", {})
        self.target, self.rate = load.get("concurrency"), load.get("rate")

    def _source(self, event: Source) -> None:
        self.log.source(event)
        if event.kind == "load":
            self.load.source(event)
        elif event.kind == "gpu":
            self.gpu_source(event.src).source(event)
            if event.state in ("failed", "unavailable"):
                self.gpu_note = event.text or f"GPU source {event.state}"
            elif event.state == "joined":
                self.gpu_note = event.text

    def _phase(self, event: Phase) -> None:
        self.timeline.apply(event)
        if event.concurrency is not None:
            self.target = event.concurrency
        if event.rate is not None:
            self.rate = event.rate

    def _control(self, event: Control) -> None:
        self.log.control(event)
        if event.after is not None and event.what == "concurrency":
            self.target = round(event.after)
        elif event.after is not None and event.what == "rate":
            self.rate = event.after

    def _end(self, event: End) -> None:
        self.timeline.finish(event.t)
        self.reason = event.reason
        self.log.add(event.t, "info", f"end: {event.reason}")

    # --- requests and tokens --------------------------------------------------------------------------------------

    def _slot(self, t: int) -> Slot | None:
        """The slot that owns `t`; None, and counted, when it is too old; None when it lies in the future."""
        second = t // SLOT_US
        if second > self.second + 1:
            return None
        slot = self.ring.at(second)
        if slot is None:
            self.late_events += 1
        return slot

    def _cell(self, t: int) -> Cell:
        second = t // SLOT_US
        part, until = self.timeline.at(t)
        lo, hi = second * SLOT_US, (second + 1) * SLOT_US
        return Cell(max(lo, part.start), min(hi, until), self._slot(t), part)

    def _request(self, event: Request) -> None:
        stream, new = self.streams.request(event)
        if stream.sent is not None:
            self._sent(stream, stream.sent)
        if not new:
            return
        if stream.warmup:
            self.counts.warmup_due += 1
            return
        self._due(event.due)

    def _sent(self, stream: Stream, sent: int) -> None:
        """The part that owns the moment of sending; a request sent again moves to the later one."""
        part = self.timeline.at(sent)[0]
        if stream.part is None:
            self.counts.sent += not stream.warmup
        else:
            self.timeline.opened(stream.part, -1)
        stream.part = part
        self.timeline.opened(part, 1)

    def _due(self, due: int) -> None:
        self.counts.due_at(due)
        if (slot := self._slot(due)) is not None:
            slot.due += 1

    def _arrivals(self, event: Arrivals) -> None:
        self.load.heard(event)
        for cell in into_cells(event, self.streams, self._cell):
            self._fold_cell(cell)

    def _fold_cell(self, cell: Cell) -> None:
        """What arrived in one second and one part: to the slot, to the level, to the exact counts."""
        places: list[Any] = [] if cell.slot is None else [cell.slot]
        level = self.timeline.steady_level(cell.part)
        if level is not None:
            places.append(level)
        counted: dict[int, int] = {}
        count_all(counted, map(tick_bucket, cell.gaps))
        split = split_correction(cell.shared) if cell.shared else {}
        for place in places:
            merge(place.icl, counted)
            merge(place.split, split)
        if self.exact is not None:
            figures = self.exact.of_part(cell.part)
            figures.arrivals(cell.gaps, cell.shared)
            places.append(figures)
        for place in places:
            place.chunks += cell.chunks
            place.extra += cell.extra
            place.unknown += cell.unknown
        self.counts.chunks += cell.chunks
        self.counts.unknown_chunks += cell.unknown
        if cell.slot is not None:
            for stream in cell.started:
                cell.slot.started(stream.first, stream.prompt_tokens)

    def _finished(self, event: Finished) -> None:
        stream = self.streams.finished(event)
        if stream is not None and stream.part is not None:
            self.timeline.opened(stream.part, -1)
        if event.warmup:
            self.counts.warmup_ended += 1
            return
        part = stream.part if stream is not None else None
        if stream is None:
            self._due(event.due)
        if part is None and event.sent is not None:
            part = self.timeline.at(event.sent)[0]
            self.counts.sent += 1
        end = event.t if event.sent is None or event.end_us is None else event.sent + event.end_us
        streamed = not is_buffered(event, stream)
        good = bool(self.slo) and streamed and slo.meets(self.slo, event)
        self.counts.finished(event, end, streamed, good)
        route = self.timeline.route(part, end)
        self.timeline.finished(event, route, streamed)
        if self.exact is not None:
            self.exact.finished(event, route, self.timeline.at(end)[0], streamed, good)
        slot = self._slot(end)
        for sums in self._sums(end, slot, draining=True):
            sums.requests.request(event, streamed)
        self._input(event, stream, end)
        self._unstreamed(event, stream, end)
        if definitions.failed(event):
            self.log.failure(end, event)
        if slot is not None:
            slot.ended_with(event, end, streamed, good)

    def _input(self, event: Finished, stream: Stream | None, end: int) -> None:
        """Prompt tokens count when the first token shows that the prompt was processed; what was expected then is
        corrected to what the server counted."""
        if event.input_tokens is None:
            return
        at = end if event.sent is None or event.first_token_us is None else event.sent + event.first_token_us
        if self.exact is not None:
            self.exact.of_part(self.timeline.at(at)[0]).input_tokens += event.input_tokens
        expected = stream.prompt_tokens if stream is not None and stream.first is not None else None
        if (slot := self._slot(at)) is not None:
            slot.input_tokens += event.input_tokens - (0 if expected is None else expected)

    def _unstreamed(self, event: Finished, stream: Stream | None, end: int) -> None:
        """The tokens of an answer that did not stream arrive with its end."""
        seen = event.chunks if stream is None else max(event.chunks, stream.chunks)
        if seen or not event.output_tokens or event.outcome not in definitions.ANSWERED:
            return
        cell = self._cell(end)
        cell.extra = event.output_tokens
        self._fold_cell(cell)

    # --- load processes, GPUs, servers ----------------------------------------------------------------------------

    @property
    def watching(self) -> bool:
        """Whether the session sends no load."""
        return self.header is not None and self.header.kind == "watch"

    def measuring(self, t: int) -> bool:
        """Whether `t` belongs to the measurement; watching, or a session without phases, is one from begin to end."""
        if self.watching or len(self.timeline.parts) == 1:
            return True
        return self.timeline.at(t)[0].kind in ("settle", "steady")

    def _level_sums(self, t: int, draining: bool = False) -> Sums | None:
        """Of an exact state the sums of the level that owns `t`; None outside the measured time."""
        part = self.timeline.at(t)[0]
        if self.exact is None or not (self.measuring(t) or (draining and part.kind == "drain")):
            return None
        return self.sums.setdefault(None if part.kind == "before" else part.level, Sums())

    def _sums(self, t: int, slot: Slot | None, draining: bool = False) -> list[Sums]:
        """Where a moment's evidence adds up when it is measured: its second, and the level of an exact state."""
        level = self._level_sums(t, draining)
        second = slot.sums if slot is not None and self.measuring(t) else None
        return [place for place in (second, level) if place is not None]

    def _load_sample(self, event: LoadSample) -> None:
        self.load.sample(event)
        if event.target is not None and event.in_flight > event.target:
            self.timeline.still_draining(event.t)
        if (slot := self._slot(event.t)) is not None:
            self.load.to_slot(slot, event)
        if (level := self._level_sums(event.t)) is not None:
            level.load(event.src, event.in_flight, 1)
        if self.client_totals is not None and self.timeline.at(event.t)[0].kind in ("settle", "steady", "drain"):
            self.client_totals.sample(event)

    def gpu_source(self, src: str) -> GpuSource:
        source = self.gpus.get(src)
        if source is None:
            source = self.gpus[src] = GpuSource(src)
        return source

    def _gpu(self, event: Gpu) -> None:
        measured = self.exact is not None and self.measuring(event.t)
        if "ok" in event.status:
            self.gpu_note = None
        slot = self._slot(event.t)
        sums = self._sums(event.t, slot)
        for t, level, text in self.gpu_source(event.src).sample(event, slot, measured, sums):
            self.log.add(t, level, text)

    def _server(self, event: Server) -> None:
        server = self.servers.get(event.src)
        if server is None:
            server = self.servers[event.src] = ServerSource(event.src, event.url)
        measured = self.exact is not None and self.measuring(event.t)
        level = self._level_sums(event.t)
        sums = None if level is None else level.servers.setdefault(event.src, ServerSums())
        for t, importance, text in server.scrape(event, self._slot(event.t), measured, sums):
            self.log.add(t, importance, text if len(self.servers) == 1 else f"{event.src}: {text}")

    # --- out ------------------------------------------------------------------------------------------------------

    def view(self) -> RunView:
        """The frozen record of a frame."""
        shown = screen.view(self)
        found = diagnose(of_screen(self, shown.levels, shown.quality.verdicts))
        return msgspec.structs.replace(shown, verdicts=found)

    def snapshot(self) -> dict[str, Any]:
        """What a keyframe carries: all that the screen shows, and of the chart's slots those changed since the last
        snapshot. JSON-able, and independent of what the state does next."""
        return picture.of(self)

    @classmethod
    def restore(
        cls, keyframes: Sequence[Keyframe], *, window_s: float = 30.0, header: Header | None = None
    ) -> "RunState":
        """The state after the last of a chain of keyframes (oldest first, covering the chart's 300 s).

        Exact for the screen; it has no exact counts, a summary needs a fold of the whole recording. Raises
        RecordingError for a keyframe that another version wrote.
        """
        self = cls(exact=False, window_s=window_s)
        if header is not None:
            self._header(header)
        picture.fill(self, [keyframe.state for keyframe in keyframes])
        return self


def _terms(texts: Sequence[str]) -> tuple[slo.Term, ...]:
    """The header's objectives. Those this version cannot read are left out: a recording must stay readable."""
    found: list[slo.Term] = []
    for text in texts:
        try:
            found += slo.parse(text)
        except UsageError:
            continue
    return tuple(found)
