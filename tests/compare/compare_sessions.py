"""Sessions for the tests of compare: a closed loop against a server whose speed wanders like a real one's."""

import math
import random
from typing import Any

from lpxtop.events.records import Arrivals, End, Event, Finished, Gpu, Header, LoadSample, Phase, Request, Source
from lpxtop.metrics.samples import RunSample, Sampler

S = 1_000_000
FRAME = 250_000
SETTLE_S = 2.0


def header(**changes: Any) -> Header:
    """A run against model m on server vLLM, 16 tokens out."""
    plan = {
        "load": {"mode": "closed", "concurrency": 8, "max_concurrency": 64},
        "sampling": {"max_tokens": 8, "temperature": 0.0, "top_p": None, "stream": True, "extra_body": {}},
        "prompts": {"tokens": 64, "path": None, "system": None, "seed": 0},
        "settle_s": SETTLE_S, "workers": 1,
    }  # fmt: skip
    fields: dict[str, Any] = {
        "t": 0, "schema": (1, 0), "session": "s", "wall_ns": 1_800_000_000_000_000_000, "mono_ns": 0,
        "lpxtop": "0.1.0", "target": {"url": "http://h:8000/v1", "api": "chat", "model": "m"}, "plan": plan,
        "negotiated": {"ignore_eos": True, "server_kind": "vLLM", "server_version": "1"},
        "prompts": {"source": "synthetic", "tokens": 64, "sha256": "a" * 64}, "slo": ["ttft<250ms"],
    }  # fmt: skip
    return Header(**(fields | changes))


class Wander:
    """Multiplicative noise that remembers: ln of it is AR(1) with this time constant and spread."""

    def __init__(self, rng: random.Random, spread: float, tau_s: float, end_s: float) -> None:
        keep = math.exp(-FRAME / S / tau_s)
        shock = spread * math.sqrt(1 - keep * keep)
        level = rng.gauss(0, spread)
        self.values = []
        for _ in range(int((end_s + 10) * S / FRAME)):
            self.values.append(math.exp(level))
            level = keep * level + rng.gauss(0, shock)

    def at(self, t: int) -> float:
        return self.values[min(max(t, 0) // FRAME, len(self.values) - 1)]


def requests(
    seed: int, *, seconds: float, users: int = 8, ttft_ms: float = 120, gap_ms: float = 60, tokens: int = 8,
    spread: float = 0.1, tau_s: float = 2.0, jitter: float = 0.25, failing: float = 0.0,
) -> list[dict[str, Any]]:  # fmt: skip
    """What each user asked, one request after the other; `ticks` are arrivals since sent."""
    rng = random.Random(seed)
    first, later = Wander(rng, spread, tau_s, seconds), Wander(rng, spread / 2, tau_s, seconds)
    made: list[dict[str, Any]] = []
    for user in range(users):
        t = rng.randrange(0, 300_000)
        while t < seconds * S:
            ticks = [round(ttft_ms * first.at(t) * math.exp(rng.gauss(0, jitter)) * 100)]
            for _ in range(tokens - 1):
                gap = gap_ms * later.at(t + ticks[-1] * 10) * math.exp(rng.gauss(0, 0.1))
                ticks.append(ticks[-1] + round(gap * 100))
            outcome = "http_5xx" if rng.random() < failing else "ok"
            made.append({"sent": t, "slot": user, "ticks": ticks, "outcome": outcome})
            t += ticks[-1] * 10 + 1000
    return made


def events(
    made: list[dict[str, Any]], *, seconds: float, concurrency: int = 8, head: Header | None = None,
    watts: float | None = None, limit: float = 700.0, driver: str = "550.1",
) -> list[Event]:  # fmt: skip
    """The requests as a load process tells of them, a frame every 250 ms, and one GPU that serves the endpoint."""
    found: list[Event] = [header() if head is None else head]
    found.append(Phase(t=0, name="measure", level=0, concurrency=concurrency))
    gpu = {"index": 0, "name": "H100", "uuid": "GPU-1", "power_limit_watts": limit}
    if watts is not None:
        descriptor = {"gpus": [gpu], "driver": driver, "serves_target": True}
        found.append(Source(t=0, src="gpu0", kind="gpu", state="joined", descriptor=descriptor))
    frames: dict[int, list[tuple[int, int, dict[str, Any]]]] = {}
    for number, one in enumerate(sorted(made, key=lambda one: one["sent"])):
        frames.setdefault(one["sent"] // FRAME, []).append((0, number, one))
        frames.setdefault((one["sent"] + one["ticks"][-1] * 10) // FRAME, []).append((2, number, one))
        by_frame: dict[int, list[int]] = {}
        before = 0
        for tick in one["ticks"]:
            by_frame.setdefault((one["sent"] + tick * 10) // FRAME, []).append(tick - before)
            before = tick
        for frame, gaps in by_frame.items():
            frames.setdefault(frame, []).append((1, number, {"slot": number, "gaps": gaps}))
    seq = [0]

    def told(kind: type[Event], t: int, **fields: Any) -> None:
        found.append(kind(t=t, src="load0", seq=seq[0], **fields))
        seq[0] += 1

    for frame in range(int(seconds * S / FRAME)):
        t = (frame + 1) * FRAME
        parts = frames.get(frame, [])
        for _, number, one in [part for part in parts if part[0] == 0]:
            told(Request, t, id=number, slot=number, due=one["sent"], sent=one["sent"], max_tokens=8)
        batches = [part[2] for part in parts if part[0] == 1]
        if batches:
            told(
                Arrivals, t, slot=[batch["slot"] for batch in batches], n=[len(batch["gaps"]) for batch in batches],
                gap=[gap for batch in batches for gap in batch["gaps"]],
            )  # fmt: skip
        for _, number, one in [part for part in parts if part[0] == 2]:
            told(Finished, t, **_finished(number, one))
        told(LoadSample, t, timestamp_source="kernel")
        if watts is not None and frame % 2:
            found.append(Gpu(t=t, src="gpu0", status=["ok"], power_watts=[watts], power_limit_watts=[limit]))
    end = round(seconds * S)
    found += [Phase(t=end, name="drain", level=0, concurrency=concurrency), End(t=end + 1, reason="done")]
    return found


def _finished(number: int, one: dict[str, Any]) -> dict[str, Any]:
    ticks = one["ticks"]
    return {
        "id": number, "slot": number, "due": one["sent"], "sent": one["sent"], "outcome": one["outcome"],
        "first_token_us": ticks[0] * 10, "last_token_us": ticks[-1] * 10, "end_us": ticks[-1] * 10,
        "chunks": len(ticks), "first_chunk_tokens": 1, "input_tokens": 64, "output_tokens": len(ticks),
        "token_source": "continuous_usage", "max_tokens": 8,
    }  # fmt: skip


def sampled(made: list[Event], label: str = "run") -> RunSample:
    """The session folded."""
    sampler = Sampler()
    for event in made:
        sampler.apply(event)
    return sampler.sample(label)


def session(seed: int, seconds: float, label: str = "run", **how: Any) -> RunSample:
    """A whole run in one call: the load's keywords, and those of `events` behind `told`."""
    told = how.pop("told", {})
    return sampled(events(requests(seed, seconds=seconds, **how), seconds=seconds, **told), label)
