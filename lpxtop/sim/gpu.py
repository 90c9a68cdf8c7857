"""A simulated GPU that follows the engine, and the event source that reads it. Must not pretend to be real.

Power follows the work; at the limit the clocks drop, and the engine with them; temperature follows power with
inertia. The counters are NVML's: throttle bits, nanoseconds per reason, energy.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from lpxtop.clock import Clock, SystemClock, session_us
from lpxtop.events.records import AnyEvent, Gpu, Source
from lpxtop.sim.presets import GpuConfig

IDLE, POWER_CAP, THERMAL = 0x1, 0x4, 0x20
IDLE_CLOCK_MHZ, CLOCK_STEP_MHZ = 345, 15
LOWEST_CLOCK = 0.3
POLL_S = 0.5
RETRY_S = 2.0
ANSWER_S = 2.0


class SimulatedGpu:
    """Integrates work into power, clocks, temperature and energy. `advance` is told what the engine did."""

    def __init__(self, config: GpuConfig) -> None:
        self.config = config
        self.power_watts = min(config.idle_watts, config.limit_watts)
        self.temperature_c = config.ambient_c + self.power_watts * config.degrees_per_watt
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
        capped = wanted > config.limit_watts
        hot = max(0.0, self.temperature_c - config.slowdown_c)
        # power goes roughly with the cube of the clock (voltage follows frequency)
        at_cap = (config.limit_watts / wanted) ** (1 / 3) if capped else 1.0
        self.clock_factor = max(LOWEST_CLOCK, at_cap * (1 - 0.04 * min(hot, 10)))
        self.power_watts = min(config.limit_watts, wanted * self.clock_factor**3)
        target = config.ambient_c + self.power_watts * config.degrees_per_watt
        self.temperature_c += (target - self.temperature_c) * min(1.0, seconds / config.thermal_seconds)
        self.energy_j += self.power_watts * seconds
        self.kv_tokens = kv_tokens
        self._throttle(seconds, capped=capped, hot=hot > 0)

    def _throttle(self, seconds: float, *, capped: bool, hot: bool) -> None:
        self.throttle_bits = (POWER_CAP if capped else 0) | (THERMAL if hot else 0)
        if self._idle:
            self.throttle_bits |= IDLE
        self.throttle_ns["power_cap"] += int(seconds * 1e9) if capped else 0
        self.throttle_ns["thermal"] += int(seconds * 1e9) if hot else 0

    @property
    def _idle(self) -> bool:
        return self.utilization < 0.01

    def inventory(self) -> list[dict[str, Any]]:
        """What does not change, as a row of `source.descriptor["gpus"]`."""
        config = self.config
        return [
            {
                "index": 0,
                "uuid": "GPU-SIM-0000",
                "name": config.name,
                "memory_total_bytes": config.memory_total_bytes,
                "power_limit_watts": config.limit_watts,
                "power_limit_default_watts": config.limit_watts,
                "sm_clock_max_mhz": config.sm_clock_max_mhz,
                "memory_clock_max_mhz": config.memory_clock_max_mhz,
                "simulated": True,
            }
        ]

    def columns(self) -> dict[str, Any]:
        """The columns of a `gpu` event."""
        config = self.config
        used = config.weights_bytes + self.kv_tokens * config.kv_bytes_per_token
        clock = round(config.sm_clock_max_mhz * self.clock_factor / CLOCK_STEP_MHZ) * CLOCK_STEP_MHZ
        return {
            "status": ["ok"],
            "utilization_percent": [round(100 * self.utilization)],
            "memory_utilization_percent": [round(100 * self.memory_utilization)],
            "memory_used_bytes": [min(used, config.memory_total_bytes)],
            "memory_total_bytes": [config.memory_total_bytes],
            "power_watts": [round(self.power_watts, 1)],
            "power_limit_watts": [config.limit_watts],
            "energy_j": [round(self.energy_j, 3)],
            "sm_clock_mhz": [IDLE_CLOCK_MHZ if self._idle else min(clock, config.sm_clock_max_mhz)],
            "memory_clock_mhz": [config.memory_clock_max_mhz],
            "pstate": [8 if self._idle else 0],
            "temperature_c": [round(self.temperature_c)],
            "thermal_margin_c": [round(config.slowdown_c - self.temperature_c)],
            "throttle_bits": [self.throttle_bits],
            "throttle_ns": {reason: [value] for reason, value in self.throttle_ns.items()},
        }

    def answer(self) -> dict[str, Any]:
        """What GET /sim/gpu says."""
        return {"driver": "sim", "simulated": True, "gpus": self.inventory(), "columns": self.columns()}


class Answer(msgspec.Struct, frozen=True):
    """GET /sim/gpu, as a reader needs it."""

    driver: str
    gpus: list[dict[str, Any]]
    columns: dict[str, Any]


class SimGpuSource:
    """Polls a simulated server's /sim/gpu at 2 Hz over one connection. An event source: `source` joined, then `gpu`
    events. While the server does not answer, or answers something else, it is `failed` (said once) and asked again."""

    def __init__(self, base_url: str, origin_ns: int, *, name: str = "gpu0", clock: Clock | None = None) -> None:
        self.name = name
        self._link = _Link(base_url)
        self._origin_ns = origin_ns
        self._clock: Clock = clock or SystemClock()
        self._closed = asyncio.Event()
        self._seq = 0

    async def close(self) -> None:
        self._closed.set()

    async def __aiter__(self) -> AsyncIterator[AnyEvent]:
        state = ""
        try:
            while not self._closed.is_set():
                due = self._clock.monotonic_ns() + round(POLL_S * 1e9)
                try:
                    answer = await self._link.get("/sim/gpu")
                    sample = msgspec.convert(answer.columns | self._stamp(), Gpu)
                except (OSError, ValueError, EOFError) as error:
                    if state != "failed":
                        yield self._source("failed", text=f"simulated GPU: {str(error) or type(error).__name__}")
                    state = "failed"
                    await self._pause(RETRY_S)
                    continue
                if state != "joined":
                    state = "joined"
                    found = {"gpus": answer.gpus, "driver": answer.driver, "simulated": True}
                    yield self._source(state, t=sample.t, descriptor=found)
                yield msgspec.structs.replace(sample, seq=self._next())
                await self._pause((due - self._clock.monotonic_ns()) / 1e9)
        finally:
            self._link.drop()

    def _stamp(self) -> dict[str, Any]:
        return {"t": session_us(self._clock.monotonic_ns(), self._origin_ns), "src": self.name}

    def _next(self) -> int:
        self._seq += 1
        return self._seq - 1

    def _source(self, state: str, **more: Any) -> Source:
        return Source(**self._stamp() | {"seq": self._next(), "kind": "gpu", "state": state} | more)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), max(0.0, seconds))


class _Link:
    """One kept-alive connection to the simulated server, opened when needed and dropped on any mistake."""

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def get(self, path: str) -> Answer:
        """Raises OSError (a time-out too), EOFError, or ValueError when the answer is not one."""
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._get(path)
        except BaseException:
            self.drop()
            raise

    async def _get(self, path: str) -> Answer:
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n\r\n".encode())
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except asyncio.LimitOverrunError:
            raise ValueError("the answer is not HTTP") from None
        status = head[0].partition(" ")[2]
        if not status.startswith("200"):
            raise ValueError(f"it answered {status or head[0]!r}")
        length = next((int(line[15:]) for line in head if line.lower().startswith("content-length:")), 0)
        return msgspec.json.decode(await reader.readexactly(length), type=Answer)

    def drop(self) -> None:
        """Close the connection, if there is one."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None
