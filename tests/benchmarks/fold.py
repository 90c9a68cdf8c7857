"""How long folding takes per token: `python tests/benchmarks/fold.py [streams] [tokens/s per stream] [seconds]`.

Folds the frames of a steady load (250 streams × 20 tokens/s unless told otherwise) and prints µs per token, the cost
of a view, and the size of a keyframe. Budget: 0.5 µs per token for `arrivals`.
"""

import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from lpxtop.events.records import Arrivals, Event, Finished, Header, LoadSample, Phase, Request
from lpxtop.metrics.state import RunState
from lpxtop.metrics.summary import summary

FRAME_US = 250_000
TOKENS = 128


def load(streams: int, per_s: float, seconds: float, per_chunk: int) -> Iterator[Event]:
    """Requests of 128 chunks, gaps ±10 %, a frame every 250 ms, as one load process sends them."""
    rng = random.Random(1)
    yield Header(
        t=0, schema=(1, 0), session="bench", wall_ns=0, mono_ns=0, lpxtop="0", plan={"load": {"concurrency": streams}}
    )
    yield Phase(t=0, name="measure", level=0, concurrency=streams)
    flying: dict[int, list[int]] = {}  # slot -> id, sent, chunks so far, ticks of the last and of the next chunk
    made = 0

    def line(kind: type[Event], t: int, **fields: object) -> Event:
        return kind(t=t, src="load0", seq=0, **fields)

    for t in range(FRAME_US, round(seconds * 1_000_000), FRAME_US):
        for slot in range(streams):
            if slot not in flying:
                flying[slot] = [made, t - FRAME_US, 0, 0, rng.randrange(1000, 20_000)]
                yield line(Request, t, id=made, slot=slot, due=t - FRAME_US, sent=t - FRAME_US, prompt_tokens=128)
                made += 1
        slots, n, gap, ended = [], [], [], []
        for slot, now in flying.items():
            _, sent, chunks, last, upcoming = now
            before = len(gap)
            while chunks < TOKENS and sent + 10 * upcoming <= t:
                gap.append(upcoming - last)
                last = upcoming
                upcoming += round(100_000 / per_s * rng.uniform(0.9, 1.1))
                chunks += 1
            now[2:] = chunks, last, upcoming
            if len(gap) > before:
                slots.append(slot)
                n.append(len(gap) - before)
            if chunks == TOKENS:
                ended.append(slot)
        tokens = [(index, per_chunk) for index in range(len(gap))] if per_chunk > 1 else []
        yield line(Arrivals, t, slot=slots, n=n, gap=gap, tokens=tokens)
        for slot in ended:
            id_, sent, chunks, last, _ = flying.pop(slot)
            yield line(
                Finished, t, id=id_, slot=slot, due=sent, sent=sent, outcome="ok", first_token_us=10_000,
                last_token_us=10 * last, end_us=10 * last, chunks=chunks, first_chunk_tokens=per_chunk,
                output_tokens=chunks * per_chunk, token_source="continuous_usage",
            )  # fmt: skip
        yield line(LoadSample, t, target=streams, in_flight=len(flying), read_delay_us={200: len(gap)})


def measure(streams: int, per_s: float, seconds: float, per_chunk: int, exact: bool) -> None:
    events = list(load(streams, per_s, seconds, per_chunk))
    tokens = sum(len(event.gap) for event in events if isinstance(event, Arrivals)) * per_chunk
    took: defaultdict[str, float] = defaultdict(float)
    state = RunState(exact=exact)
    ten_seconds_before = False
    for event in events:
        start = time.perf_counter()
        state.apply(event)
        took[type(event).__name__] += time.perf_counter() - start
        if event.t >= (seconds - 10) * 1_000_000 and not ten_seconds_before:
            ten_seconds_before = bool(state.snapshot())
    start = time.perf_counter()
    state.view()
    view_ms = (time.perf_counter() - start) * 1e3
    size = len(msgspec.json.encode(state.snapshot()))
    per_token = " ".join(f"{name} {1e6 * spent / tokens:.3f}" for name, spent in took.items() if spent > 0.001)
    print(
        f"{streams} × {per_s:g}/s, {per_chunk} tok/chunk, exact={exact}: {tokens} tokens, µs per token: "
        f"{1e6 * sum(took.values()) / tokens:.3f} ({per_token}); view {view_ms:.1f} ms; keyframe {size} B"
    )
    if exact:
        start = time.perf_counter()
        summary(state)
        print(f"  summary {1e3 * (time.perf_counter() - start):.1f} ms")


def main() -> None:
    given = [float(word) for word in sys.argv[1:]]
    streams, per_s, seconds = (*given, *(250.0, 20.0, 60.0)[len(given) :])
    for exact in (True, False):
        measure(int(streams), per_s, seconds, 1, exact)
    measure(int(streams), per_s, seconds, 4, True)


if __name__ == "__main__":
    main()
