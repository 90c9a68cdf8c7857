"""Jobs on the engine in real time: each step's tokens go to their streams, the log, the metrics and the GPU.

The engine's arithmetic is in engine.py and the wire's shapes in answers.py; this is where the clock is read.
"""

import asyncio
import time
from typing import Literal

from lpxtop.sim.answers import Chunks, stream_error, whole_answer
from lpxtop.sim.engine import Engine, Sequence, Step
from lpxtop.sim.gpu import SimulatedGpu
from lpxtop.sim.http import Responder
from lpxtop.sim.jobs import Ask, Record, block_hashes
from lpxtop.sim.metrics import ServerMetrics
from lpxtop.sim.presets import SimConfig
from lpxtop.sim.timer import StepTimer

GPU_TICK_S = 0.1
TROUBLE_AFTER_TOKENS = 3
Breakage = Literal["stall", "cut", "error"]


class Job:
    """A request on its way through the engine. `breakage` is the trouble it will meet; `buffered`, `slow_head` how it
    is sent."""

    def __init__(self, ask: Ask, number: int, responder: Responder, record: Record, config: SimConfig) -> None:
        self.ask, self.responder, self.record = ask, responder, record
        self.seed = config.seed + number
        blocks = block_hashes(ask.prompt, config.engine.block_tokens) if config.engine.prefix_cache else ()
        self.sequence = Sequence(
            id=number, prompt_tokens=ask.prompt_tokens, max_tokens=ask.output_tokens, arrived_s=time.monotonic(),
            blocks=blocks,
        )  # fmt: skip
        self.chunks = Chunks(ask, record.id, config.model, stamp=config.stamp, seed=self.seed)
        self.breakage: Breakage | None = None
        self.buffered = self.slow_head = False
        self.last_s: float | None = None
        self._kept: list[bytes] = []

    @property
    def finish(self) -> str:
        return "length" if self.ask.output_tokens >= self.ask.max_tokens else "stop"

    def begin(self) -> None:
        """The head of a stream goes out when the request is accepted, long before its first token."""
        if self.ask.stream and not self.buffered:
            self._head()

    def _head(self) -> None:
        self.responder.begin_stream(slowly=self.slow_head, x_request_id=self.record.request_id or self.record.id)

    def out(self, data: bytes) -> None:
        """A piece of the stream."""
        if self.buffered:
            self._kept.append(data)
        else:
            self.responder.write(data)

    def end(self, last: bytes) -> None:
        """The end of the stream, with what was kept back."""
        self._head()
        self.responder.end_stream(b"".join(self._kept) + last)


