"""What a screen, a progress line or a panel may see of a run: frozen records, made by `state.RunState.view`.

All figures say what they cover. Latencies are ms, times session µs, ratios 0..1. None is "not known" or "not
measured"; an empty tuple is "nothing yet". Must not compute: state does, and definitions say how.
"""

from typing import Any

import msgspec


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """Frozen, keyword-only."""


class Quantiles(_Record, frozen=True, kw_only=True):
    """A distribution's figures. p95 needs 59 samples, p99 299; with fewer it is None."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


class Histogram(_Record, frozen=True, kw_only=True):
    """Counts on a log grid: `edges_ms[i]`..`edges_ms[i + 1]` holds `counts[i]`."""

    edges_ms: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()


class WindowView(_Record, frozen=True, kw_only=True):
    """What users felt in the last `window_s` seconds. TTFT counts requests whose first token came in the window,
    running ones included; tpot and e2e those that ended in it."""

    window_s: float
    covered_s: float
    output_tokens_per_s: float | None = None
    chunks_per_s: float | None = None
    input_tokens_per_s: float | None = None
    requests_per_s: float | None = None
    tokens_per_chunk: float | None = None
    due: int = 0
    ok: int = 0
    failed: int = 0
    error_rate: float | None = None
    ttft: Quantiles = Quantiles()
    icl: Quantiles = Quantiles()
    itl: Quantiles = Quantiles()
    tpot: Quantiles = Quantiles()
    e2e: Quantiles = Quantiles()
    goodput_requests_per_s: float | None = None
    ttft_histogram: Histogram = Histogram()


class LevelView(_Record, frozen=True, kw_only=True):
    """One load level, from its change plus the settle time until the next. `excluded` requests straddled an edge."""

    index: int
    concurrency: int | None = None
    rate: float | None = None
    from_us: int = 0
    to_us: int | None = None
    settled: bool = False
    steady: bool | None = None  # None: too short to tell
    excluded: int = 0
    requests: int = 0
    failed: int = 0
    output_tokens_per_s: float | None = None
    requests_per_s: float | None = None
    ttft: Quantiles = Quantiles()
    ttft_due: Quantiles = Quantiles()
    icl: Quantiles = Quantiles()
    itl: Quantiles = Quantiles()
    tpot: Quantiles = Quantiles()
    e2e: Quantiles = Quantiles()
    ttft_histogram: Histogram = Histogram()


class LoadView(_Record, frozen=True, kw_only=True):
    """The slider's three values and the counts since the start."""

    mode: str = "closed"
    target: int | None = None
    applied: int | None = None
    in_flight: int = 0
    rate: float | None = None
    max_concurrency: int = 1024
    due_not_sent: int = 0
    due: int = 0
    sent: int = 0
    done: dict[str, int] = {}
    workers: int = 0


class Series(_Record, frozen=True, kw_only=True):
    """One value per 1 s slot, oldest first; the last slot may still fill. `start_us` is the first slot's begin.

    None where there was nothing to measure. All columns have the same length. Percentiles are nearest rank of that
    second's samples, however few: a p99 of 20 gaps is their longest. `chunks_per_s` is for when tokens per chunk are
    not known and `output_tokens_per_s` is None.
    """

    start_us: int = 0
    itl_p50_ms: tuple[float | None, ...] = ()
    itl_p95_ms: tuple[float | None, ...] = ()
    itl_p99_ms: tuple[float | None, ...] = ()
    ttft_p50_ms: tuple[float | None, ...] = ()
    ttft_p95_ms: tuple[float | None, ...] = ()
    output_tokens_per_s: tuple[float | None, ...] = ()
    in_flight: tuple[float | None, ...] = ()
    chunks_per_s: tuple[float | None, ...] = ()
    requests_per_s: tuple[float | None, ...] = ()
    failed: tuple[int, ...] = ()
    gpu_utilization_percent: tuple[float | None, ...] = ()  # mean over GPUs
    gpu_memory_ratio: tuple[float | None, ...] = ()
    gpu_power_watts: tuple[float | None, ...] = ()  # sum
    waiting: tuple[float | None, ...] = ()
    kv_usage: tuple[float | None, ...] = ()


