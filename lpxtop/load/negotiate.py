"""The pre-flight: is the endpoint usable, which model, which request shape does it accept, how busy is it?

One tiny request of the real shape, changed by at most one thing per retry and only when the server names that thing.
Runs in the main process with ordinary httpx, follows no redirect, and must not import the hot transport.
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from lpxtop.errors import TargetError, UsageError
from lpxtop.load import refusals, servers
from lpxtop.load.deltas import error_text, read
from lpxtop.load.prompts import Prompts, session_mark, usual_overhead
from lpxtop.load.scrub import scrubbed
from lpxtop.load.shape import calibrate, change_for, first_shape, named_in
from lpxtop.load.sse import SseParser
from lpxtop.plan import Negotiated, Plan, Secrets
from lpxtop.plan import Prompts as PromptPlan

PROBE_TOKENS = 8
PROBE_PROMPT_TOKENS = 512
"""The probe's prompt has the plan's length up to this: enough to learn words per token, cheap to prefill."""
SIDE_TIMEOUT_S = 2.0
PROBE_TIMEOUT_S = 120.0
RATE_LIMIT_WAIT_S = 30.0
MODELS_KEPT = 50
"""Gateways list hundreds; a header needs not."""
_ENOUGH_PAYLOADS = 200
_NOT_ABOUT_THE_SHAPE = frozenset({401, 403, 404, 429})


class PreFlight(msgspec.Struct, frozen=True, kw_only=True):
    """What the pre-flight found. `prompts` describes the prompt set, for the header; `busy` counts requests that were
    running or waiting at the server before the probe. The probe's token counts are None when the server told none."""

    negotiated: Negotiated
    model: str
    models: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    busy: int | None = None
    prompts: dict[str, Any] = {}
    probe_prompt_tokens: int | None = None
    probe_output_tokens: int | None = None


async def preflight(
    plan: Plan,
    secrets: Secrets,
    *,
    on_wait: Callable[[str], None] | None = None,
    probe: bool = True,
    wait_s: float = 300.0,
    poll_s: float = 1.0,
) -> PreFlight:
    """Check the endpoint and find the request shape. Raises TargetError when it cannot be used, UsageError for a bad
    prompt file or certificate file.

    A server that is still loading (503) is waited for, up to `wait_s`; `on_wait` gets a line of countdown each poll.
    """
    async with _http(plan, secrets) as http:
        patience = _Patience(wait_s, poll_s, on_wait or (lambda text: None))
        check = _Check(plan, secrets, http, patience)
        try:
            return await check.run(probe)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise refusals.unreachable(plan.target.url, error) from None


def _http(plan: Plan, secrets: Secrets) -> httpx.AsyncClient:
    headers = {"accept": "*/*", "accept-encoding": "identity", "user-agent": "lpxtop"}
    if secrets.api_key:
        headers["authorization"] = f"Bearer {secrets.api_key}"
    headers |= {name.lower(): value for name, value in secrets.headers.items()}
    network, limits = plan.network, plan.limits
    user, _, password = (secrets.proxy_auth or "").partition(":")
    proxy = httpx.Proxy(network.proxy, auth=(user, password) if user else None) if network.proxy else None
    return httpx.AsyncClient(
        headers=headers,
        verify=_tls(network.cacert, network.insecure),
        proxy=proxy,
        trust_env=False,
        follow_redirects=False,
        timeout=httpx.Timeout(min(limits.first_token_s, PROBE_TIMEOUT_S), connect=limits.connect_s),
    )


def _tls(cacert: str | None, insecure: bool) -> ssl.SSLContext:
    if insecure or cacert is None:
        return httpx.create_ssl_context(verify=not insecure, trust_env=False)
    try:
        return ssl.create_default_context(cafile=cacert)
    except OSError as error:
        raise UsageError(
            f"--cacert {cacert}: {error.strerror or error}", "a file of certificates in PEM form"
        ) from None


class _Patience:
    """How long a server that is not ready is waited for, all its answers together."""

    def __init__(self, wait_s: float, poll_s: float, on_wait: Callable[[str], None]) -> None:
        self._left_s, self._poll_s, self._on_wait = wait_s, poll_s, on_wait
        self._whole_s = wait_s

    async def wait(self, why: str, pause_s: float | None = None) -> None:
        """One pause. Raises TargetError when there is no patience left."""
        if self._left_s <= 0:
            raise TargetError(f"the server is still not ready after {self._whole_s:.0f} s: {why}")
        self._on_wait(f"the server is not ready ({why}); waiting up to {self._left_s:.0f} s more")
        pause_s = min(self._left_s, self._poll_s if pause_s is None else pause_s)
        self._left_s -= max(pause_s, 0.001)
        await asyncio.sleep(pause_s)


class _Answer(msgspec.Struct):
    """What the probe's answer was."""

    response: httpx.Response
    body: bytes = b""
    chunks: int = 0
    payloads: int = 0
    cumulative: list[int] = []
    input_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None
    streamed: bool = False


