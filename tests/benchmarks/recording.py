"""How large a recording is, how fast it is reported and jumped in, and how much memory replaying takes.

usage: python tests/benchmarks/recording.py [SECONDS] [STREAMS] [TOKENS_PER_S_EACH]
Writes a synthetic session (closed loop, requests of 256 tokens, keyframes from the real fold) into a temporary
directory and prints a table. By default 200 s of 250 × 20 tok/s: 1,000,000 tokens.
"""

import gzip
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from lpxtop.events import codec
from lpxtop.events.records import (
    FRAME_US,
    KEYFRAME_US,
    Arrivals,
    End,
    Finished,
    Header,
    Keyframe,
    LoadSample,
    Phase,
    Request,
)
from lpxtop.metrics.state import RunState
from lpxtop.playback import Playback
from lpxtop.recording.reader import Recording
from lpxtop.recording.replay import Player

TOKENS = 256


def session(seconds: int, streams: int, rate: float):
    """The events of a synthetic session, in file order."""
    draw = random.Random(1)
    yield Header(t=0, schema=(1, 0), session="bench", wall_ns=1_800_000_000_000_000_000, mono_ns=1, lpxtop="0",
                 target={"url": "http://bench/v1", "model": "bench"}, plan={"settle_s": 0.0})  # fmt: skip
    yield Phase(t=0, name="measure", level=0, concurrency=streams)
    gap = round(1e5 / rate)
    left, sent, ticks = [0] * streams, [0] * streams, [0] * streams
    number, done, seq = 0, 0, 0
    ids = [0] * streams
    for frame in range(1, seconds * 4 + 1):
        end = frame * FRAME_US
        slots, counts, gaps, ended = [], [], [], []
        for slot in range(streams):
            if left[slot] == 0:
                left[slot], sent[slot], ticks[slot] = TOKENS, end - FRAME_US + slot * 900, 0
                ids[slot] = number
                yield Request(t=sent[slot], src="load0", seq=seq, id=number, slot=slot, due=sent[slot] - 200,
                              sent=sent[slot], connection="new", max_tokens=TOKENS)  # fmt: skip
                number, seq = number + 1, seq + 1
            mine = []
            while left[slot]:
                step = draw.randint(gap - 60, gap + 60) if ticks[slot] else draw.randint(3000, 9000)
                if sent[slot] + (ticks[slot] + step) * 10 > end:
                    break
                ticks[slot] += step
                mine.append(step)
                left[slot] -= 1
            if mine:
                slots.append(slot)
                counts.append(len(mine))
                gaps += mine
                if not left[slot]:
                    ended.append(slot)
        yield Arrivals(t=end, src="load0", seq=seq, slot=slots, n=counts, gap=gaps)
        for slot in ended:
            seq += 1
            done += 1
            last = ticks[slot] * 10
            yield Finished(
                t=sent[slot] + last, src="load0", seq=seq, id=ids[slot], slot=slot, due=sent[slot] - 200,
                sent=sent[slot], outcome="ok", status=200, finish_reason="length", first_token_us=50_000,
                first_content_us=50_000, first_byte_us=49_000, first_event_us=50_000, last_token_us=last,
                end_us=last + 300, chunks=TOKENS, first_chunk_tokens=1, input_tokens=128, output_tokens=TOKENS,
                token_source="usage", max_tokens=TOKENS, rtt_us=120, request_id=f"lpx-abcdef-load0-{number}",
                server_request_id=f"chatcmpl-{number:032x}",
            )  # fmt: skip
        yield LoadSample(t=end, src="load0", seq=seq + 1, target=streams, in_flight=streams, sent=number, due=number,
                         done={"ok": done}, events=len(gaps), reads=len(gaps), timestamp_source="kernel", cpu_us=40_000,
                         wall_us=250_000, loop_lag_us={200: 20, 210: 5},
                         read_delay_us=dict.fromkeys(range(150, 200), 3),
                         send_lateness_us={220: 5})  # fmt: skip
        seq += 2
    yield End(t=seconds * 1_000_000, reason="done")


def write(path: Path, seconds: int, streams: int, rate: float) -> int:
    """Write the recording, keyframes included; returns the number of tokens."""
    state, offset, previous, next_keyframe, tokens = RunState(exact=False), 0, None, KEYFRAME_US, 0
    with path.open("wb") as file:
        for event in session(seconds, streams, rate):
            state.apply(event)
            tokens += len(event.gap) if isinstance(event, Arrivals) else 0
            line = codec.encode(event)
            file.write(line)
            offset += len(line)
            if event.t >= next_keyframe and isinstance(event, LoadSample):
                next_keyframe += KEYFRAME_US
                keyframe = Keyframe(t=event.t, state=state.snapshot())
                line = codec.encode(msgspec.structs.replace(keyframe, offset=offset, prev=previous))
                previous = offset
                file.write(line)
                offset += len(line)
    return tokens


class Clock:
    """Stands still: replaying is asked to go as fast as it can."""

    def monotonic_ns(self) -> int:
        return 0

    def wall_ns(self) -> int:
        return 0


def main() -> None:
    seconds, streams, rate = (float(word) for word in (sys.argv[1:] + ["200", "250", "20"][len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "bench.lpx.jsonl"
        tokens = write(path, int(seconds), int(streams), rate)
        size = path.stat().st_size
        hours = seconds / 3600
        packed = len(gzip.compress(path.read_bytes(), 6)) if size < 200e6 else None
        print(f"{tokens:,} tokens, {size / 1e6:.0f} MB: {size / 1e6 / hours:.0f} MB/h raw"
              + (f", {packed / 1e6 / hours:.0f} MB/h gzip" if packed else ""))  # fmt: skip

        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "lpxtop", "report", str(path)], check=True, capture_output=True)
        print(f"report, whole command: {time.perf_counter() - begin:.2f} s")

        for name, make in (("cold", True), ("warm", False)):
            if make:
                playback = Playback(Recording.open(str(path)), Clock())
            for share in (0.95, 0.5, 0.1):
                begin = time.perf_counter()
                playback.seek(int(share * seconds * 1e6))
                playback.view()
                print(f"seek to {share:.0%}, {name}: {1000 * (time.perf_counter() - begin):.0f} ms")

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        player = Player(Recording.open(str(path)))
        player.speed = 0
        player.play()
        state = RunState(exact=False)
        while events := player.advance(0):
            for event in events:
                state.apply(event)
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        player.close()
        print(f"replaying all of it: peak memory {before / 1024:.0f} MB before, {after / 1024:.0f} MB after")


if __name__ == "__main__":
    main()
