"""One frame of arrivals, sorted into cells: the stretches that one second and one part of the session own together.

The hot path of the fold: a stream whose whole batch lies in the frame's main cell costs a few additions, and its
gaps go on as one slice. Must not keep figures; the state counts what the cells hold.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import accumulate

import msgspec

from lpxtop.events.records import TICK_US, Arrivals
from lpxtop.metrics.levels import Part
from lpxtop.metrics.slots import Slot
from lpxtop.metrics.streams import Stream, Streams

_HALF_FRAME_US = 125_000


class Cell:
    """What arrived in one stretch: `gaps` in ticks between chunks, the streams that `started` (their first gap is a
    TTFT and not among the gaps), chunks, `extra` tokens beyond one per chunk, `unknown` chunks whose tokens nobody
    counted, and in `shared` by number of tokens the gaps that so many tokens share."""

    __slots__ = ("chunks", "extra", "gaps", "hi", "lo", "part", "shared", "slot", "started", "unknown")

    def __init__(self, lo: int, hi: int, slot: Slot | None, part: Part) -> None:
        self.lo, self.hi, self.slot, self.part = lo, hi, slot, part
        self.gaps: list[int] = []
        self.started: list[Stream] = []
        self.shared: dict[int, list[int]] = {}
        self.chunks = self.extra = self.unknown = 0


def into_cells(event: Arrivals, streams: Streams, cell_at: Callable[[int], Cell]) -> list[Cell]:
    """The frame's arrivals by cell, in order of time; `cell_at` makes the empty cell around a moment.

    Streams are moved on. Warm-up's arrivals are left out. A malformed frame is counted and ignored; a gap below zero
    (a clock that stepped) is counted and taken as none.
    """
    n, gap = event.n, event.gap
    if not gap or len(n) != len(event.slot) or sum(n) != len(gap) or min(n) < 1:
        streams.malformed += bool(gap or n)
        return []
    if min(gap) < 0:
        streams.malformed += 1
        event = msgspec.structs.replace(event, gap=[max(0, ticks) for ticks in gap])
    frame = _Frame(event, streams.by_slot.get(event.src, {}), cell_at)
    frame.sort()
    if event.tokens:
        frame.count_tokens()
    if event.same:
        frame.gather_reads()
    streams.orphans += frame.orphans
    return sorted(frame.cells, key=_begin)


def _begin(cell: Cell) -> int:
    return cell.lo


class _Frame:
    """One `arrivals` event while it is sorted."""

    def __init__(self, event: Arrivals, slots: dict[int, Stream], cell_at: Callable[[int], Cell]) -> None:
        self.event, self.slots, self.cell_at = event, slots, cell_at
        self.ends = list(accumulate(event.n))
        self.sums = list(accumulate(event.gap, initial=0))
        self.cells: list[Cell] = []
        self.orphans = 0
        self.pieces: set[int] = set()

    def cell(self, t: int) -> Cell:
        for cell in self.cells:
            if cell.lo <= t < cell.hi:
                return cell
        cell = self.cell_at(t)
        self.cells.append(cell)
        return cell

    def sort(self) -> None:
        """Streams whose whole batch lies in the frame's main cell are only moved on; the others go piece by piece."""
        gap, sums, get = self.event.gap, self.sums, self.slots.get
        main = self.cell(self.event.t - _HALF_FRAME_US)
        lo, hi = main.lo, main.hi
        start = plain = 0
        for batch, (slot, end) in enumerate(zip(self.event.slot, self.ends, strict=True)):
            stream = get(slot)
            if stream is not None and stream.chunks and not stream.warmup and not stream.lost:
                before = stream.last
                last = before + (sums[end] - sums[start]) * TICK_US
                if last < hi and before + gap[start] * TICK_US >= lo:
                    stream.last = last
                    stream.chunks += end - start
                    start = end
                    continue
            self._whole(main, plain, start)
            self._piecewise(stream, start, end)
            self.pieces.add(batch)
            plain = start = end
        self._whole(main, plain, start)

    def _whole(self, main: Cell, start: int, end: int) -> None:
        if start < end:
            main.gaps += self.event.gap[start:end]
            main.chunks += end - start

    def _piecewise(self, stream: Stream | None, start: int, end: int) -> None:
        """One stream's batch: its first chunk, edges between cells, warm-up, and what follows dropped events."""
        if stream is None or stream.sent is None:
            self.orphans += end - start
            return
        known = not stream.lost
        if stream.lost:
            self._found_again(stream, start, end)
        sums, base = self.sums, stream.last - self.sums[start] * TICK_US
        arrivals = [base + total * TICK_US for total in sums[start + 1 : end + 1]]
        first = stream.chunks == 0
        if first and known:
            stream.first = arrivals[0] - stream.sent
        stream.chunks += end - start
        stream.last = arrivals[-1]
        if not stream.warmup:
            self._cut(stream, start, arrivals, first)

    def _cut(self, stream: Stream, start: int, arrivals: list[int], first: bool) -> None:
        """The batch to the cells of its arrivals; the first gap of a request is its TTFT, no gap between chunks."""
        at, count = 0, len(arrivals)
        while at < count:
            cell = self.cell(arrivals[at])
            to = max(at + 1, bisect_left(arrivals, cell.hi, at))
            cell.chunks += to - at
            begins = first and at == 0
            if begins and stream.first is not None:
                cell.started.append(stream)
            cell.gaps += self.event.gap[start + at + begins : start + to]
            at = to

    def _found_again(self, stream: Stream, start: int, end: int) -> None:
        """After dropped events only the frame's time bounds these arrivals: let the batch end with it.

        Whether the first gap is a TTFT cannot be known then, so a stream without a chunk yet stays without one.
        """
        stream.lost = False
        total = (self.sums[end] - self.sums[start]) * TICK_US
        stream.last = max(stream.last, self.event.t - total)

    def count_tokens(self) -> None:
        """Chunks of other than one token, to the cells of their arrivals: whole batches at once where that goes."""
        pairs = sorted(pair for pair in self.event.tokens if 0 <= pair[0] < len(self.event.gap))
        indexes, tokens = [index for index, _ in pairs], [n for _, n in pairs]
        main, at = self.cells[0], 0
        for batch, end in enumerate(self.ends):
            to = bisect_left(indexes, end, at)
            stream = self.slots.get(self.event.slot[batch]) if to > at else None
            if stream is not None and stream.sent is not None:
                few, many = min(tokens[at:to]), max(tokens[at:to])
                if few == many and few > 0 and batch not in self.pieces:
                    stream.extra += (few - 1) * (to - at)
                    main.extra += (few - 1) * (to - at)
                    main.shared.setdefault(few, []).extend([self.event.gap[index] for index in indexes[at:to]])
                else:
                    self._count_each(stream, batch, pairs[at:to])
            at = to

    def _count_each(self, stream: Stream, batch: int, pairs: list[tuple[int, int]]) -> None:
        """The chunks of one batch, each to its own cell."""
        end, start = self.ends[batch], self.ends[batch - 1] if batch else 0
        for index, tokens in pairs:
            first = index == start and stream.chunks == end - start
            if first:
                stream.first_chunk_tokens = tokens
            stream.extra += max(0, tokens - 1)
            if stream.warmup:
                continue
            cell = self.cell(stream.last - (self.sums[end] - self.sums[index + 1]) * TICK_US)
            if tokens < 1:
                cell.unknown += 1
                continue
            cell.extra += tokens - 1
            if not first:
                cell.shared.setdefault(tokens, []).append(self.event.gap[index])

    def gather_reads(self) -> None:
        """Runs of chunks that one read completed, kept per stream as the sizes of its two largest reads."""
        run_from = run_to = -2
        for index in [*self.event.same, -2]:
            if index == run_to + 1 and self._batch(index) == self._batch(run_from):
                run_to = index
                continue
            if run_from >= 0:
                self._read(run_from, run_to - run_from + 2)
            run_from = run_to = index

    def _batch(self, index: int) -> int:
        return bisect_right(self.ends, index)

    def _read(self, index: int, size: int) -> None:
        stream = self.slots.get(self.event.slot[self._batch(index)]) if index < len(self.event.gap) else None
        if stream is not None:
            large, small = stream.reads
            stream.reads = (size, large) if size > large else (large, max(small, size))