class _Check:
    """One pre-flight."""

    def __init__(self, plan: Plan, secrets: Secrets, http: httpx.AsyncClient, patience: _Patience) -> None:
        self._plan, self._secrets, self._http, self._patience = plan, secrets, http, patience
        self._notes: list[str] = []
        self._root = plan.target.url.removesuffix("/v1")

    async def run(self, probe: bool) -> PreFlight:
        models, headers = await self._models()
        names = tuple(str(model["id"]) for model in models)
        model = self._choose(models, names, probe)
        busy = await servers.busy(self._side)
        server = await servers.identify(self._side, models, headers)
        self._plan = _with_model(self._plan, model)
        shape = first_shape(self._plan.sampling, server.kind, server.version)
        answer = None
        if probe:
            shape, answer = await self._probe(shape, names)
            shape = self._calibrated(shape, answer)
        negotiated = msgspec.structs.replace(shape, models=names[:MODELS_KEPT], notes=tuple(self._notes))
        return PreFlight(
            negotiated=negotiated,
            model=model,
            models=names,
            notes=tuple(self._notes),
            busy=busy,
            prompts=Prompts(self._plan, negotiated).describe(),
            probe_prompt_tokens=answer.input_tokens if answer else None,
            probe_output_tokens=answer.output_tokens if answer else None,
        )

    # --- models ------------------------------------------------------------------------------------------------

    async def _side(self, path: str) -> httpx.Response | None:
        try:
            return await self._http.get(self._root + path, timeout=SIDE_TIMEOUT_S)
        except httpx.HTTPError:
            return None

    async def _models(self) -> tuple[list[dict[str, Any]], httpx.Headers]:
        """The served models as the server describes them; none where it keeps no list."""
        url = f"{self._plan.target.url}/models"
        while (response := await self._http.get(url, timeout=self._plan.limits.connect_s)).status_code == 503:
            await self._patience.wait(self._said(response.content) or "HTTP 503")
        self._usable_list(response)
        models = _models_in(response.content) if response.status_code == 200 else []
        if not models:
            self._notes.append(f"the server lists no models (/models: HTTP {response.status_code})")
        return models, response.headers

    def _usable_list(self, response: httpx.Response) -> None:
        """Raise what the answer to /models makes certain. A named model needs no list: then the probe decides."""
        status, named = response.status_code, self._plan.target.model is not None
        if status == 401 or (status == 403 and not named):
            raise refusals.key_refused(response, response.content, self._secrets)
        if 300 <= status < 400:
            raise refusals.redirected(response)
        if status == 400 and b"https" in response.content.lower():
            raise TargetError(f"{self._plan.target.url} is spoken to in plain http, and wants TLS", "is it https?")
        if not named and (status != 200 or response.content.lstrip()[:1] not in (b"{", b"[")):
            raise refusals.no_list(response)

    def _choose(self, models: list[dict[str, Any]], names: tuple[str, ...], probe: bool) -> str:
        asked = self._plan.target.model
        if asked is None:
            return self._only_one(models, names)
        if names and not {asked, f"{asked}:latest"} & set(names):
            if not probe:
                raise refusals.model_unknown(asked, names, "")
            self._notes.append(f"{asked} is not among the listed models ({refusals.listed(names)})")
        return asked

    @staticmethod
    def _only_one(models: list[dict[str, Any]], names: tuple[str, ...]) -> str:
        """The one model that is not an adapter of another."""
        if not names:
            raise TargetError("the server does not say which models it serves", "name one with -m")
        bases = [str(model["id"]) for model in models if not model.get("parent")]
        if len(names) == 1 or len(bases) == 1:
            return (bases or list(names))[0]
        raise TargetError(f"the server serves {len(names)} models: {refusals.listed(names)}", "choose one with -m")

    def _said(self, body: bytes) -> str:
        return scrubbed(error_text(body)[1], self._secrets)

    # --- the probe ---------------------------------------------------------------------------------------------

    async def _probe(self, shape: Negotiated, names: tuple[str, ...]) -> tuple[Negotiated, _Answer]:
        """The shape that was accepted, and the answer to it."""
        limited_s = RATE_LIMIT_WAIT_S
        while True:
            answer = await self._ask(shape)
            status = answer.response.status_code
            if status == 200 and answer.error is None:
                return self._confirmed(shape, answer), answer
            if status == 503:
                await self._patience.wait(self._said(answer.body) or "HTTP 503")
            elif status == 429 and limited_s > 0:
                pause_s = min(limited_s, _retry_after(answer.response))
                limited_s -= max(pause_s, 1.0)
                await self._patience.wait("HTTP 429, rate limited", pause_s)
            else:
                shape = self._changed(shape, answer, names)

    async def _ask(self, shape: Negotiated) -> _Answer:
        plan = msgspec.structs.replace(
            self._plan,
            sampling=msgspec.structs.replace(self._plan.sampling, max_tokens=PROBE_TOKENS),
            prompts=self._probe_prompts(),
        )
        path = "completions" if plan.target.api == "completions" else "chat/completions"
        body = Prompts(plan, shape, mark=session_mark(time.monotonic_ns())).probe()
        headers = {"content-type": "application/json"}
        url = f"{plan.target.url}/{path}"
        async with self._http.stream("POST", url, content=body, headers=headers) as response:
            return await _read_answer(response, self._secrets)

    def _probe_prompts(self) -> PromptPlan:
        prompts = self._plan.prompts
        return msgspec.structs.replace(prompts, tokens=min(prompts.tokens, PROBE_PROMPT_TOKENS))

    def _changed(self, shape: Negotiated, answer: _Answer, names: tuple[str, ...]) -> Negotiated:
        """The shape without the one thing the server named. Raises TargetError when it named none."""
        if answer.response.status_code not in _NOT_ABOUT_THE_SHAPE:
            refusal = named_in(answer.body) if answer.error is None else [answer.error]
            if (change := change_for(shape, refusal)) is not None:
                self._notes.append(f"the server does not take {change[0]}")
                return change[1]
        if answer.error is not None:
            raise TargetError(f"the server answers with an error: {answer.error}")
        raise refusals.refused(answer.response, answer.body, self._plan, self._secrets, names)

    def _confirmed(self, shape: Negotiated, answer: _Answer) -> Negotiated:
        """The shape with what the answer shows to be in effect."""
        if answer.output_tokens is not None and answer.output_tokens > PROBE_TOKENS:
            self._notes.append(f"the server ignores {shape.limit_parameter}: asked {PROBE_TOKENS} tokens, got more")
        if self._plan.sampling.stream and not answer.streamed:
            self._notes.append("the server answers in one piece although a stream was asked for: no TTFT, no ITL")
        elif shape.include_usage and answer.output_tokens is None:
            self._notes.append("the server reports no usage: tokens are counted by chunks")
        counted = len(answer.cumulative) >= answer.chunks > 0
        return msgspec.structs.replace(shape, continuous_usage=shape.continuous_usage and counted)

    def _calibrated(self, shape: Negotiated, answer: _Answer) -> Negotiated:
        """The shape with this server's tokens per word and overhead, when it counted a synthetic prompt."""
        if answer.input_tokens is None or self._plan.prompts.path is not None:
            return shape
        plan = msgspec.structs.replace(self._plan, prompts=self._probe_prompts())
        words = Prompts(plan, shape).synthetic.words
        measured = calibrate(answer.input_tokens, words, usual_overhead(plan))
        if measured is None:
            self._notes.append(f"the server counts {answer.input_tokens} tokens in {words} words: not believed")
            return shape
        return msgspec.structs.replace(shape, tokens_per_word=measured[0], prompt_overhead=measured[1])


