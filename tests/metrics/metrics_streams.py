"""Event streams for the tests of metrics: a small load process with trouble, whose truth is kept beside its events."""

import random
from typing import Any

from lpxtop.events.records import (
    Arrivals,
    Control,
    End,
    Event,
    Finished,
    Gpu,
    Header,
    LoadSample,
    Mark,
    Phase,
    Request,
    Server,
    Source,
)

S = 1_000_000
FRAME = 250_000


def header(**changes: Any) -> Header:
    plan = {
        "load": {"mode": "closed", "concurrency": 2, "max_concurrency": 64},
        "sampling": {"max_tokens": 16, "ignore_eos": True},
        "settle_s": 2.0,
    }
    fields: dict[str, Any] = {
        "t": 0, "schema": (1, 0), "session": "s1", "wall_ns": 1_800_000_000_000_000_000, "mono_ns": 0,
        "lpxtop": "0.1.0", "target": {"url": "http://h:8000/v1", "model": "m"}, "plan": plan,
    }  # fmt: skip
    return Header(**(fields | changes))


class Worker:
    """One load process. `truth` lists (request, arrivals in session µs, tokens per chunk) of what it made."""

    def __init__(self, src: str, rng: random.Random) -> None:
        self.src, self.rng = src, rng
        self.seq = 0
        self.next_id = 0
        self.live: dict[int, dict[str, Any]] = {}
        self.truth: list[dict[str, Any]] = []

    def event(self, made_as: type[Event], t: int, /, **fields: Any) -> Event:
        made = made_as(t=t, src=self.src, seq=self.seq, **fields)
        self.seq += 1
        return made

    def begin(self, t: int, slot: int, warmup: bool, per_chunk: int) -> dict[str, Any]:
        rng = self.rng
        due = t + rng.randrange(0, 200_000)
        sent = due + rng.randrange(0, 3000)
        ticks = [rng.randrange(2000, 60_000)]
        for _ in range(rng.randrange(0, 40)):
            ticks.append(ticks[-1] + rng.choice((0, 1, rng.randrange(500, 8000), rng.randrange(500, 30_000))))
        outcome = rng.choices(("ok", "http_5xx", "truncated", "cut"), (12, 1, 1, 1))[0]
        made = {
            "id": self.next_id, "slot": slot, "due": due, "sent": sent, "ticks": ticks, "at": 0, "warmup": warmup,
            "outcome": outcome, "told": False,
            "tokens": [rng.choice((1, per_chunk)) for _ in ticks],
        }  # fmt: skip
        self.next_id += 1
        self.live[slot] = made
        self.truth.append(made)
        return made

    def frame(self, t: int) -> list[Event]:
        """What a load process tells at `t`."""
        out: list[Event] = []
        slots, n, gap, tokens, ended = [], [], [], [], []
        for slot, made in sorted(self.live.items()):
            if made["due"] <= t and not made["told"]:
                made["told"] = made["sent"] <= t
                out.append(
                    self.event(
                        Request,
                        t,
                        id=made["id"],
                        slot=slot,
                        due=made["due"],
                        warmup=made["warmup"],
                        sent=made["sent"] if made["told"] else None,
                        prompt_tokens=100,
                    )
                )
            if not made["told"]:
                continue
            first = made["at"]
            while made["at"] < len(made["ticks"]) and made["sent"] + 10 * made["ticks"][made["at"]] <= t:
                index = made["at"]
                if made["tokens"][index] != 1:
                    tokens.append((len(gap), made["tokens"][index]))
                gap.append(made["ticks"][index] - (made["ticks"][index - 1] if index else 0))
                made["at"] += 1
            if made["at"] > first:
                slots.append(slot)
                n.append(made["at"] - first)
            if made["at"] == len(made["ticks"]):
                ended.append(made)
        if slots:
            out.append(self.event(Arrivals, t, slot=slots, n=n, gap=gap, tokens=tokens))
        for made in ended:
            del self.live[made["slot"]]
            out.append(self.finish(made, t))
        sample = self.event(
            LoadSample, t, target=len(self.live), in_flight=len(self.live), timestamp_source="kernel",
            events=len(gap), reads=len(gap), coalesced=gap.count(0), loop_lag_us={200: 2, 260: 1},
            read_delay_us={180: len(gap)} if gap else {}, cpu_us=20_000, wall_us=250_000,
        )  # fmt: skip
        return [*out, sample]

    def finish(self, made: dict[str, Any], t: int) -> Event:
        first, last = 10 * made["ticks"][0], 10 * made["ticks"][-1]
        return self.event(
            Finished, t, id=made["id"], slot=made["slot"], due=made["due"], sent=made["sent"],
            warmup=made["warmup"], outcome=made["outcome"], status=500 if made["outcome"] == "http_5xx" else 200,
            first_byte_us=first, first_event_us=first, first_token_us=first, first_content_us=first,
            last_token_us=last, end_us=last + 40, chunks=len(made["ticks"]), first_chunk_tokens=made["tokens"][0],
            input_tokens=100 + made["slot"], cached_tokens=made["slot"] % 3 * 30, rtt_us=400 + 100 * made["slot"],
            output_tokens=sum(made["tokens"]), token_source="continuous_usage",
            max_tokens=200, error="upstream failed, id 77" if made["outcome"] == "http_5xx" else None,
        )  # fmt: skip


