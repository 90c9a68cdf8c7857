"""A pretended run for tests of the screen: prepared views, a control that notes what it was asked, a lively variant."""

import asyncio
import math
import random

import msgspec

from lpxtop.metrics import view as v

S = 1_000_000


def quantiles(p50: float, n: int = 614) -> v.Quantiles:
    """Figures around a median; p99 only with 299 samples, as the real ones."""
    return v.Quantiles(
        count=n,
        mean=1.1 * p50,
        p50=p50,
        p90=1.4 * p50,
        p95=1.6 * p50 if n >= 59 else None,
        p99=2.9 * p50 if n >= 299 else None,
        max=5 * p50,
    )


def histogram(p50: float = 142.0) -> v.Histogram:
    """A bell on a log grid."""
    edges = tuple(10 * 1.15**i for i in range(41))
    counts = tuple(int(60 * math.exp(-((math.log(edges[i] * 1.07 / p50) / 0.35) ** 2))) for i in range(40))
    return v.Histogram(edges_ms=edges, counts=counts)


def series(seconds: int = 120, start_us: int = 0, load: float = 16.0) -> v.Series:
    """A minute or two with a ripple, a spike and a hole."""
    rng = random.Random(7)
    p50 = [None if 40 <= i < 44 else 11.0 + math.sin(i / 9) + load / 40 for i in range(seconds)]
    spike = [1.25 + 2 * rng.random() ** 8 for _ in p50]
    up = [0.0 if x is None else 80 * load + 40 * math.sin(i / 5) for i, x in enumerate(p50)]
    return v.Series(
        start_us=start_us,
        itl_p50_ms=tuple(p50),
        itl_p95_ms=tuple(None if x is None else 1.2 * x for x in p50),
        itl_p99_ms=tuple(None if x is None else x * s for x, s in zip(p50, spike, strict=True)),
        ttft_p50_ms=tuple(None if x is None else 12 * x for x in p50),
        ttft_p95_ms=tuple(None if x is None else 20 * x for x in p50),
        output_tokens_per_s=tuple(up),
        chunks_per_s=tuple(up),
        in_flight=tuple(None if x is None else load for x in p50),
        requests_per_s=tuple(None if x is None else load / 5 for x in p50),
        failed=(0,) * seconds,
        gpu_utilization_percent=tuple(80 + 10 * math.sin(i / 7) for i in range(seconds)),
        gpu_memory_ratio=tuple(0.5 + 0.001 * i for i in range(seconds)),
        gpu_power_watts=tuple(500.0 + 40 * math.sin(i / 7) for i in range(seconds)),
        waiting=tuple(float(i % 3) for i in range(seconds)),
        kv_usage=tuple(0.3 + i / 400 for i in range(seconds)),
    )


def gpu(index: int = 0, name: str = "NVIDIA H200", **changes: object) -> v.GpuView:
    """A busy GPU."""
    found = v.GpuView(
        source="gpu0",
        index=index,
        name=name,
        uuid=f"GPU-{index}",
        utilization_percent=86.0 - index,
        memory_used_bytes=int(61.2 * 2**30),
        memory_total_bytes=140 * 2**30,
        power_watts=512.0,
        power_limit_watts=700.0,
        sm_clock_mhz=1980,
        sm_clock_max_mhz=1980,
        memory_clock_mhz=3201,
        memory_clock_max_mhz=3201,
        temperature_c=64.0,
        utilization_history=tuple(50 + 40 * math.sin(i / 5 + index) for i in range(60)),
    )
    return msgspec.structs.replace(found, **changes)


SERVER = v.ServerView(
    url="http://gpu01:8000/metrics",
    age_s=0.8,
    running=16.0,
    waiting=3.0,
    kv_usage=0.91,
    prefix_hit_rate=0.12,
    preemptions_per_s=0.0,
    output_tokens_per_s=1290.0,
    ttft_mean_ms=150.0,
    itl_mean_ms=12.0,
    info={"version": "0.11.0", "kv_cache_dtype": "fp8"},
)

