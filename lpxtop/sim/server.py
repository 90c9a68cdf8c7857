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
from collections.abc import Callable
from typing import Any

import msgspec

from lpxtop import __version__
from lpxtop.errors import LpxtopError, UsageError
from lpxtop.sim import presets
from lpxtop.sim.backend import Backend, Breakage, Job
from lpxtop.sim.http import HttpConnection, HttpRequest, Responder
from lpxtop.sim.jobs import BadRequest, Record, decode_body, parse_ask, prompt_size
from lpxtop.sim.presets import PRESETS, SimConfig, Trouble

LOG_LIMIT = 100_000
BREAKAGES: tuple[Breakage, ...] = ("stall", "cut", "error")


class SimServer:
    """The server's state and its handlers."""

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.backend = Backend(config)
        self.trouble = config.trouble
        self.log: deque[Record] = deque(maxlen=LOG_LIMIT)
        self._trouble_since_s = time.monotonic()
        self._draw = random.Random(config.seed)
        self._count = 0
        self._routes: dict[str, tuple[str, Callable[[HttpRequest, Responder], None]]] = {
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
            "/version": ("GET", lambda _, to: to.json(200, {"version": __version__, "simulated": True})),
            "/sim/gpu": ("GET", lambda _, to: to.json(200, self.backend.gpu.answer())),
            "/sim/log": ("GET", self._log),
            "/sim/trouble": ("GET POST", self._trouble),
            "/v1/models": ("GET", lambda _, to: to.json(200, self._models())),
            "/v1/chat/completions": ("POST", lambda request, to: self._complete(request, to, chat=True)),
            "/v1/completions": ("POST", lambda request, to: self._complete(request, to, chat=False)),
            "/tokenize": ("POST", self._tokenize),
        }

    # --- HTTP --------------------------------------------------------------------------------------------------

    def handle(self, request: HttpRequest, responder: Responder) -> None:
        """Answer a request, now or as the engine gets to it."""
        path = request.path.rstrip("/")
        methods, handler = self._routes.get(path, ("", None))
        if (path.startswith("/v1") or path == "/tokenize") and not self._allowed(request):
            responder.json(401, {"error": {"message": "Unauthorized", "type": "invalid_request_error", "code": 401}},
                           www_authenticate="Bearer")  # fmt: skip
        elif handler is None:
            responder.json(404, {"detail": "Not Found"})
        elif ("GET" if request.method == "HEAD" else request.method) not in methods.split():
            responder.json(405, {"detail": "Method Not Allowed"}, allow=methods.replace(" ", ", "))
        else:
            handler(request, responder)

    def _allowed(self, request: HttpRequest) -> bool:
        return self.config.api_key is None or request.headers.get("authorization") == f"Bearer {self.config.api_key}"

    def _loading(self) -> bool:
        return time.monotonic() - self._trouble_since_s < self.trouble.loading_s

    def _health(self, request: HttpRequest, responder: Responder) -> None:
        responder.whole(503 if self._loading() else 200, b"")

    def _metrics(self, request: HttpRequest, responder: Responder) -> None:
        responder.whole(200, self.backend.exposition(), "text/plain; version=0.0.4; charset=utf-8")

    def _log(self, request: HttpRequest, responder: Responder) -> None:
        responder.whole(200, b"".join(msgspec.json.encode(record) + b"\n" for record in self.log), "application/jsonl")

    def _models(self) -> dict[str, Any]:
        model = {"id": self.config.model, "object": "model", "owned_by": "lpxtop-sim",
                 "max_model_len": self._longest}  # fmt: skip
        return {"object": "list", "data": [model]}

    @property
    def _longest(self) -> int:
        """Prompt and answer together: what the model takes, and what the KV cache holds beside the next token."""
        engine = self.config.engine
        return min(engine.max_model_len, engine.blocks * engine.block_tokens - 1)

    def _trouble(self, request: HttpRequest, responder: Responder) -> None:
        """Show what goes wrong, or replace it: what a POST leaves out is switched off. From this machine only."""
        if not request.local:
            responder.json(403, {"error": {"message": "only from loopback", "type": "Forbidden", "code": 403}})
            return
        if request.method == "POST":
            try:
                self.trouble = msgspec.json.decode(request.body, type=Trouble)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                responder.json(400, BadRequest(400, "BadRequestError", str(error)).body())
                return
            self._trouble_since_s = time.monotonic()
        responder.json(200, self.trouble)

    def _tokenize(self, request: HttpRequest, responder: Responder) -> None:
        try:
            count = prompt_size(decode_body(request.body))
        except BadRequest as error:
            responder.json(error.status, error.body())
            return
        responder.json(200, {"count": count, "max_model_len": self._longest, "tokens": list(range(count))})

    # --- completions -------------------------------------------------------------------------------------------

    def _complete(self, request: HttpRequest, responder: Responder, *, chat: bool) -> None:
        self._count += 1
        number = self._count
        record = Record(
            id=f"sim-{number}", request_id=request.headers.get("x-request-id"), received_ns=time.monotonic_ns(),
        )  # fmt: skip
        self.log.append(record)
        try:
            self._refuse(number)
            ask = parse_ask(
                request.body, chat=chat, model=self.config.model, draw=self._draw, max_model_len=self._longest
            )
        except BadRequest as error:
            record.outcome = f"http_{error.status}"
            headers = {"retry_after": "1"} if error.status == 429 else {}
            responder.json(error.status, error.body(), x_request_id=record.request_id or record.id, **headers)
            return
        record.prompt_tokens = ask.prompt_tokens
        job = Job(ask, number, responder, record, self.config)
        self._trouble_for(job, number)
        if self.trouble.delay_ms:
            asyncio.get_running_loop().call_later(self.trouble.delay_ms / 1000, self.backend.submit, job)
        else:
            self.backend.submit(job)

    def _refuse(self, number: int) -> None:
        trouble = self.trouble
        if self._loading():
            raise BadRequest(503, "unavailable_error", "Loading model")
        if _hits(trouble.rate_limit_every, number):
            raise BadRequest(429, "rate_limit_error", "Too many requests (simulated); try again in 1s")
        if _hits(trouble.server_error_every, number):
            raise BadRequest(500, "InternalServerError", "simulated fault")

    def _trouble_for(self, job: Job, number: int) -> None:
        if not job.ask.stream:
            return
        trouble = self.trouble
        job.buffered = trouble.buffered
        job.slow_head = _hits(trouble.slow_head_every, number)
        for name in BREAKAGES:
            if _hits(getattr(trouble, f"{name}_every"), number):
                job.breakage = name


