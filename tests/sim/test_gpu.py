"""The simulated GPU: power, clocks, temperature and counters by hand."""

from lpxtop.sim.gpu import POWER_CAP, THERMAL, SimulatedGpu
from lpxtop.sim.presets import GpuConfig

CONFIG = GpuConfig(idle_watts=100, decode_watts=300, batch_watts=200, prefill_watts=300, limit_watts=500,
                   ambient_c=30, degrees_per_watt=0.1, thermal_seconds=10, slowdown_c=87)  # fmt: skip


def settle(gpu, seconds=120, **work):
    for _ in range(int(seconds * 10)):
        gpu.advance(0.1, **work)


def test_at_rest_it_draws_its_idle_power():
    """Nothing to do: idle watts, full clocks, no throttling but the idle bit."""
    gpu = SimulatedGpu(CONFIG)
    settle(gpu, busy=0, batch=0, prefill=0, kv_tokens=0)

    assert gpu.power_watts == 100
    assert gpu.clock_factor == 1.0
    assert gpu.columns()["throttle_bits"] == [1]
    assert abs(gpu.temperature_c - 40) < 0.1


def test_below_the_limit_power_is_the_sum_of_its_work():
    """Fully busy decoding with half a batch: 100 + 300 + 100 W, on the limit and not over it."""
    gpu = SimulatedGpu(CONFIG)
    settle(gpu, busy=0.1, batch=0.5, prefill=0, kv_tokens=0)

    assert round(gpu.power_watts) == 500
    assert round(gpu.clock_factor, 3) == 1.0
    assert gpu.columns()["utilization_percent"] == [100]


def test_over_the_limit_power_is_capped_and_clocks_drop():
    """800 W wanted at a limit of 500: capped, clocks at (500/800)^(1/3), the reason counted in ns."""
    gpu = SimulatedGpu(CONFIG)
    settle(gpu, seconds=60, busy=0.1, batch=0.5, prefill=1.0, kv_tokens=0)

    assert round(gpu.power_watts, 6) == 500
    assert abs(gpu.clock_factor - (500 / 800) ** (1 / 3)) < 0.01
    assert gpu.throttle_bits & POWER_CAP
    assert 58e9 < gpu.throttle_ns["power_cap"] <= 60e9
    assert gpu.throttle_ns["thermal"] == 0


def test_heat_builds_up_slowly_and_throttles():
    """With poor cooling the slowdown temperature is crossed after a while, not at once."""
    gpu = SimulatedGpu(GpuConfig(**{**_fields(CONFIG), "degrees_per_watt": 0.15}))
    settle(gpu, seconds=3, busy=0.1, batch=0.5, prefill=0, kv_tokens=0)
    early = gpu.throttle_bits & THERMAL
    settle(gpu, busy=0.1, batch=0.5, prefill=0, kv_tokens=0)

    assert not early
    assert gpu.throttle_bits & THERMAL
    assert gpu.clock_factor < 1


def test_energy_is_power_times_time_and_memory_is_weights_plus_cache():
    """10 s at idle are 1,000 J; 1,000 cached tokens cost 1,000 × bytes per token."""
    gpu = SimulatedGpu(CONFIG)
    settle(gpu, seconds=10, busy=0, batch=0, prefill=0, kv_tokens=1000)

    assert abs(gpu.energy_j - 1000) < 1
    assert gpu.columns()["memory_used_bytes"] == [CONFIG.weights_bytes + 1000 * CONFIG.kv_bytes_per_token]


def _fields(config: GpuConfig) -> dict:
    return {name: getattr(config, name) for name in config.__struct_fields__}
