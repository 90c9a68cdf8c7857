"""Settings of the simulated server, and named sets of them. Plausible engines, not claims about a product."""

from typing import Annotated, Any

import msgspec

from lpxtop.errors import UsageError

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
Every = Annotated[int, msgspec.Meta(ge=0)]
"""Every n-th request; 0 is never."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A continuous-batching engine. Times in seconds, sizes in tokens.

    A step takes `step_base_s + step_per_sequence_s · decoding + step_per_kv_token_s · KV tokens +
    prefill tokens / prefill_tokens_per_s`, divided by the GPU's clock factor. A step processes at most
    `max_batched_tokens` (decode first, the rest prefill in chunks). `tokens_per_step` above 1 is speculative
    decoding: each draft token is accepted with probability `acceptance`.
    """

    max_sequences: AtLeastOne = 48
    max_batched_tokens: AtLeastOne = 2048
    kv_tokens: AtLeastOne = 120_000
    block_tokens: AtLeastOne = 16
    max_model_len: AtLeastOne = 32_768
    prefill_tokens_per_s: Positive = 40_000.0
    step_base_s: Positive = 0.0065
    step_per_sequence_s: NotNegative = 0.00006
    step_per_kv_token_s: NotNegative = 0.0000001
    prefix_cache: bool = False
    tokens_per_step: AtLeastOne = 1
    acceptance: Ratio = 1.0
    jitter: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.02

    @property
    def blocks(self) -> int:
        """Whole KV blocks there are."""
        return self.kv_tokens // self.block_tokens


class GpuConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A simulated GPU. Watts, MHz, °C, bytes."""

    name: str = "SIM H100 80GB"
    memory_total_bytes: AtLeastOne = 80 << 30
    weights_bytes: AtLeastOne = 16 << 30
    kv_bytes_per_token: AtLeastOne = 131_072
    idle_watts: Positive = 75.0
    decode_watts: NotNegative = 300.0
    batch_watts: NotNegative = 220.0
    prefill_watts: NotNegative = 380.0
    limit_watts: Positive = 700.0
    sm_clock_max_mhz: AtLeastOne = 1980
    memory_clock_max_mhz: AtLeastOne = 2619
    ambient_c: float = 32.0
    degrees_per_watt: NotNegative = 0.062
    thermal_seconds: Positive = 20.0
    slowdown_c: float = 87.0


class Trouble(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes wrong. `*_every` n: every n-th request; 0: never. Changeable at run time (POST /sim/trouble)."""

    delay_ms: NotNegative = 0.0  # before the head of every answer
    slow_head_every: Every = 0  # the head of a stream comes in pieces, over 0.4 s
    stall_every: Every = 0  # silence after the third token, for good
    cut_every: Every = 0  # the connection closes after the third token
    error_every: Every = 0  # an error object inside the stream after the third token
    rate_limit_every: Every = 0  # 429 with Retry-After
    server_error_every: Every = 0  # 500
    loading_s: NotNegative = 0.0  # 503 for so long from when this was set: the start, or the change
    buffered: bool = False  # everything at the end, as a buffering proxy would


class SimConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The simulated server."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 8000
    model: str = "sim-8b"
    api_key: str | None = None
    seed: int = 0
    stamp: bool = False  # each token carries its write time, and /sim/log holds them
    engine: EngineConfig = EngineConfig()
    gpu: GpuConfig = GpuConfig()
    trouble: Trouble = Trouble()

    def __repr__(self) -> str:
        return f"SimConfig(model={self.model!r}, host={self.host!r}, port={self.port})"


PRESETS: dict[str, SimConfig] = {
    "h100-8b": SimConfig(),
    "fast-decode": SimConfig(
        model="sim-fast",
        engine=EngineConfig(
            max_sequences=32, kv_tokens=40_000, prefill_tokens_per_s=60_000, step_base_s=0.002,
            step_per_sequence_s=0.00004, tokens_per_step=1,
        ),
        gpu=GpuConfig(name="SIM fast decoder", limit_watts=500),
    ),
    "small": SimConfig(
        model="sim-small",
        engine=EngineConfig(
            max_sequences=8, kv_tokens=8_000, max_batched_tokens=512, prefill_tokens_per_s=4_000, step_base_s=0.018,
            step_per_sequence_s=0.0006,
        ),
        gpu=GpuConfig(name="SIM L4 24GB", memory_total_bytes=24 << 30, limit_watts=72, idle_watts=16, decode_watts=38,
                      batch_watts=14, prefill_watts=30, sm_clock_max_mhz=2040, memory_clock_max_mhz=6251,
                      degrees_per_watt=0.55),
    ),
}  # fmt: skip


def preset(name: str) -> SimConfig:
    """Raises UsageError, naming the presets there are."""
    try:
        return PRESETS[name]
    except KeyError:
        raise UsageError(f"there is no preset {name!r}", f"presets: {', '.join(PRESETS)}") from None


def config(settings: dict[str, Any]) -> SimConfig:
    """A checked configuration. Raises UsageError for an unknown setting or a value that cannot be."""
    try:
        made = msgspec.convert(settings, SimConfig)
    except msgspec.ValidationError as error:
        raise UsageError(f"a setting of the simulated server is wrong: {error}", "lpxtop sim --help") from None
    if made.engine.blocks < 2:
        raise UsageError("the engine's kv_tokens must hold at least two blocks of block_tokens", "lpxtop sim --help")
    return made
