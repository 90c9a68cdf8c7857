"""Which server answers, which version, and how busy it is: a few cheap questions whose answers are all optional.

Must not raise for what a server does, and must not ask for anything that costs the server work.
"""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import httpx
import msgspec

Get = Callable[[str], Awaitable[httpx.Response | None]]
"""Fetches a path below the server's root with a short time-out; None when that fails."""

OWNERS = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llamacpp": "llama.cpp",
    "library": "Ollama",
    "lmdeploy": "LMDeploy",
    "tensorrt_llm": "TensorRT-LLM",
}
"""`owned_by` of a model in /models -> the server's name."""

_RUNNING = (
    "vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing", "tgi_batch_current_size",
    "trtllm_num_requests_running", "lmdeploy:num_requests_running", "num_requests_running",
    "dynamo_frontend_inflight_requests",
)  # fmt: skip
_WAITING = (
    "vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred", "tgi_queue_size",
    "trtllm_num_requests_waiting", "lmdeploy:num_requests_waiting", "num_requests_waiting",
)  # fmt: skip
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


class Server(NamedTuple):
    """What is known of a server."""

    kind: str | None = None
    version: str | None = None


async def identify(get: Get, models: list[dict[str, Any]], headers: httpx.Headers) -> Server:
    """From what its list of models said already, then from the places where servers tell their version."""
    kind = next((OWNERS[owner] for model in models if (owner := model.get("owned_by")) in OWNERS), None)
    if headers.get("server", "").startswith("llama.cpp"):
        kind = "llama.cpp"
    questions = [_VERSIONS[kind]] if kind in _VERSIONS else [] if kind else list(_VERSIONS.values())
    found = [server for server in await asyncio.gather(*(ask(get) for ask in questions)) if server.kind]
    return found[0] if found else Server(kind)


async def _json(get: Get, path: str) -> dict[str, Any]:
    response = await get(path)
    if response is None or response.status_code != 200:
        return {}
    try:
        data = msgspec.json.decode(response.content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _text(value: Any) -> str | None:
    return value[:60] if isinstance(value, str) and value else None


async def _vllm(get: Get) -> Server:
    version = _text((await _json(get, "/version")).get("version"))
    return Server("vLLM", version) if version else Server()


async def _sglang(get: Get) -> Server:
    info = await _json(get, "/get_server_info")
    return (
        Server("SGLang", _text(info.get("version"))) if "tp_size" in info or "mem_fraction_static" in info else Server()
    )


async def _llama_cpp(get: Get) -> Server:
    info = await _json(get, "/props")
    return Server("llama.cpp", _text(info.get("build_info"))) if "build_info" in info else Server()


async def _tgi(get: Get) -> Server:
    info = await _json(get, "/info")
    return Server("TGI", _text(info.get("version"))) if "max_total_tokens" in info else Server()


async def _ollama(get: Get) -> Server:
    version = _text((await _json(get, "/api/version")).get("version"))
    return Server("Ollama", version) if version else Server()


_VERSIONS: dict[str | None, Callable[[Get], Awaitable[Server]]] = {
    "Ollama": _ollama,
    "TGI": _tgi,
    "llama.cpp": _llama_cpp,
    "SGLang": _sglang,
    "vLLM": _vllm,
}
"""Most telling first: other servers than vLLM have a /version too."""


async def busy(get: Get) -> int | None:
    """Requests running and waiting, by the server's own metrics; None when it has none or tells neither."""
    response = await get("/metrics")
    if response is None or response.status_code != 200 or "json" in response.headers.get("content-type", ""):
        return None
    return busy_in(response.text)


def busy_in(exposition: str) -> int | None:
    """Running plus waiting requests in a Prometheus text, over all engines; None when neither is there."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(exposition):
        if name in _RUNNING or name in _WAITING:
            sums[name] = sums.get(name, 0.0) + _number(value)
    counts = [next((sums[name] for name in names if name in sums), None) for names in (_RUNNING, _WAITING)]
    known = [count for count in counts if count is not None and math.isfinite(count)]
    return round(sum(known)) if known else None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