class Backend:
    """The engine's loop and the GPU's. `submit` hands a job over; its answer goes to its responder."""

    def __init__(self, config: SimConfig) -> None:
        self._config = config
        self.engine = Engine(config.engine, config.seed)
        self.gpu = SimulatedGpu(config.gpu)
        self.metrics = ServerMetrics(config.model, config.engine.max_model_len)
        self._jobs: dict[int, Job] = {}
        self._work = asyncio.Event()
        self._busy_s = self._batch_s = self._prefill_s = 0.0

    def submit(self, job: Job) -> None:
        """Queue a job, unless its client has left."""
        if job.responder.gone:
            job.record.outcome = "abort"
            return
        job.responder.on_gone = lambda: self._abort(job)
        job.begin()
        self._jobs[job.sequence.id] = job
        self.engine.add(job.sequence)
        self._work.set()

    def _abort(self, job: Job) -> None:
        """The client went away."""
        if self._jobs.pop(job.sequence.id, None) is not None:
            self.engine.abort(job.sequence)
            self._ended(job, "abort", "abort")

    def _ended(self, job: Job, outcome: str, reason: str) -> None:
        job.record.outcome = outcome
        job.record.preemptions, job.record.cached_tokens = job.sequence.preemptions, job.sequence.cached
        self.metrics.success[reason] += 1

    # --- the engine's loop -------------------------------------------------------------------------------------

    async def run_engine(self) -> None:
        """Step while there is work; each step's tokens go out when it ends. A step begins where the one before was
        due to end, so that late wake-ups do not add up; a loop that cannot keep up slips instead of hurrying."""
        timer = StepTimer()
        try:
            deadline = time.monotonic()
            while True:
                if self.engine.idle:
                    self._work.clear()
                    await self._work.wait()
                    deadline = time.monotonic()
                self.engine.clock_factor = self.gpu.clock_factor
                step = self.engine.step(deadline)
                deadline = max(deadline + step.duration_s, time.monotonic())
                await timer.until(deadline)
                self._emit(step)
        finally:
            timer.close()

    def _emit(self, step: Step) -> None:
        self._account(step)
        now_s = time.monotonic()
        for sequence, tokens in step.emitted:
            job = self._jobs.get(sequence.id)
            if job is not None:
                self._send(job, tokens, now_s)

    def _account(self, step: Step) -> None:
        engine = self._config.engine
        self._busy_s += step.duration_s
        self._batch_s += step.duration_s * step.decoding / engine.max_sequences
        self._prefill_s += step.prefill_tokens / engine.prefill_tokens_per_s
        computed = step.prefill_tokens + sum(tokens for _, tokens in step.emitted)
        self.metrics.observe("iteration_tokens_total", computed)

    def _send(self, job: Job, tokens: int, now_s: float) -> None:
        sequence = job.sequence
        if job.breakage and sequence.generated > TROUBLE_AFTER_TOKENS:
            self._break(job)
            return
        finished = sequence.generated >= sequence.max_tokens
        job.record.tokens += tokens
        self._observe_tokens(job, tokens, now_s)
        if job.ask.stream:
            self._send_chunk(job, tokens, job.finish if finished else None)
        if finished:
            self._finish(job, now_s)

    def _send_chunk(self, job: Job, tokens: int, finish: str | None) -> None:
        record = job.record
        if record.first_write_ns is None and job.ask.chat:
            job.out(job.chunks.role())
        now_ns = time.monotonic_ns()
        if record.first_write_ns is None:
            record.first_write_ns = now_ns
        record.last_write_ns = now_ns
        if self._config.stamp:
            record.writes.append(now_ns)
            record.tokens_per_write.append(tokens)
        job.out(job.chunks.content(tokens, finish, now_ns))

    def _break(self, job: Job) -> None:
        """Make the job's trouble; then the request is over for the engine."""
        del self._jobs[job.sequence.id]
        self.engine.abort(job.sequence)
        self._ended(job, job.breakage or "", "error")
        if job.breakage == "cut":
            job.responder.cut()
        elif job.breakage == "error":
            job.end(stream_error())

    def _finish(self, job: Job, now_s: float) -> None:
        del self._jobs[job.sequence.id]
        self._ended(job, "ok", job.finish)
        self._observe_request(job, now_s)
        record, cached = job.record, job.sequence.cached
        if job.ask.stream:
            job.end(job.chunks.tail(cached))
            return
        answer = whole_answer(
            job.ask, answer_id=record.id, model=self._config.model, finish=job.finish, cached=cached, seed=job.seed
        )
        job.responder.json(200, answer, x_request_id=record.request_id or record.id)

    # --- what the metrics are told -----------------------------------------------------------------------------

    def _observe_tokens(self, job: Job, tokens: int, now_s: float) -> None:
        sequence, metrics = job.sequence, self.metrics
        metrics.generation_tokens += tokens
        if job.last_s is None:
            metrics.prompt_tokens += sequence.prompt_tokens
            metrics.cached_tokens += sequence.cached
            metrics.observe("time_to_first_token_seconds", now_s - sequence.arrived_s)
            sequence.first_token_s = now_s
        else:
            metrics.observe("inter_token_latency_seconds", now_s - job.last_s)
        job.last_s = now_s

    def _observe_request(self, job: Job, now_s: float) -> None:
        """A finished request's whole, and its parts: queue, then prefill, then decode."""
        sequence, observe = job.sequence, self.metrics.observe
        observe("e2e_request_latency_seconds", now_s - sequence.arrived_s)
        observe("request_prompt_tokens", sequence.prompt_tokens)
        observe("request_generation_tokens", sequence.generated)
        observe("request_params_max_tokens", job.ask.max_tokens)
        observe("request_num_preemptions", sequence.preemptions)
        first_s, scheduled_s = sequence.first_token_s, sequence.scheduled_s
        if first_s is None or scheduled_s is None:
            return
        # a step may have been planned to begin just before the request arrived
        scheduled_s = max(scheduled_s, sequence.arrived_s)
        observe("request_queue_time_seconds", scheduled_s - sequence.arrived_s)
        observe("request_prefill_time_seconds", first_s - scheduled_s)
        observe("request_decode_time_seconds", now_s - first_s)
        observe("request_inference_time_seconds", now_s - scheduled_s)
        if sequence.generated > 1:
            observe("request_time_per_output_token_seconds", (now_s - first_s) / (sequence.generated - 1))

    def exposition(self) -> bytes:
        """The text of /metrics."""
        engine, config = self.engine, self._config.engine
        gauges = {
            "num_requests_running": len(engine.running),
            "num_requests_waiting": len(engine.waiting),
            "kv_cache_usage_perc": engine.kv_usage,
        }
        counters = {
            "num_preemptions": engine.preemptions,
            "prefix_cache_queries": engine.prefix_queries,
            "prefix_cache_hits": engine.prefix_hits,
        }
        if config.tokens_per_step > 1:
            counters |= {
                "spec_decode_num_drafts": engine.drafts,
                "spec_decode_num_draft_tokens": engine.draft_tokens,
                "spec_decode_num_accepted_tokens": engine.accepted_tokens,
            }
        info = {
            "block_size": str(config.block_tokens),
            "num_gpu_blocks": str(config.blocks),
            "kv_cache_size_tokens": str(config.blocks * config.block_tokens),
            "enable_prefix_caching": str(config.prefix_cache),
        }
        return self.metrics.exposition(gauges, counters, info)

    # --- the GPU -----------------------------------------------------------------------------------------------

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
