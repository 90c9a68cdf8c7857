"""Settings of the simulated server, and named sets of them. Plausible engines, not claims about a product."""

import msgspec

from lpxtop.errors import UsageError


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A continuous-batching engine. Times in seconds, sizes in tokens.

    A step takes `step_base_s + step_per_sequence_s · decoding + step_per_kv_token_s · KV tokens +
    prefill tokens / prefill_tokens_per_s`, divided by the GPU's clock factor. A step processes at most
    `max_batched_tokens` (decode first, the rest prefill in chunks). `tokens_per_step` above 1 is speculative
    decoding: each draft token is accepted with probability `acceptance`.
    """

    max_sequences: int = 48
    max_batched_tokens: int = 2048
    kv_tokens: int = 120_000
    block_tokens: int = 16
    max_model_len: int = 32_768
    prefill_tokens_per_s: float = 40_000.0
    step_base_s: float = 0.0065
    step_per_sequence_s: float = 0.00006
    step_per_kv_token_s: float = 0.0000001
    prefix_cache: bool = False
    tokens_per_step: int = 1
    acceptance: float = 1.0
    jitter: float = 0.02


class GpuConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated GPU. Watts, MHz, °C, bytes."""

    name: str = "SIM H100 80GB"
    memory_total_bytes: int = 80 << 30
    weights_bytes: int = 16 << 30
    kv_bytes_per_token: int = 131_072
    idle_watts: float = 75.0
    decode_watts: float = 300.0
    batch_watts: float = 220.0
    prefill_watts: float = 380.0
    limit_watts: float = 700.0
    sm_clock_max_mhz: int = 1980
    memory_clock_max_mhz: int = 2619
    ambient_c: float = 32.0
    degrees_per_watt: float = 0.062
    thermal_seconds: float = 20.0
    slowdown_c: float = 87.0


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong. `*_every` n: every n-th request; 0: never. Changeable at run time (POST /sim/trouble)."""

    delay_ms: float = 0.0  # before the head of every answer
    stall_every: int = 0  # silence after the third token, for good
    cut_every: int = 0  # the connection closes after the third token
    error_every: int = 0  # an error object inside the stream after the third token
    rate_limit_every: int = 0  # 429 with Retry-After
    server_error_every: int = 0  # 500
    loading_s: float = 0.0  # 503 for so long after the start
    buffered: bool = False  # everything at the end, as a buffering proxy would


class SimConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated server."""

    host: str = "127.0.0.1"
    port: int = 8000
    model: str = "sim-8b"
    api_key: str | None = None
    seed: int = 0
    stamp: bool = False  # each token carries its write time, and /sim/log holds them
    engine: EngineConfig = EngineConfig()
    gpu: GpuConfig = GpuConfig()
    trouble: Trouble = Trouble()


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