READY = v.RunView(
    t=3 * S,
    phase="ready",
    title="lpxtop",
    target_url="http://gpu01:8000/v1",
    model="qwen2.5-7b",
    server="vllm 0.11.0",
    wall_ns=1_800_000_000_000_000_000,
    load=v.LoadView(target=1, applied=1, max_concurrency=64, workers=1),
    gpus=(gpu(),),
    recording=v.RecordingView(state="on", path="/home/op/run-1400.jsonl", bytes=812),
)

LEVEL = v.LevelView(
    index=2,
    concurrency=16,
    from_us=72 * S,
    settled=True,
    steady=True,
    requests=614,
    output_tokens_per_s=1284.0,
    requests_per_s=3.2,
    ttft=quantiles(142),
    ttft_due=quantiles(150),
    icl=quantiles(11.8),
    itl=quantiles(11.8),
    tpot=quantiles(11.9),
    e2e=quantiles(3100),
)

LIVE = msgspec.structs.replace(
    READY,
    t=120 * S,
    phase="measure",
    load=v.LoadView(
        target=16,
        applied=16,
        in_flight=16,
        max_concurrency=64,
        due=630,
        sent=630,
        done={"ok": 614},
        workers=1,
    ),
    window=v.WindowView(
        window_s=30.0,
        covered_s=30.0,
        output_tokens_per_s=1284.0,
        chunks_per_s=1284.0,
        input_tokens_per_s=9410.0,
        requests_per_s=3.2,
        tokens_per_chunk=1.0,
        due=96,
        ok=96,
        failed=0,
        error_rate=0.0,
        ttft=quantiles(142, 96),
        icl=quantiles(11.8, 38_520),
        itl=quantiles(11.8, 38_520),
        tpot=quantiles(11.9, 96),
        e2e=quantiles(3100, 96),
        ttft_histogram=histogram(),
    ),
    level=LEVEL,
    levels=(
        msgspec.structs.replace(LEVEL, index=0, concurrency=1, from_us=3 * S, to_us=30 * S, output_tokens_per_s=110.0),
        msgspec.structs.replace(LEVEL, index=1, concurrency=4, from_us=30 * S, to_us=72 * S, output_tokens_per_s=420.0),
        LEVEL,
    ),
    series=series(),
    servers=(SERVER,),
    open_requests=(
        v.OpenRequest(source="load0", id=631, age_s=4.2, sent=True, ttft_ms=140.0, tokens=310, silent_s=0.01),
        v.OpenRequest(source="load0", id=640, age_s=9.5, sent=True, silent_s=9.5),
        v.OpenRequest(source="load0", id=641, age_s=0.1, sent=False),
    ),
    open_count=16,
    events=(
        v.EventLine(t=30 * S, level="note", text="concurrency 1 → 4", code="C1"),
        v.EventLine(t=72 * S, level="note", text="concurrency 4 → 16", code="C2"),
        v.EventLine(t=90 * S, level="warn", text="GPU 0: power cap"),
        v.EventLine(t=95 * S, level="note", text="before lunch", code="m1"),
    ),
    marks=((30 * S, "C1"), (72 * S, "C2"), (95 * S, "m1")),
    quality=v.QualityView(
        timestamp_source="kernel",
        read_delay_us_p99=85.0,
        coalesced_ratio=0.002,
        loop_lag_ms_p99=0.4,
        send_lateness_ms_p99=0.2,
        client_cpu_ratio=0.07,
    ),
    token_source="usage",
)

