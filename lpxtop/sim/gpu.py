"""A simulated GPU that follows the engine, and the event source that reads it. Must not pretend to be real.

Power follows the work; at the limit the clocks drop, and the engine with them; temperature follows power with
inertia. The counters are NVML's: throttle bits, nanoseconds per reason, energy.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from lpxtop.clock import Clock, SystemClock, session_us
from lpxtop.events.records import AnyEvent, Gpu, Source
from lpxtop.sim.presets import GpuConfig

POWER_CAP, THERMAL, IDLE = 0x4, 0x20, 0x1
POLL_S = 0.5
RETRY_S = 2.0


class SimulatedGpu:
    """Integrates work into power, clocks, temperature and energy. `advance` is told what the engine did."""

    def __init__(self, config: GpuConfig) -> None:
        self.config = config
        self.temperature_c = config.ambient_c + config.idle_watts * config.degrees_per_watt
        self.power_watts = config.idle_watts
        self.clock_factor = 1.0
        self.utilization = 0.0
        self.memory_utilization = 0.0
        self.energy_j = 0.0
        self.throttle_bits = IDLE
        self.throttle_ns = {"power_cap": 0, "thermal": 0}
        self.kv_tokens = 0

    def advance(self, seconds: float, *, busy: float, batch: float, prefill: float, kv_tokens: int) -> None:
        """`seconds` passed, `busy` of them working; `batch` and `prefill` (0..1) say how full and how compute-bound."""
        if seconds <= 0:
            return
        config = self.config
        share = min(1.0, busy / seconds)
        self.utilization += (share - self.utilization) * min(1.0, seconds / 0.5)
        self.memory_utilization = self.utilization * (0.55 + 0.4 * batch) * (1 - 0.5 * prefill)
        work = config.decode_watts + config.batch_watts * batch + config.prefill_watts * prefill
        wanted = config.idle_watts + self.utilization * work
        over = max(1.0, wanted / config.limit_watts)
        hot = max(0.0, self.temperature_c - config.slowdown_c)
        # dynamic power goes roughly with the cube of the clock (voltage follows frequency)
        self.clock_factor = max(0.3, over ** (-1 / 3) * (1 - 0.04 * min(hot, 10)))
        self.power_watts = min(wanted, config.limit_watts)
        target = config.ambient_c + self.power_watts * config.degrees_per_watt
        self.temperature_c += (target - self.temperature_c) * min(1.0, seconds / config.thermal_seconds)
        self.energy_j += self.power_watts * seconds
        self.kv_tokens = kv_tokens
        self._throttle(seconds, capped=over > 1.0, hot=hot > 0)

    def _throttle(self, seconds: float, *, capped: bool, hot: bool) -> None:
        self.throttle_bits = (POWER_CAP if capped else 0) | (THERMAL if hot else 0)
        if self.utilization < 0.01:
            self.throttle_bits |= IDLE
        self.throttle_ns["power_cap"] += int(seconds * 1e9) if capped else 0
        self.throttle_ns["thermal"] += int(seconds * 1e9) if hot else 0

    def inventory(self) -> list[dict[str, Any]]:
        config = self.config
        return [
            {
                "index": 0,
                "uuid": "GPU-SIM-0000",
                "name": config.name,
                "memory_total_bytes": config.memory_total_bytes,
                "power_limit_watts": config.limit_watts,
                "sm_clock_max_mhz": config.sm_clock_max_mhz,
                "memory_clock_max_mhz": config.memory_clock_max_mhz,
                "simulated": True,
            }
        ]

    def columns(self) -> dict[str, Any]:
        """The columns of a `gpu` event."""
        config = self.config
        idle = self.utilization < 0.01
        used = config.weights_bytes + self.kv_tokens * config.kv_bytes_per_token
        return {
            "status": ["ok"],
            "utilization_percent": [round(100 * self.utilization)],
            "memory_utilization_percent": [round(100 * self.memory_utilization)],
            "memory_used_bytes": [min(used, config.memory_total_bytes)],
            "memory_total_bytes": [config.memory_total_bytes],
            "power_watts": [round(self.power_watts, 1)],
            "power_limit_watts": [config.limit_watts],
            "energy_j": [round(self.energy_j, 3)],
            "sm_clock_mhz": [345 if idle else round(config.sm_clock_max_mhz * self.clock_factor / 15) * 15],
            "memory_clock_mhz": [config.memory_clock_max_mhz],
            "pstate": [8 if idle else 0],
            "temperature_c": [round(self.temperature_c)],
            "throttle_bits": [self.throttle_bits],
            "throttle_ns": {reason: [value] for reason, value in self.throttle_ns.items()},
        }


class SimGpuSource:
    """Polls a simulated server's /sim/gpu at 2 Hz. An event source; a server that does not answer is reported once."""

    def __init__(self, base_url: str, origin_ns: int, *, name: str = "gpu0", clock: Clock | None = None) -> None:
        self.name = name
        host, _, port = base_url.split("//")[1].partition("/")[0].rpartition(":")
        self._host, self._port = host, int(port)
        self._origin_ns = origin_ns
        self._clock: Clock = clock or SystemClock()
        self._closed = asyncio.Event()
        self._seq = 0

    async def close(self) -> None:
        self._closed.set()

    def _stamp(self) -> dict[str, Any]:
        self._seq += 1
        now = session_us(self._clock.monotonic_ns(), self._origin_ns)
        return {"t": now, "src": self.name, "seq": self._seq - 1}

    async def __aiter__(self) -> AsyncIterator[AnyEvent]:
        joined = failed = False
        while not self._closed.is_set():
            try:
                answer = await self._read()
            except (OSError, ValueError, EOFError) as error:
                if not failed:
                    yield Source(**self._stamp(), kind="gpu", state="failed", text=f"simulated GPU: {error}")
                failed = True
                await self._pause(RETRY_S)
                continue
            failed = False
            if not joined:
                joined = True
                descriptor = {"gpus": answer["gpus"], "driver": "simulated", "simulated": True}
                yield Source(**self._stamp(), kind="gpu", state="joined", descriptor=descriptor)
            yield Gpu(**self._stamp(), **answer["columns"])
            await self._pause(POLL_S)

    async def _pause(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._closed.wait(), seconds)
        except TimeoutError:
            return

    async def _read(self) -> dict[str, Any]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(b"GET /sim/gpu HTTP/1.1\r\nhost: sim\r\nconnection: close\r\n\r\n")
            raw = await asyncio.wait_for(reader.read(), 2)
        finally:
            writer.close()
        found: dict[str, Any] = msgspec.json.decode(raw.partition(b"\r\n\r\n")[2])
        return found