class Node:
    """Two GPUs that throttle now and then, and a server that is unreachable or restarts now and then."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.counters = dict.fromkeys(
            ("output_tokens", "preemptions", "prefix_cache_hits", "prefix_cache_queries"), 0.0
        )

    def sample(self, t: int) -> list[Event]:
        rng = self.rng
        gpu = Gpu(
            t=t + 7, src="gpu0", seq=t // S, status=["ok", "ok"],
            utilization_percent=[rng.random() * 100, None],
            memory_used_bytes=[1 << 30, 2 << 30], memory_total_bytes=[4 << 30, 4 << 30],
            power_watts=[300.0, rng.random() * 100], throttle_bits=[0x4 if rng.random() < 0.4 else 0, 0x1],
            power_limit_watts=[305.0, None], sm_clock_mhz=[1500 + t // S % 7, 345], pstate=[0, 8],
            thermal_margin_c=[float(t // S % 40), None], throttle_ns={"power_cap": [t * 300, None]},
            memory_utilization_percent=[80.0, 0.0],
        )  # fmt: skip
        if rng.random() < 0.02:
            self.counters = dict.fromkeys(self.counters, 0.0)
        self.counters = {name: value + rng.randrange(0, 50) for name, value in self.counters.items()}
        gauges = {"running": float(rng.randrange(4)), "waiting": 1.0, "kv_usage": rng.random()}
        scrape = Server(
            t=t + 9, src="server0", seq=t // S, url="http://h/metrics", ok=rng.random() > 0.05,
            concepts=self.counters | gauges,
        )  # fmt: skip
        return [gpu, scrape]


class Hand:
    """Somebody who changes the load, pauses and goes on."""

    def __init__(self, rng: random.Random, streams: int) -> None:
        self.rng, self.streams = rng, streams
        self.level, self.phase = 0, "warmup"

    def moves(self, t: int) -> list[Event]:
        if self.phase == "warmup":
            return self.to(t - 1000, "measure") if t >= 3 * S else []
        if self.rng.random() < 0.03 and self.phase == "measure":
            self.level += 1
            self.streams = 3 + self.level % 2
            change = Control(t=t, what="concurrency", before=3, after=self.streams)
            return [change, *self.to(t, "measure")]
        if self.rng.random() < 0.02:
            pause = self.phase == "measure"
            change = Control(t=t, what="pause" if pause else "resume")
            return [change, *self.to(t, "paused" if pause else "measure")]
        return []

    def to(self, t: int, phase: str) -> list[Event]:
        self.phase = phase
        return [Phase(t=t, name=phase, level=self.level, concurrency=self.streams)]


def session(seed: int, seconds: int = 75, workers: int = 2, streams: int = 3, trouble: bool = True) -> list[Event]:
    """A session with several load processes, warm-up, level changes, pauses, a node, notes, failures, lost frames
    (only with `trouble`) and late events."""
    rng = random.Random(seed)
    per_chunk = rng.choice((1, 1, 4))
    load = [Worker(f"load{index}", rng) for index in range(workers)]
    node, hand = Node(rng), Hand(rng, streams)
    gpus = {"gpus": [{"index": 0, "sm_clock_max_mhz": 1980}, {"index": 1}], "serves_target": True}
    out: list[Event] = [
        header(slo=["ttft<300ms", "tpot<60ms"]),
        Phase(t=0, name="ready", level=0, concurrency=streams),
        Source(t=10, src="gpu0", kind="gpu", state="joined", host="n1", descriptor=gpus),
        *(worker.event(Source, 20, kind="load", state="joined", host="c1") for worker in load),
        *hand.to(S // 2, "warmup"),
    ]
    for t in range(FRAME, seconds * S, FRAME):
        out += hand.moves(t)
        for worker in load:
            for slot in range(streams):
                if slot not in worker.live and hand.phase != "paused" and rng.random() < 0.5:
                    worker.begin(t, slot, hand.phase == "warmup", per_chunk)
            lost = trouble and rng.random() < 0.01
            out += [event for event in worker.frame(t) if not (lost and isinstance(event, Arrivals))]
        if t % S == 0:
            out += node.sample(t)
        if rng.random() < 0.01:
            out.append(Mark(t=max(0, t - rng.randrange(0, 20) * S), text=f"note at {t}"))
    out += hand.to(seconds * S, "drain")
    for t in range(seconds * S, (seconds + 5) * S, FRAME):
        for worker in load:
            out += worker.frame(t)
    out.append(End(t=(seconds + 5) * S, reason="done"))
    return out