PAUSED = msgspec.structs.replace(
    LIVE, phase="paused", load=msgspec.structs.replace(LIVE.load, in_flight=3, target=16, applied=16)
)
NO_GPU = msgspec.structs.replace(
    LIVE, gpus=(), gpu_note="no GPU here: the NVIDIA driver's library (libnvidia-ml) was not found", servers=()
)
EIGHT = msgspec.structs.replace(
    LIVE,
    gpus=tuple(gpu(i, throttle=("power cap",) if i == 5 else ()) for i in range(8)),
    load=msgspec.structs.replace(LIVE.load, max_concurrency=1024),
)
STORM = msgspec.structs.replace(
    LIVE,
    load=msgspec.structs.replace(LIVE.load, done={"ok": 614, "rate_limited": 2311, "http_5xx": 12}),
    window=msgspec.structs.replace(
        LIVE.window, failed=880, ok=12, error_rate=0.986, requests_per_s=0.4, ttft=v.Quantiles(count=12, p50=160.0)
    ),
    events=tuple(
        v.EventLine(t=(60 + i) * S, level="error", text=f"rate_limited 429: slow down (×{i})", code="E")
        for i in range(60)
    ),
    verdicts=(v.Verdict(code="errors", text="errors dominate: 99% of the requests fail", level="error"),),
    quality=v.QualityView(
        timestamp_source="user",
        verdicts=(v.Verdict(code="client", text="the client was the limit: its loop ran 40 ms late"),),
    ),
)
WIDE_NAMES = msgspec.structs.replace(
    LIVE,
    model="深度求索-v3 🚀 \u202eevil\x1b[31m",
    gpus=(gpu(name="NVIDIA 显卡 H200 NVL"),),
    events=(v.EventLine(t=S, level="note", text="注记 🚀 done", code="m1"),),
)
UNTRUSTED = msgspec.structs.replace(
    LIVE,
    itl_trusted=False,
    window=msgspec.structs.replace(LIVE.window, output_tokens_per_s=None, icl=quantiles(23.5, 900), chunks_per_s=640.0),
    series=msgspec.structs.replace(LIVE.series, output_tokens_per_s=(None,) * 120),
)
OPEN_LOOP = msgspec.structs.replace(
    LIVE,
    load=v.LoadView(mode="poisson", rate=5.0, in_flight=23, due_not_sent=7, done={"ok": 100}),
    level=msgspec.structs.replace(LEVEL, concurrency=None, rate=5.0),
    slo=("ttft<500ms,tpot<50ms",),
)
WATCH = msgspec.structs.replace(
    LIVE,
    kind="watch",
    model="",
    load=v.LoadView(),
    level=None,
    levels=(),
    window=v.WindowView(window_s=30.0, covered_s=30.0),
    open_requests=(),
    open_count=0,
)
REPLAY = msgspec.structs.replace(
    LIVE,
    replay=v.ReplayView(
        path="/tmp/run-1400.jsonl",
        position_us=120 * S,
        start_us=0,
        end_us=720 * S,
        speed=2.0,
        playing=True,
        wall_ns=1_800_000_000_000_000_000,
        marks=((30 * S, "C"), (72 * S, "C"), (95 * S, "m"), (300 * S, "!"), (301 * S, "C")),
    ),
    recording=v.RecordingView(),
)
EMPTY = v.RunView()
ENDED = msgspec.structs.replace(PAUSED, phase="ended", ended="done")

VIEWS = {
    "ready": READY,
    "live": LIVE,
    "paused": PAUSED,
    "no_gpu": NO_GPU,
    "eight": EIGHT,
    "storm": STORM,
    "wide_names": WIDE_NAMES,
    "untrusted": UNTRUSTED,
    "open_loop": OPEN_LOOP,
    "watch": WATCH,
    "replay": REPLAY,
    "empty": EMPTY,
    "ended": ENDED,
}


