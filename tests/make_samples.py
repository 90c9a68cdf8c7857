"""Makes the two sample recordings of recordings/ with the demo's own pieces: `python tests/make_samples.py`.

One shows the concurrency moved from 4 to 64 (TTFT and per-token latency bend), the other an incident: the server
begins to cut streams and answer 500, the GPU to throttle, and recovers. Both are marked simulated.
"""

import asyncio
import json
import sys
import urllib.request
from pathlib import Path

from lpxtop.config import Environment, parse_target
from lpxtop.demo import simulated_server
from lpxtop.launch import Launch, Outputs, prepare
from lpxtop.plan import Load, Plan, Prompts, Sampling, Secrets, Stop

DIRECTORY = Path(__file__).resolve().parent.parent / "recordings"


async def drive(session, steps, url):
    """Run the session; at each step wait, then change the concurrency, make trouble, or leave a note."""
    running = asyncio.create_task(session.run())
    for seconds, what, value in steps:
        await asyncio.sleep(seconds)
        if what == "concurrency":
            session.set_concurrency(value)
        elif what == "mark":
            session.mark(value)
        elif what == "trouble":
            request = urllib.request.Request(f"{url}/sim/trouble", json.dumps(value).encode(), method="POST")
            await asyncio.to_thread(urllib.request.urlopen, request)
        else:
            await session.stop(drain_s=3.0)
    await running


def make(name, steps, preset="h100-8b"):
    path = DIRECTORY / name
    path.unlink(missing_ok=True)
    with simulated_server(preset) as url:
        plan = Plan(
            target=parse_target(url), sampling=Sampling(max_tokens=96), prompts=Prompts(tokens=256),
            load=Load(concurrency=4), stop=Stop(drain_s=3.0), slo=("ttft<500ms", "tpot<50ms"), settle_s=1.0,
        )  # fmt: skip
        launch = Launch(
            plan=plan, secrets=Secrets(), environment=Environment(), outputs=Outputs(record=path), headless=True,
            start=True, yes=True, kind="demo", simulated=True, gpu="sim", command=("lpxtop", "demo"),
        )  # fmt: skip
        session, _ = prepare(launch)
        asyncio.run(drive(session, steps, url))
    print(path, path.stat().st_size, "bytes,", session.summary["requests"]["ok"], "requests ok")


def main() -> None:
    make("demo-slider-4-to-64.lpx.jsonl", [
        (4, "concurrency", 16), (4, "concurrency", 32), (4, "concurrency", 64),
        (1, "mark", "now 64 wait for 48 places"), (4, "concurrency", 4), (3, "stop", None),
    ])  # fmt: skip
    make("demo-incident.lpx.jsonl", [
        (5, "concurrency", 12), (4, "mark", "deploy begins"),
        (2, "trouble", {"server_error_every": 4, "cut_every": 7}), (5, "trouble", {"delay_ms": 400}),
        (4, "trouble", {}), (1, "mark", "rolled back"), (5, "stop", None),
    ], preset="small")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
