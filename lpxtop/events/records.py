"""The events: frozen records, one JSON line each (the codec makes the lines). Must not read a clock or do I/O.

`t` is session time in integer µs, `src` names the source, `seq` counts its events from 0. Names ending in `_us` are
µs; those of `finished` counted from `sent` say so. None is "not known" and is left out of the line.
"""

from typing import Any

import msgspec

SCHEMA = (1, 0)
TICK_US = 10
"""Resolution of arrival gaps."""
FRAME_US = 250_000
"""How often a load process sends a frame of events."""
KEYFRAME_US = 10_000_000


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="k", forbid_unknown_fields=True):
    """What every event has. `extra` holds fields of a newer minor version, written back as they were."""

    t: int
    src: str = "session"
    seq: int = 0
    extra: dict[str, Any] | None = msgspec.field(default=None, name="~extra")


class Header(Event, frozen=True, kw_only=True, tag="header"):
    """The first line: what is needed to understand the rest and to run it again."""

    schema: tuple[int, int]
    session: str
    wall_ns: int
    mono_ns: int
    lpxtop: str
    kind: str = "run"  # run, demo, watch
    host: dict[str, Any] = {}
    target: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    negotiated: dict[str, Any] = {}
    prompts: dict[str, Any] = {}
    slo: list[str] = []
    tags: dict[str, str] = {}
    gpus: list[dict[str, Any]] = []
    simulated: bool = False
    command: list[str] = []


class Source(Event, frozen=True, kw_only=True, tag="source"):
    """A load process or a probe joined, left or failed. `state`: joined, left, failed, unavailable."""

    kind: str  # load, gpu, server, joined
    state: str
    host: str | None = None
    text: str | None = None
    clock_offset_us: int | None = None
    clock_error_us: int | None = None
    descriptor: dict[str, Any] = {}


class Phase(Event, frozen=True, kw_only=True, tag="phase"):
    """A phase or a new load level begins at `t`. `name`: ready, warmup, measure, paused, drain."""

    name: str
    level: int
    concurrency: int | None = None
    rate: float | None = None


class Control(Event, frozen=True, kw_only=True, tag="control"):
    """Somebody changed the load. `what`: concurrency, rate, pause, resume, stop, cancel."""

    what: str
    before: float | None = None
    after: float | None = None
    by: str = "key"


class Request(Event, frozen=True, kw_only=True, tag="request"):
    """A due request is taken up. Sent again, with `sent`, if the first line came before it was sent.

    `slot` is the short number that `arrivals` use; it is free again after the frame that carries `finished`.
    """

    id: int
    slot: int
    due: int
    sent: int | None = None
    warmup: bool = False
    connection: str | None = None  # new, reused
    connect_us: int | None = None
    tls_us: int | None = None
    prompt_tokens: int | None = None  # expected
    max_tokens: int | None = None


class Arrivals(Event, frozen=True, kw_only=True, tag="arrivals"):
    """Token-bearing chunks since the last frame, as columns.

    `slot[i]` had `n[i]` chunks; their gaps follow each other in `gap`, in ticks of 10 µs, each the difference of
    arrivals since `sent` rounded to ticks, so rounding never accumulates; a request's first gap counts from `sent`.
    `tokens` lists [index into gap, tokens] where a chunk held other than one token (0: not known), `same` the
    indexes completed by the same read as their predecessor of that stream, `reasoning` the slots whose chunks in
    this frame are reasoning.
    """

    slot: list[int]
    n: list[int]
    gap: list[int]
    tokens: list[tuple[int, int]] = []
    same: list[int] = []
    reasoning: list[int] = []


class Finished(Event, frozen=True, kw_only=True, tag="finished"):
    """A request ended, one way or another. Times `*_us` count from `sent`; `due` and `sent` are session time.

    `output_tokens` counts everything generated, reasoning included; `token_source` says where it came from:
    continuous_usage, token_ids, logprobs, usage, chunks.
    """

    id: int
    slot: int
    due: int
    outcome: str
    sent: int | None = None
    warmup: bool = False
    status: int | None = None
    finish_reason: str | None = None
    first_byte_us: int | None = None
    first_event_us: int | None = None
    first_token_us: int | None = None
    first_reasoning_us: int | None = None
    first_content_us: int | None = None
    last_token_us: int | None = None
    end_us: int | None = None
    chunks: int = 0
    first_chunk_tokens: int | None = None  # n₁ of the definitions; None when not known
    input_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    cached_tokens: int | None = None
    token_source: str | None = None
    connection: str | None = None
    dns_us: int | None = None
    connect_us: int | None = None
    tls_us: int | None = None
    rtt_us: int | None = None
    rtt_min_us: int | None = None
    max_tokens: int | None = None
    coalesced: int = 0
    user_stamps: int = 0
    attempts: int = 1
    request_id: str | None = None
    server_request_id: str | None = None
    rate_limit: dict[str, str] = {}
    server_timings: dict[str, float] = {}
    flags: list[str] = []
    error_type: str | None = None
    error: str | None = None