class GpuView(_Record, frozen=True, kw_only=True):
    """One GPU now."""

    source: str
    index: int
    name: str = ""
    uuid: str = ""
    host: str | None = None
    simulated: bool = False
    status: str = "ok"
    age_s: float = 0.0
    utilization_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    temperature_c: float | None = None
    thermal_margin_c: float | None = None
    pstate: int | None = None
    throttle: tuple[str, ...] = ()  # words: power cap, thermal, …
    utilization_history: tuple[float | None, ...] = ()  # per 1 s slot


class ServerView(_Record, frozen=True, kw_only=True):
    """The server's own figures from the last scrape; counters as rates over the window."""

    url: str
    age_s: float = 0.0
    ok: bool = True
    error: str | None = None
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    prefix_hit_rate: float | None = None
    preemptions_per_s: float | None = None
    output_tokens_per_s: float | None = None
    ttft_mean_ms: float | None = None
    itl_mean_ms: float | None = None
    info: dict[str, str] = {}


class OpenRequest(_Record, frozen=True, kw_only=True):
    """A request in flight: what an on-call needs when nothing finishes."""

    source: str
    id: int
    age_s: float
    sent: bool
    ttft_ms: float | None = None
    tokens: int = 0
    silent_s: float = 0.0  # since its last token, or since sent


class EventLine(_Record, frozen=True, kw_only=True):
    """A line of the event list. `code` is C3 for the third concurrency change, m1 for a note, E for errors."""

    t: int
    level: str  # note, info, warn, error
    text: str
    code: str | None = None


class QualityView(_Record, frozen=True, kw_only=True):
    """How far the figures can be trusted."""

    timestamp_source: str | None = None
    read_delay_us_p99: float | None = None
    coalesced_ratio: float | None = None
    loop_lag_ms_p99: float | None = None
    send_lateness_ms_p99: float | None = None
    client_cpu_ratio: float | None = None
    dropped_events: int = 0
    verdicts: tuple["Verdict", ...] = ()


class Verdict(_Record, frozen=True, kw_only=True):
    """A judgement with its evidence. `level`: info, warn, error. `next_step`: what to try, where there is something."""

    code: str
    text: str
    level: str = "warn"
    evidence: dict[str, Any] = {}
    next_step: str | None = None


class RecordingView(_Record, frozen=True, kw_only=True):
    """State of the recording, as the session knows it. `state`: on, off, failed."""

    state: str = "off"
    path: str | None = None
    bytes: int = 0
    error: str | None = None


class ReplayView(_Record, frozen=True, kw_only=True):
    """The scrub bar. `marks` are (t, glyph) with glyph C, !, m or :, most serious first when they collide."""

    path: str = ""
    position_us: int = 0
    start_us: int = 0
    end_us: int = 0
    speed: float = 1.0  # 0 is "max"
    playing: bool = False
    following: bool = False
    wall_ns: int | None = None
    marks: tuple[tuple[int, str], ...] = ()
    note: str | None = None


class RunView(_Record, frozen=True, kw_only=True):
    """Everything a frame shows."""

    t: int = 0
    phase: str = "ready"  # ready, warmup, measure, paused, drain, ended
    title: str = ""
    target_url: str = ""
    model: str = ""
    server: str = ""
    kind: str = "run"
    simulated: bool = False
    wall_ns: int | None = None  # of session time 0
    load: LoadView = LoadView()
    window: WindowView = WindowView(window_s=30.0, covered_s=0.0)
    level: LevelView | None = None
    levels: tuple[LevelView, ...] = ()
    series: Series = Series()
    gpus: tuple[GpuView, ...] = ()
    gpu_note: str | None = None
    servers: tuple[ServerView, ...] = ()
    open_requests: tuple[OpenRequest, ...] = ()
    open_count: int = 0
    events: tuple[EventLine, ...] = ()
    marks: tuple[tuple[int, str], ...] = ()  # (t, code) of concurrency changes and notes, for the charts
    quality: QualityView = QualityView()
    verdicts: tuple[Verdict, ...] = ()  # why it is slow, weightiest first; `quality` has its own
    slo: tuple[str, ...] = ()
    token_source: str | None = None
    itl_trusted: bool = True  # False: token counts per chunk are not known, itl equals icl and is labelled icl
    recording: RecordingView = RecordingView()
    replay: ReplayView | None = None
    ended: str | None = None