def _with_model(plan: Plan, model: str) -> Plan:
    return msgspec.structs.replace(plan, target=msgspec.structs.replace(plan.target, model=model))


def _models_in(body: bytes) -> list[dict[str, Any]]:
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    models = data.get("data") if isinstance(data, dict) else data
    return (
        [m for m in models if isinstance(m, dict) and isinstance(m.get("id"), str)] if isinstance(models, list) else []
    )


def _retry_after(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", "1")))
    except ValueError:
        return 1.0


async def _read_answer(response: httpx.Response, secrets: Secrets) -> _Answer:
    """Read the answer to its end, or until there is more than a probe can have."""
    answer = _Answer(response)
    parser = SseParser()
    parts: list[bytes] = []
    stream = "event-stream" in response.headers.get("content-type", "")
    async for data in response.aiter_raw():
        parts.append(data)
        if response.status_code == 200:
            for payload in parser.feed(data):
                _count(answer, payload, secrets)
        if answer.payloads > _ENOUGH_PAYLOADS or sum(map(len, parts)) > 1 << 20:
            break
    for payload in parser.flush() if response.status_code == 200 else ():
        _count(answer, payload, secrets)
    answer.body = b"".join(parts)
    answer.streamed = answer.payloads > 0
    if response.status_code == 200 and not answer.payloads and not stream:
        _count(answer, answer.body, secrets)
    return answer


def _count(answer: _Answer, payload: bytes, secrets: Secrets) -> None:
    if payload.strip() == b"[DONE]":
        return
    answer.payloads += 1
    facts = read(payload)
    if facts.error is not None:
        answer.error = scrubbed(facts.error[1], secrets)
    if facts.bears:
        answer.chunks += 1
        if facts.cumulative is not None:
            answer.cumulative.append(facts.cumulative)
    if facts.input_tokens is not None:
        answer.input_tokens = facts.input_tokens
    if facts.output_tokens is not None:
        answer.output_tokens = facts.output_tokens