class FakeControl:
    """Answers a screen with prepared views, and writes down what it was asked."""

    def __init__(self, view: v.RunView = READY) -> None:
        self.current = view
        self.calls: list[tuple[object, ...]] = []
        self.views = 0
        self.stopped = asyncio.Event()

    def can(self, what: str) -> bool:
        return {
            "replay": self.current.replay is not None,
            "load": self.current.replay is None and self.current.kind != "watch",
            "mark": self.current.replay is None,
        }.get(what, False)

    def view(self) -> v.RunView:
        self.views += 1
        return self.current

    def change(self, **changes: object) -> None:
        """Replace fields of the view."""
        self.current = msgspec.structs.replace(self.current, **changes)

    def start(self) -> None:
        self.calls.append(("start",))
        self.change(phase="measure")

    def pause(self) -> None:
        self.calls.append(("pause",))
        if self.current.replay is not None:
            self.change(replay=msgspec.structs.replace(self.current.replay, playing=False))
        else:
            self.change(phase="paused")

    def set_concurrency(self, n: int, by: str = "key") -> None:
        self.calls.append(("concurrency", n))
        self.change(load=msgspec.structs.replace(self.current.load, target=n, applied=n, in_flight=n))

    def set_rate(self, rate: float, by: str = "key") -> None:
        self.calls.append(("rate", rate))
        self.change(load=msgspec.structs.replace(self.current.load, rate=rate))

    def cancel_requests(self) -> None:
        self.calls.append(("cancel",))

    def mark(self, text: str) -> None:
        self.calls.append(("mark", text))

    def play(self) -> None:
        self.calls.append(("play",))
        assert self.current.replay is not None
        self.change(replay=msgspec.structs.replace(self.current.replay, playing=True))

    def set_speed(self, speed: float) -> None:
        self.calls.append(("speed", speed))

    def seek(self, t_us: int) -> None:
        self.calls.append(("seek", t_us))

    def step(self, samples: int) -> None:
        self.calls.append(("step", samples))

    def follow(self, on: bool) -> None:
        self.calls.append(("follow", on))

    def set_window(self, seconds: float) -> None:
        self.calls.append(("window", seconds))
        self.change(window=msgspec.structs.replace(self.current.window, window_s=seconds))

    async def stop(self, reason: str = "done") -> None:
        self.calls.append(("stop", reason))
        self.stopped.set()

    async def wait(self) -> None:
        await self.stopped.wait()


class LivelyControl(FakeControl):
    """A run that goes on by itself: figures that move as they would at some 5,000 tokens a second on 8 GPUs."""

    def __init__(self, view: v.RunView = EIGHT) -> None:
        super().__init__(view)
        self._began = 0.0
        self._rng = random.Random(3)

    def view(self) -> v.RunView:
        loop = asyncio.get_running_loop()
        self._began = self._began or loop.time() - 100
        now = loop.time() - self._began
        self.views += 1
        view = self.current
        if view.phase not in ("measure",):
            return view
        return self._moved(view, now)

    def _moved(self, view: v.RunView, now: float) -> v.RunView:
        rng, wave = self._rng, math.sin(now / 9)
        whole = int(now)
        start = max(0, whole - 299)
        slots = series(300, start * S, float(view.load.target or 1))
        shifted = {
            name: tuple(
                (None if x is None else x * (1 + 0.1 * math.sin((start + i) * 1.7)))
                for i, x in enumerate(getattr(slots, name))
            )[: whole - start + 1]
            for name in msgspec.structs.asdict(slots)
            if name not in ("start_us", "failed")
        }
        last = {name: (*values[:-1], (values[-1] or 0) * (0.9 + rng.random() / 5)) for name, values in shifted.items()}
        window = msgspec.structs.replace(
            view.window,
            output_tokens_per_s=5000 + 300 * wave + 30 * rng.random(),
            input_tokens_per_s=9000 + 500 * wave + 60 * rng.random(),
            requests_per_s=3 + wave / 5 + rng.random() / 10,
            ttft=quantiles(142 + 9 * wave + rng.random(), 96 + whole % 9),
            itl=quantiles(11.8 + wave + rng.random() / 9, 38_520 + int(now * 5000) % 5000),
            tpot=quantiles(11.9 + wave, 96),
            e2e=quantiles(3100 + 100 * wave, 96),
            ttft_histogram=histogram(142 + 20 * wave),
        )
        gpus = tuple(
            msgspec.structs.replace(
                found,
                utilization_percent=round(85 + 9 * math.sin(now / 3 + i)),
                power_watts=500 + 60 * math.sin(now / 4 + i),
                sm_clock_mhz=1980 - 15 * int(3 + 3 * math.sin(now / 4 + i)),
                utilization_history=tuple(85 + 9 * math.sin((whole - 60 + k) / 3 + i) for k in range(60)),
            )
            for i, found in enumerate(view.gpus)
        )
        return msgspec.structs.replace(
            view,
            t=int(now * S),
            window=window,
            gpus=gpus,
            series=v.Series(start_us=start * S, failed=(0,) * len(last["waiting"]), **last),
            load=msgspec.structs.replace(view.load, in_flight=max(0, (view.load.target or 0) - rng.randrange(2))),
            recording=msgspec.structs.replace(view.recording, bytes=int(now * 38_000)),
        )
