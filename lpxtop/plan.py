"""The plan of a run: frozen, without secrets, safe to record. Must not read files, the environment or a clock.

Durations are seconds (`_s`), rates are requests per second, sizes are tokens. A plan says what was asked; what the
server accepted is in `Negotiated`, and what happened is in the events.
"""

from typing import Any, Literal

import msgspec


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where the load goes. `url` is the API's base (`http://host:8000/v1`), without user info, query or last slash."""

    url: str
    api: Literal["chat", "completions"] = "chat"
    model: str | None = None


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """What each request asks of the model. `extra_body` is merged into the JSON body as it is."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float | None = None
    stream: bool = True
    ignore_eos: bool = True
    extra_body: dict[str, Any] = {}


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent: unique synthetic prompts of about `tokens` tokens, or the entries of a file in order."""

    tokens: int = 128
    path: str | None = None
    system: str | None = None
    seed: int = 0


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a profile: a concurrency (closed loop) or a rate (open loop), held for `duration_s`."""

    duration_s: float
    concurrency: int | None = None
    rate: float | None = None


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are due: `closed` keeps `concurrency` in flight; `constant` and `poisson` are open loop at `rate`.

    `max_concurrency` bounds the slider and number entry, never an open loop. A `profile` moves the load by itself,
    step by step, and ends the run after the last one.
    """

    mode: Literal["closed", "constant", "poisson"] = "closed"
    concurrency: int = 1
    rate: float | None = None
    max_concurrency: int = 1024
    ramp_s: float = 0.0
    profile: tuple[Step, ...] = ()


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """When load ends by itself: after so many measured requests, or so long after the first one. None: never."""

    requests: int | None = None
    duration_s: float | None = None
    drain_s: float = 30.0


class Warmup(msgspec.Struct, frozen=True, kw_only=True):
    """Requests or seconds at the start whose figures are kept apart from the measurement."""

    requests: int | None = None
    duration_s: float | None = None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Time-outs, seconds. `stall_s` None means max(30 s, 20 × the stream's median gap)."""

    connect_s: float = 10.0
    first_token_s: float = 600.0
    stall_s: float | None = None
    total_s: float | None = None


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """How connections are made. `proxy` and `cacert` are as the user gave them, with user info removed from a proxy."""

    cacert: str | None = None
    insecure: bool = False
    proxy: str | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a run was asked to do."""

    target: Target
    sampling: Sampling = Sampling()
    prompts: Prompts = Prompts()
    load: Load = Load()
    stop: Stop = Stop()
    warmup: Warmup = Warmup()
    limits: Limits = Limits()
    network: Network = Network()
    workers: int = 1
    settle_s: float = 2.0
    slo: tuple[str, ...] = ()
    fail_if: tuple[str, ...] = ()
    abort_if: tuple[str, ...] = ()
    tags: dict[str, str] = {}
    record_text: bool = False


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    """What must never be recorded, logged or shown: it travels only down a worker's stdin."""

    api_key: str | None = None
    headers: dict[str, str] = {}
    proxy_auth: str | None = None

    def __repr__(self) -> str:
        return "Secrets(…)"


class Negotiated(msgspec.Struct, frozen=True, kw_only=True):
    """The request shape the server accepted, found by the pre-flight and frozen for the run.

    `limit_parameter` is `max_tokens` or `max_completion_tokens`; a False switch is not sent. A synthetic prompt of w
    words has about `prompt_overhead + w × tokens_per_word` tokens on this server (None: never measured).
    """

    limit_parameter: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    include_usage: bool = True
    continuous_usage: bool = False
    ignore_eos: bool = False
    min_tokens: bool = False
    tokens_per_word: float | None = None
    prompt_overhead: int | None = None
    server_kind: str | None = None
    server_version: str | None = None
    models: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