def _hits(every: int, number: int) -> bool:
    return every > 0 and number % every == 0


# --- the process -----------------------------------------------------------------------------------------------------


def _announce(url: str) -> None:
    print(f"listening on {url}", flush=True)  # noqa: T201 - whoever started this process reads this line


async def serve(config: SimConfig, *, ready: Callable[[str], None] = _announce, die_with_parent: bool = False) -> None:
    """Serve until SIGTERM or SIGINT (or, on request, the end of stdin); `ready` is told the URL. Raises UsageError."""
    loop = asyncio.get_running_loop()
    server = SimServer(config)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stopped.set)
    if die_with_parent:
        _watch_stdin(loop, stopped)
    try:
        listener = await loop.create_server(
            lambda: HttpConnection(server.handle), config.host, config.port, backlog=2048
        )
    except OSError as error:
        # asyncio repeats the address in its text; the resolver's codes are negative
        code = error.errno if error.errno is not None else 0
        why = os.strerror(code) if code > 0 else error.strerror or str(error)
        raise UsageError(
            f"the simulated server cannot listen on {config.host}:{config.port}: {why}",
            "choose another --port (0: any free one) or --host",
        ) from None
    host = f"[{config.host}]" if ":" in config.host else config.host
    ready(f"http://{host}:{listener.sockets[0].getsockname()[1]}")
    tasks = [asyncio.create_task(server.backend.run_engine()), asyncio.create_task(server.backend.run_gpu())]
    stop = asyncio.create_task(stopped.wait())
    await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
    listener.close()
    for task in (stop, *tasks):
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


def _watch_stdin(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    """Stop when stdin ends: the process at its other end is gone, however it died."""
    stdin = sys.stdin.fileno()

    def readable() -> None:
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            stopped.set()

    try:
        loop.add_reader(stdin, readable)
    except (PermissionError, ValueError):
        raise UsageError("--die-with-parent needs a pipe or a terminal as stdin") from None


def main(arguments: list[str] | None = None) -> int:
    """`lpxtop sim` and `python -m lpxtop.sim.server`. Raises UsageError."""
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
    flags = parser.parse_args(arguments)
    asyncio.run(serve(_config(flags), die_with_parent=flags.die_with_parent))
    return 0


def _config(flags: argparse.Namespace) -> SimConfig:
    base = presets.preset(flags.preset)
    engine = msgspec.to_builtins(base.engine) | _settings("--engine", flags.engine)
    for name in ("tokens_per_step", "acceptance"):
        if getattr(flags, name) is not None:
            engine[name] = getattr(flags, name)
    if flags.prefix_cache:
        engine["prefix_cache"] = True
    return presets.config({
        "host": flags.host, "port": flags.port, "model": flags.model or base.model, "api_key": flags.api_key,
        "seed": flags.seed, "stamp": flags.stamp, "engine": engine,
        "gpu": msgspec.to_builtins(base.gpu) | _settings("--gpu", flags.gpu),
        "trouble": _settings("--trouble", flags.trouble),
    })  # fmt: skip


def _settings(flag: str, text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise UsageError(f"{flag} is not a JSON object: {error}", f"for example {flag} '{{\"name\": 1}}'") from None


def _run() -> int:
    """`main`, with a mistake told in one line: a parent that started this process shows the last one."""
    try:
        return main()
    except LpxtopError as problem:
        print(f"lpxtop sim: {problem}" + (f" ({problem.hint})" if problem.hint else ""), file=sys.stderr)  # noqa: T201
        return problem.exit_code


if __name__ == "__main__":
    sys.exit(_run())
