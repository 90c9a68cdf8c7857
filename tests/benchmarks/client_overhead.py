"""How late clients stamp tokens, and what a token costs them: lpxtop's load process beside the usual loops, in one run.

usage: python tests/benchmarks/client_overhead.py [STREAMS ...]        (by default 64 512 1024)

The simulated server, pinned to one core, sends each stream one token every 20 ms, all streams in the same engine
step, each token with the server's own CLOCK_MONOTONIC write time; each client in turn is pinned to the other core.
Error = the client's stamp − that write time, ms. CPU is the client process's own, seconds per million tokens. The
figures belong to the machine; the ratios do not.
"""

import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "session"))

TOKENS = 200
STEP_S = 0.02
BODY = {"model": "sim-8b", "stream": True, "max_tokens": TOKENS, "ignore_eos": True,
        "messages": [{"role": "user", "content": "tell me about the sea"}]}  # fmt: skip


def quantile(values, q):
    ordered = sorted(values)
    return ordered[max(0, -(-int(q * 1e6) * len(ordered) // 1_000_000) - 1)] if ordered else None


# --- the clients, each its own process -----------------------------------------------------------------------------


async def httpx_lines(url, streams, errors):
    """What most tools do with httpx: aiter_lines and json."""
    import httpx

    async def one(client):
        async with client.stream("POST", f"{url}/v1/chat/completions", json=BODY) as answer:
            async for line in answer.aiter_lines():
                now = time.monotonic_ns()
                if line.startswith("data: ") and "lpx_write_ns" in line:
                    errors.append(now - json.loads(line[6:])["lpx_write_ns"])

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client:
        await asyncio.gather(*(one(client) for _ in range(streams)))


async def aiohttp_lines(url, streams, errors):
    """The way of vLLM's bench client: aiohttp's lines and json."""
    import aiohttp

    async def one(session):
        async with session.post(f"{url}/v1/chat/completions", json=BODY) as answer:
            async for line in answer.content:
                now = time.monotonic_ns()
                if line.startswith(b"data: ") and b"lpx_write_ns" in line:
                    errors.append(now - json.loads(line[6:])["lpx_write_ns"])

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await asyncio.gather(*(one(session) for _ in range(streams)))


async def bare_kernel(url, streams, errors):
    """The floor: raw sockets, recvmsg with kernel stamps, httptools, msgspec; no events, no records."""
    import socket
    import struct

    import httptools
    import msgspec

    class Chunk(msgspec.Struct):
        lpx_write_ns: int | None = None

    decode = msgspec.json.Decoder(Chunk).decode
    offset = time.time_ns() - time.monotonic_ns()
    loop = asyncio.get_running_loop()
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps(BODY).encode()

    class Bare:
        def __init__(self, sock, done):
            self.sock, self.done, self.rest, self.stamp = sock, done, b"", 0
            self.parser = httptools.HttpResponseParser(self)

        def readable(self):
            try:
                data, ancillary, _, _ = self.sock.recvmsg(65536, 64)
            except BlockingIOError:
                return
            seconds, nanoseconds = struct.unpack("qq", ancillary[0][2])
            self.stamp = seconds * 1_000_000_000 + nanoseconds - offset
            self.parser.feed_data(data)

        def on_body(self, data):
            *events, self.rest = (self.rest + data).split(b"\n\n")
            for event in events:
                if event != b"data: [DONE]":
                    write_ns = decode(event[6:]).lpx_write_ns
                    if write_ns is not None:
                        errors.append(self.stamp - write_ns)

        def on_message_complete(self):
            loop.remove_reader(self.sock.fileno())
            self.sock.close()
            self.done.set_result(None)

    async def one():
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, 35, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(sock, (host, int(port)))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(sock, head.encode() + body)
        done = loop.create_future()
        loop.add_reader(sock.fileno(), Bare(sock, done).readable)
        await done

    await asyncio.gather(*(one() for _ in range(streams)))


LOOPS = {"httpx aiter_lines, json": httpx_lines, "aiohttp lines, json": aiohttp_lines,
         "bare kernel stamps (no events)": bare_kernel}  # fmt: skip


def run_loop(name, url, streams):
    """In the child: one loop, its figures as JSON on stdout."""
    errors = []
    asyncio.run(LOOPS[name](url, streams, errors))
    print(json.dumps(errors))


# --- the run -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(streams):
    engine = {"step_base_s": STEP_S, "step_per_sequence_s": 0, "step_per_kv_token_s": 0, "jitter": 0,
              "max_sequences": streams, "max_batched_tokens": 10_000_000, "prefill_tokens_per_s": 1e12,
              "kv_tokens": 100_000_000}  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "lpxtop.sim.server", "--port", "0", "--stamp", "--die-with-parent", "--engine",
         json.dumps(engine)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    os.sched_setaffinity(process.pid, {0})
    try:
        yield process.stdout.readline().removeprefix("listening on ").strip()
    finally:
        process.terminate()
        process.wait(10)


def on_other_core():
    os.sched_setaffinity(0, {1})


def child_cpu_s():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_loop(name, url, streams):
    before = child_cpu_s()
    done = subprocess.run([sys.executable, __file__, "--loop", name, url, str(streams)], capture_output=True, text=True,
                          check=True, preexec_fn=on_other_core, cwd=ROOT)  # fmt: skip
    return json.loads(done.stdout), [], child_cpu_s() - before


def measure_lpxtop(url, streams):
    """The real load process: events as lines, folded into errors afterwards. CPU is that process's own."""
    from running import truth
    from stamps_against_truth import stamp_errors

    from lpxtop.events import commands
    from lpxtop.plan import Load, Negotiated, Plan, Sampling, Secrets, Stop, Target

    plan = Plan(
        target=Target(url=f"{url}/v1", model="sim-8b"), sampling=Sampling(max_tokens=TOKENS),
        load=Load(concurrency=streams), stop=Stop(requests=streams),
    )  # fmt: skip
    origin = time.monotonic_ns()
    start = commands.Start(plan=plan, negotiated=Negotiated(ignore_eos=True), secrets=Secrets(), origin_ns=origin)
    before = child_cpu_s()
    process = subprocess.Popen(
        [sys.executable, "-m", "lpxtop.load.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        preexec_fn=on_other_core, cwd=ROOT,
    )  # fmt: skip
    process.stdin.write(commands.encode(start) + commands.encode(commands.Resume()))
    process.stdin.flush()
    lines = process.stdout.read()
    process.wait()
    cpu = child_cpu_s() - before
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "lines.jsonl"
        path.write_bytes(json.dumps({"k": "header", "t": 0, "mono_ns": origin}).encode() + b"\n" + lines)
        alone, earlier = stamp_errors(path, truth(url))
    return alone, earlier, cpu


def main():
    if sys.argv[1:2] == ["--loop"]:
        run_loop(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    print(
        f"{'streams':>7}  {'client':32} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>8} {'CPU s/Mtok':>10} {'coalesced':>9}"
    )
    for streams in [int(word) for word in sys.argv[1:]] or [64, 512, 1024]:
        for name in [*LOOPS, "lpxtop's load process"]:
            with server(streams) as url:
                measure = (
                    measure_lpxtop if name.startswith("lpxtop") else lambda u, n, name=name: measure_loop(name, u, n)
                )
                alone, earlier, cpu = measure(url, streams)
            tokens = len(alone) + len(earlier)
            p50, p99, most = (quantile(alone, q) / 1e6 for q in (0.5, 0.99, 1.0))
            print(f"{streams:7d}  {name:32} {p50:8.3f} {p99:8.3f} {most:8.2f} {cpu / tokens * 1e6:10.1f} "
                  f"{len(earlier) / tokens:9.2%}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
