"""The simulated OpenAI-compatible server: `lpxtop sim`, and the demo's and the tests' server. One process, one loop.

Everything it says is marked simulated. Binds to loopback unless told otherwise. Must not be mistaken for an engine:
its truth is the log (/sim/log), its speed is a formula (sim/engine.py).
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import deque
from typing import Any

import msgspec

from lpxtop import __version__
from lpxtop.sim.engine import Engine, Sequence, Step
from lpxtop.sim.gpu import SimulatedGpu
from lpxtop.sim.http import HttpConnection, HttpRequest, Responder
from lpxtop.sim.jobs import (
    Ask,
    BadRequest,
    Chunks,
    Record,
    block_hashes,
    count_tokens,
    parse_ask,
    whole_answer,
)
from lpxtop.sim.metrics import ServerMetrics
from lpxtop.sim.presets import PRESETS, SimConfig, Trouble, preset

GPU_TICK_S = 0.1
LOG_LIMIT = 100_000
TROUBLE_AFTER_TOKENS = 3
_mono = time.monotonic_ns


class Job:
    """A request on its way through the engine."""

    def __init__(self, ask: Ask, sequence: Sequence, responder: Responder, record: Record, chunks: Chunks) -> None:
        self.ask, self.sequence, self.responder, self.record, self.chunks = ask, sequence, responder, record, chunks
        self.trouble: str | None = None
        self.held: list[bytes] = []
        self.last_s: float | None = None


class SimServer:
    """The server's state and its handlers."""

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.engine = Engine(config.engine, config.seed)
        self.gpu = SimulatedGpu(config.gpu)
        self.metrics = ServerMetrics(config.model)
        self.trouble = config.trouble
        self.log: deque[Record] = deque(maxlen=LOG_LIMIT)
        self._draw = random.Random(config.seed)
        self._jobs: dict[int, Job] = {}
        self._count = 0
        self._work = asyncio.Event()
        self._started_s = time.monotonic()
        self._busy_s = self._batch_s = self._prefill_s = 0.0

    # --- HTTP --------------------------------------------------------------------------------------------------

    def handle(self, request: HttpRequest, responder: Responder) -> None:
        """Answer a request, now or as the engine gets to it."""
        path, method = request.path.rstrip("/") or "/", request.method
        if path == "/health":
            responder.whole(503 if self._loading() else 200, b"")
        elif path == "/sim/gpu":
            responder.json(200, {"gpus": self.gpu.inventory(), "columns": self.gpu.columns()})
        elif path == "/sim/log":
            responder.whole(200, b"".join(msgspec.json.encode(r) + b"\n" for r in self.log), "application/jsonl")
        elif path == "/sim/trouble" and method == "POST":
            self._set_trouble(request, responder)
        elif path == "/metrics":
            responder.whole(200, self._exposition(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/version":
            responder.json(200, {"version": f"lpxtop-sim {__version__}", "simulated": True})
        elif not self._allowed(request):
            responder.json(401, {"error": {"message": "Unauthorized", "type": "invalid_request_error", "code": 401}})
        elif path == "/v1/models":
            responder.json(200, self._models())
        elif path in ("/v1/chat/completions", "/v1/completions"):
            self._complete(request, responder, chat=path.endswith("chat/completions"))
        elif path == "/tokenize" and method == "POST":
            self._tokenize(request, responder)
        else:
            responder.json(404, {"detail": "Not Found"})

    def _allowed(self, request: HttpRequest) -> bool:
        return self.config.api_key is None or request.headers.get("authorization") == f"Bearer {self.config.api_key}"

    def _loading(self) -> bool:
        return time.monotonic() - self._started_s < self.trouble.loading_s

    def _models(self) -> dict[str, Any]:
        model = {"id": self.config.model, "object": "model", "owned_by": "lpxtop-sim",
                 "max_model_len": self.config.engine.max_model_len}  # fmt: skip
        return {"object": "list", "data": [model]}

    def _set_trouble(self, request: HttpRequest, responder: Responder) -> None:
        try:
            self.trouble = msgspec.json.decode(request.body, type=Trouble)
        except msgspec.DecodeError as error:
            responder.json(400, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}})
            return
        responder.json(200, msgspec.to_builtins(self.trouble))

    def _tokenize(self, request: HttpRequest, responder: Responder) -> None:
        try:
            text = str(msgspec.json.decode(request.body).get("prompt", ""))
        except (msgspec.DecodeError, AttributeError):
            text = ""
        count = count_tokens(text)
        responder.json(200, {"count": count, "max_model_len": self.config.engine.max_model_len,
                             "tokens": list(range(count))})  # fmt: skip

    # --- completions -------------------------------------------------------------------------------------------

    def _complete(self, request: HttpRequest, responder: Responder, *, chat: bool) -> None:
        self._count += 1
        number = self._count
        record = Record(
            id=f"sim-{number}", request_id=request.headers.get("x-request-id"), received_ns=_mono(),
        )  # fmt: skip
        self.log.append(record)
        try:
            self._refuse(number)
            ask = parse_ask(
                request.body, chat=chat, model=self.config.model, draw=self._draw,
                max_model_len=min(self.config.engine.max_model_len, self.config.engine.kv_tokens - 1),
            )  # fmt: skip
        except BadRequest as error:
            record.outcome = f"http_{error.status}"
            headers = {"retry_after": "1"} if error.status == 429 else {}
            responder.json(error.status, error.body(), **headers)
            return
        record.prompt_tokens = ask.prompt_tokens
        job = self._job(number, ask, responder, record)
        if self.trouble.delay_ms:
            asyncio.get_running_loop().call_later(self.trouble.delay_ms / 1000, self._enqueue, job)
        else:
            self._enqueue(job)

    def _refuse(self, number: int) -> None:
        trouble = self.trouble
        if self._loading():
            raise BadRequest(503, "unavailable_error", "Loading model")
        if trouble.rate_limit_every and number % trouble.rate_limit_every == 0:
            raise BadRequest(429, "rate_limit_error", "Too many requests (simulated); try again in 1s")
        if trouble.server_error_every and number % trouble.server_error_every == 0:
            raise BadRequest(500, "InternalServerError", "simulated fault")

    def _job(self, number: int, ask: Ask, responder: Responder, record: Record) -> Job:
        config = self.config
        sequence = Sequence(
            id=number, prompt_tokens=ask.prompt_tokens, max_tokens=ask.output_tokens, arrived_s=time.monotonic(),
            blocks=block_hashes(ask.text, config.engine.block_tokens) if config.engine.prefix_cache else (),
        )  # fmt: skip
        chunks = Chunks(ask, record.id, config.model, stamp=config.stamp, seed=config.seed + number)
        job = Job(ask, sequence, responder, record, chunks)
        for name in ("stall", "cut", "error"):
            every = getattr(self.trouble, f"{name}_every")
            if every and number % every == 0 and ask.stream:
                job.trouble = name
        return job

    def _enqueue(self, job: Job) -> None:
        if job.responder.gone:
            job.record.outcome = "abort"
            return
        job.responder.on_gone = lambda: self._abort(job)
        self._jobs[job.sequence.id] = job
        self.engine.add(job.sequence)
        self._work.set()

    def _abort(self, job: Job) -> None:
        """The client went away."""
        if self._jobs.pop(job.sequence.id, None) is not None:
            self.engine.abort(job.sequence)
            self.metrics.success["abort"] += 1
        job.record.outcome = "abort"

    # --- the engine's loop -------------------------------------------------------------------------------------

    async def run_engine(self) -> None:
        """Step while there is work; each step's tokens go out when it ends, drift-free."""
        deadline = time.monotonic()
        while True:
            if self.engine.idle:
                self._work.clear()
                await self._work.wait()
                deadline = time.monotonic()
            begin = deadline
            self.engine.clock_factor = self.gpu.clock_factor
            step = self.engine.step(begin)
            deadline = max(deadline + step.duration_s, time.monotonic())
            await asyncio.sleep(deadline - time.monotonic())
            self._busy_s += step.duration_s
            self._batch_s += step.duration_s * step.decoding / self.config.engine.max_sequences
            self._prefill_s += step.prefill_tokens / self.config.engine.prefill_tokens_per_s
            self._emit(step, deadline)

    def _emit(self, step: Step, now_s: float) -> None:
        for sequence, tokens in step.emitted:
            job = self._jobs.get(sequence.id)
            if job is not None:
                self._send(job, tokens, now_s)

    def _send(self, job: Job, tokens: int, now_s: float) -> None:
        sequence, record = job.sequence, job.record
        finished = sequence.generated >= sequence.max_tokens
        finish = None if not finished else "length" if job.ask.output_tokens >= job.ask.max_tokens else "stop"
        self._observe(job, tokens, now_s)
        if job.trouble and sequence.generated > TROUBLE_AFTER_TOKENS:
            self._make_trouble(job)
            return
        record.tokens += tokens
        if job.ask.stream:
            self._send_chunk(job, tokens, finish)
        if finished:
            self._finish(job, finish or "length", now_s)

    def _send_chunk(self, job: Job, tokens: int, finish: str | None) -> None:
        record, responder = job.record, job.responder
        first = record.first_write_ns is None
        if first:
            responder.begin_stream(x_request_id=record.request_id or record.id)
            if job.ask.chat:
                self._out(job, job.chunks.role())
        now_ns = _mono()
        if first:
            record.first_write_ns = now_ns
        record.last_write_ns = now_ns
        if self.config.stamp:
            record.writes.append(now_ns)
            record.tokens_per_write.append(tokens)
        self._out(job, job.chunks.content(tokens, finish, now_ns))

    def _out(self, job: Job, data: bytes) -> None:
        if self.trouble.buffered:
            job.held.append(data)
        else:
            job.responder.write(data)

    def _make_trouble(self, job: Job) -> None:
        """What the job's trouble does after its third token; then the request is over for the engine."""
        del self._jobs[job.sequence.id]
        self.engine.abort(job.sequence)
        job.record.outcome = job.trouble or ""
        self.metrics.success["error"] += 1
        if job.trouble == "cut":
            job.responder.cut()
        elif job.trouble == "error":
            job.responder.end_stream(job.chunks.error() + b"data: [DONE]\n\n")

    def _finish(self, job: Job, finish: str, now_s: float) -> None:
        del self._jobs[job.sequence.id]
        sequence, record = job.sequence, job.record
        record.outcome, record.preemptions = "ok", sequence.preemptions
        self.metrics.success[finish] += 1
        self.metrics.observe("e2e_request_latency_seconds", now_s - sequence.arrived_s)
        if sequence.first_token_s is not None:
            decode = now_s - sequence.first_token_s
            self.metrics.observe("request_decode_time_seconds", decode)
            if sequence.generated > 1:
                self.metrics.observe("request_time_per_output_token_seconds", decode / (sequence.generated - 1))
        if job.ask.stream:
            job.responder.end_stream(b"".join(job.held) + job.chunks.tail(sequence.cached))
        else:
            seed = self.config.seed + sequence.id
            answer = whole_answer(
                job.ask, sequence, answer_id=record.id, model=self.config.model, finish=finish, seed=seed
            )
            job.responder.json(200, answer, x_request_id=record.request_id or record.id)

    def _observe(self, job: Job, tokens: int, now_s: float) -> None:
        sequence, metrics = job.sequence, self.metrics
        metrics.generation_tokens += tokens
        if job.last_s is None:
            metrics.prompt_tokens += sequence.prompt_tokens
            metrics.observe("time_to_first_token_seconds", now_s - sequence.arrived_s)
            if sequence.scheduled_s is not None:
                metrics.observe("request_queue_time_seconds", max(0.0, sequence.scheduled_s - sequence.arrived_s))
                metrics.observe("request_prefill_time_seconds", now_s - sequence.scheduled_s)
        else:
            metrics.observe("inter_token_latency_seconds", now_s - job.last_s)
        job.last_s = now_s

    # --- the GPU and the metrics -------------------------------------------------------------------------------

    async def run_gpu(self) -> None:
        """Hand the GPU what the engine did, ten times a second."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(GPU_TICK_S)
            now = time.monotonic()
            busy = self._busy_s
            self.gpu.advance(
                now - last, busy=busy,
                batch=min(1.0, self._batch_s / busy) if busy else 0.0,
                prefill=min(1.0, self._prefill_s / busy) if busy else 0.0,
                kv_tokens=self.engine.kv_used_tokens,
            )  # fmt: skip
            self._busy_s = self._batch_s = self._prefill_s = 0.0
            last = now

    def _exposition(self) -> bytes:
        engine, config = self.engine, self.config.engine
        gauges = {
            "num_requests_running": float(len(engine.running)),
            "num_requests_waiting": float(len(engine.waiting)),
            "kv_cache_usage_perc": engine.kv_usage,
        }
        counters = {"num_preemptions": float(engine.preemptions)}
        if config.prefix_cache:
            counters |= {
                "prefix_cache_queries": float(engine.prefix_queries),
                "prefix_cache_hits": float(engine.prefix_hits),
            }
        info = {
            "block_size": str(config.block_tokens),
            "num_gpu_blocks": str(config.kv_tokens // config.block_tokens),
            "enable_prefix_caching": str(config.prefix_cache),
        }
        return self.metrics.exposition(gauges, counters, info)


async def serve(config: SimConfig, *, die_with_parent: bool = False) -> None:
    """Serve until SIGTERM or SIGINT (or, on request, the end of stdin). Says where it listens on stdout."""
    loop = asyncio.get_running_loop()
    server = SimServer(config)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stopped.set)
    if die_with_parent:
        loop.add_reader(sys.stdin.fileno(), lambda: _at_end_of_stdin(stopped))
    listener = await loop.create_server(lambda: HttpConnection(server.handle), config.host, config.port, backlog=2048)
    port = listener.sockets[0].getsockname()[1]
    print(f"listening on http://{config.host}:{port}", flush=True)  # noqa: T201 - the caller reads this line
    tasks = [asyncio.create_task(server.run_engine()), asyncio.create_task(server.run_gpu())]
    stop = asyncio.create_task(stopped.wait())
    await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
    listener.close()
    for task in (stop, *tasks):
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def _at_end_of_stdin(stopped: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        stopped.set()


def main(arguments: list[str] | None = None) -> int:
    """`lpxtop sim` and `python -m lpxtop.sim.server`."""
    parser = argparse.ArgumentParser(
        prog="lpxtop sim", description="A simulated OpenAI-compatible LLM server and GPU, for demos and tests."
    )
    parser.add_argument("--preset", default="h100-8b", help=f"engine and GPU: {', '.join(PRESETS)} [h100-8b]")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind [127.0.0.1]")
    parser.add_argument("--port", type=int, default=8000, help="port, 0 for a free one [8000]")
    parser.add_argument("--model", help="name of the model")
    parser.add_argument("--api-key", help="require this key (a test key: it is visible in the process list)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stamp", action="store_true", help="put the write time into each token and keep them all")
    parser.add_argument("--prefix-cache", action="store_true", help="keep prompts' blocks for later requests")
    parser.add_argument("--tokens-per-step", type=int, help="speculative decoding: tokens per chunk at most")
    parser.add_argument("--acceptance", type=float, help="probability that each draft token is accepted")
    parser.add_argument("--engine", default="{}", help="JSON: single settings of the engine")
    parser.add_argument("--gpu", default="{}", help="JSON: single settings of the GPU")
    parser.add_argument("--trouble", default="{}", help='JSON: what goes wrong, e.g. {"cut_every": 10}')
    parser.add_argument("--die-with-parent", action="store_true", help="end when stdin closes")
    asyncio.run(_serve_arguments(parser.parse_args(arguments)))
    return 0


async def _serve_arguments(flags: argparse.Namespace) -> None:
    config = preset(flags.preset)
    engine: dict[str, Any] = msgspec.to_builtins(config.engine) | msgspec.json.decode(flags.engine)
    for name in ("tokens_per_step", "acceptance"):
        if getattr(flags, name) is not None:
            engine[name] = getattr(flags, name)
    if flags.prefix_cache:
        engine["prefix_cache"] = True
    gpu = msgspec.to_builtins(config.gpu) | msgspec.json.decode(flags.gpu)
    settings = {
        "host": flags.host, "port": flags.port, "model": flags.model or config.model, "api_key": flags.api_key,
        "seed": flags.seed, "stamp": flags.stamp, "engine": engine, "gpu": gpu,
        "trouble": msgspec.json.decode(flags.trouble),
    }  # fmt: skip
    await serve(msgspec.convert(settings, SimConfig), die_with_parent=flags.die_with_parent)


if __name__ == "__main__":
    sys.exit(main())