class LoadSample(Event, frozen=True, kw_only=True, tag="load"):
    """The load process about itself, each frame. Counts are since its start except where named.

    The three `*_us` maps are sparse log buckets (metrics/distribution.py, as events/buckets.py defines them) of this
    frame: the loop's lateness, kernel stamp to reader, due to sent. `coalesced` and `reads` are of this frame too, as
    is `cpu_us` (of `wall_us`).
    """

    target: int | None = None
    rate: float | None = None
    in_flight: int = 0
    due_not_sent: int = 0
    due: int = 0
    sent: int = 0
    done: dict[str, int] = {}
    loop_lag_us: dict[int, int] = {}
    read_delay_us: dict[int, int] = {}
    send_lateness_us: dict[int, int] = {}
    events: int = 0
    reads: int = 0
    coalesced: int = 0
    user_stamps: int = 0
    timestamp_source: str | None = None  # kernel, user
    cpu_us: int | None = None
    wall_us: int | None = None
    rss_bytes: int | None = None
    backlog_bytes: int = 0
    dropped_events: int = 0


class Gpu(Event, frozen=True, kw_only=True, tag="gpu"):
    """One sample of every GPU of a source, as columns in the order of its inventory (`source.descriptor["gpus"]`).

    A column that nobody could read is absent; a missing cell is null. `throttle_ns` maps a reason to cumulative
    nanoseconds per GPU; `throttle_bits` is NVML's raw mask. `status`: ok, lost, stale, error.
    """

    status: list[str] = []
    utilization_percent: list[float | None] = []
    memory_utilization_percent: list[float | None] = []
    memory_used_bytes: list[int | None] = []
    memory_reserved_bytes: list[int | None] = []
    memory_total_bytes: list[int | None] = []
    power_watts: list[float | None] = []
    power_average_watts: list[float | None] = []
    power_limit_watts: list[float | None] = []
    energy_j: list[float | None] = []
    sm_clock_mhz: list[int | None] = []
    memory_clock_mhz: list[int | None] = []
    pstate: list[int | None] = []
    temperature_c: list[float | None] = []
    memory_temperature_c: list[float | None] = []
    thermal_margin_c: list[float | None] = []
    throttle_bits: list[int | None] = []
    throttle_ns: dict[str, list[int | None]] = {}
    pcie_generation: list[int | None] = []
    pcie_width: list[int | None] = []
    pcie_tx_bytes: list[int | None] = []  # counters, as are those of NVLink (all links of the GPU)
    pcie_rx_bytes: list[int | None] = []
    nvlink_tx_bytes: list[int | None] = []
    nvlink_rx_bytes: list[int | None] = []
    health: list[dict[str, Any]] = []  # error counts, ECC and row remapping; every few seconds, as are processes
    processes: list[list[dict[str, Any]]] = []
    notes: dict[str, str] = {}  # column -> why it is missing; also of `status`, and of `period` when it is long
    cost_us: int | None = None


class Server(Event, frozen=True, kw_only=True, tag="server"):
    """One scrape of the server's own metrics: canonical concepts, and changed raw series by id."""

    url: str
    ok: bool = True
    scrape_us: int | None = None
    concepts: dict[str, float] = {}
    engines: dict[str, dict[str, float]] = {}
    histograms: dict[str, dict[str, Any]] = {}
    names: dict[int, str] = {}
    changed: list[tuple[int, float]] = []
    info: dict[str, str] = {}
    error: str | None = None


class Mark(Event, frozen=True, kw_only=True, tag="mark"):
    """A note by a person, or an automatic one. `level`: note, info, warn, error."""

    text: str
    level: str = "note"
    code: str | None = None


class Keyframe(Event, frozen=True, kw_only=True, tag="keyframe"):
    """The state's snapshot: restoring it is the same as having folded everything before it, for the screen.

    Only the recording's writer sets `offset` (of this line) and `prev` (of the keyframe before); a reader trusts
    them only in the file they were written to.
    """

    state: dict[str, Any]
    offset: int | None = None
    prev: int | None = None


class ServerChanged(Event, frozen=True, kw_only=True, tag="server_changed"):
    """Version, launch arguments or limits differ after a restart; a new level begins."""

    what: str
    before: str | None = None
    after: str | None = None


class End(Event, frozen=True, kw_only=True, tag="end"):
    """A clean finish. `reason`: done, interrupted, failed."""

    reason: str
    summary: dict[str, Any] = {}
    verdicts: list[dict[str, Any]] = []


class Unknown(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a kind, or of a shape, this version does not know; `raw` is written back untouched."""

    t: int
    k: str
    raw: dict[str, Any]
    src: str = ""
    seq: int = 0


KINDS: tuple[type[Event], ...] = (
    Header, Source, Phase, Control, Request, Arrivals, Finished, LoadSample, Gpu, Server, Mark, Keyframe,
    ServerChanged, End,
)  # fmt: skip
"""Every kind, in the order of the design's table."""

AnyEvent = Event | Unknown
