"""Run by the GPU tests in a process of its own: prints a GpuSource's events as lines, then when it asked to leave."""

import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path

from lpxtop.events import codec
from lpxtop.probes import gpu, sampler
from lpxtop.probes.gpu import GpuSource


async def main(options: dict) -> None:
    gpu.MAX_HZ, gpu.WATCH_S = 1000.0, 0.05
    for name, value in options.get("constants", {}).items():
        setattr(sampler, name, value)
    source = GpuSource(
        time.monotonic_ns(), hz=options["hz"], select=options["select"], visible=options["visible"],
        root=Path(options["root"]),
    )  # fmt: skip
    samples = 0

    async def read() -> None:
        nonlocal samples
        async for event in source:
            sys.stdout.buffer.write(codec.encode(event))
            samples += type(event).__name__ == "Gpu"
            if samples >= options["samples"]:
                return

    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(read(), options["seconds"])
    await source.close()


asyncio.run(main(json.loads(sys.argv[1])))
print(f"# {time.monotonic()}", flush=True)
