"""Settings (flags, environment, files, all by flag name) to a frozen plan. Must not read anything itself."""

import math
from pathlib import Path
from typing import Any

from lpxtop.config import parse_duration
from lpxtop.errors import UsageError
from lpxtop.plan import Limits, Load, Network, Plan, Prompts, Sampling, Step, Stop, Target, Warmup

_SETTINGS = """
api api_key_env arrival cacert concurrency connect_timeout duration extra_body first_token_timeout fps glyphs gpu
header insecure max_concurrency max_tokens metrics model no_ignore_eos no_record no_stream profile prompt_tokens
prompts proxy ramp rate requests seed settle slo system tag temperature theme timeout top_p warmup workers
"""
DEFAULTABLE = frozenset(_SETTINGS.split())
"""Settings that a configuration file or a `LPXTOP_…` variable may give."""


MOST_TOKENS = 10_000_000
"""Of a prompt or an answer: beyond any model's context, and what a mistyped zero must not ask for."""


def make_plan(target: Target, settings: dict[str, Any]) -> Plan:
    """The plan for `target`. Absent settings take the plan's own defaults. Raises UsageError for contradictions."""
    _check_numbers(settings)
    return Plan(
        target=target,
        sampling=_sampling(settings),
        prompts=_prompts(settings),
        load=_load(settings),
        stop=Stop(**_renamed(settings, requests="requests", duration_s="duration")),
        warmup=_warmup(settings),
        limits=Limits(
            **_renamed(settings, connect_s="connect_timeout", first_token_s="first_token_timeout", total_s="timeout")
        ),
        network=Network(**_renamed(settings, cacert="cacert", insecure="insecure", proxy="proxy")),
        slo=tuple(term.strip() for text in settings.get("slo", ()) for term in text.split(",") if term.strip()),
        tags=_tags(settings.get("tag", ())),
        **_renamed(settings, workers="workers", settle_s="settle"),
    )


def _check_numbers(settings: dict[str, Any]) -> None:
    for name in ("rate", "temperature", "top_p"):
        if settings.get(name) is not None and not math.isfinite(settings[name]):
            raise UsageError(f"--{name.replace('_', '-')} {settings[name]} is not a finite number")
    for name in ("max_tokens", "prompt_tokens"):
        if settings.get(name) is not None and settings[name] > MOST_TOKENS:
            raise UsageError(f"--{name.replace('_', '-')} is more than {MOST_TOKENS:,}")


def _renamed(settings: dict[str, Any], **names: str) -> dict[str, Any]:
    """The settings that are present, under the plan's field names."""
    return {field: settings[name] for field, name in names.items() if settings.get(name) is not None}


def _sampling(settings: dict[str, Any]) -> Sampling:
    fields = _renamed(
        settings, max_tokens="max_tokens", temperature="temperature", top_p="top_p", extra_body="extra_body"
    )
    return Sampling(stream=not settings.get("no_stream"), ignore_eos=not settings.get("no_ignore_eos"), **fields)


def _prompts(settings: dict[str, Any]) -> Prompts:
    path = settings.get("prompts")
    if path is not None and not Path(path).is_file():
        raise UsageError(f"--prompts {path}: no such file")
    fields = _renamed(settings, tokens="prompt_tokens", system="system", seed="seed")
    return Prompts(path=None if path is None else str(path), **fields)


def _load(settings: dict[str, Any]) -> Load:
    rate, arrival = settings.get("rate"), settings.get("arrival")
    if rate is not None and settings.get("concurrency") is not None:
        raise UsageError(
            "--rate and --concurrency exclude each other", "a rate is open loop, a concurrency closed loop"
        )
    if arrival is not None and rate is None and "rps" not in (settings.get("profile") or ""):
        raise UsageError("--arrival needs --rate")
    steps = _profile(settings.get("profile"))
    if steps:
        return _profiled(settings, steps)
    fields = _renamed(settings, concurrency="concurrency", max_concurrency="max_concurrency", ramp_s="ramp")
    if fields.get("concurrency", 1) > fields.get("max_concurrency", 1024):
        fields["max_concurrency"] = fields["concurrency"]
    return Load(mode="closed" if rate is None else arrival or "poisson", rate=rate, **fields)


def _profile(text: str | None) -> tuple[Step, ...]:
    """`8@30s,16@30s` (in flight) or `2rps@1m,4rps@1m` (requests per second)."""
    steps = []
    for part in (text or "").split(","):
        if not part.strip():
            continue
        load, at, duration = part.strip().partition("@")
        number, rate = load.strip().removesuffix("rps"), load.strip().endswith("rps")
        try:
            value = float(number) if rate else int(number)
        except ValueError:
            value = 0
        if not at or value <= 0:
            raise UsageError(f"--profile: {part.strip()!r} is not a step", "examples: 8@30s,16@30s or 2rps@1m,4rps@1m")
        step = {"rate": float(value)} if rate else {"concurrency": int(value)}
        steps.append(Step(duration_s=parse_duration(duration), **step))
    if len({step.rate is None for step in steps}) > 1:
        raise UsageError("--profile mixes requests in flight and rates", "use one kind of step")
    return tuple(steps)


def _profiled(settings: dict[str, Any], steps: tuple[Step, ...]) -> Load:
    for name in ("concurrency", "rate"):
        if settings.get(name) is not None:
            raise UsageError(f"--profile and --{name} exclude each other", "the profile says the load of each step")
    first = steps[0]
    fields = _renamed(settings, ramp_s="ramp")
    if first.rate is not None:
        return Load(mode=settings.get("arrival") or "poisson", rate=first.rate, profile=steps, **fields)
    most = max(step.concurrency or 1 for step in steps)
    limit = max(most, settings.get("max_concurrency") or Load().max_concurrency)
    return Load(concurrency=first.concurrency or 1, max_concurrency=limit, profile=steps, **fields)


def _warmup(settings: dict[str, Any]) -> Warmup:
    warmup = settings.get("warmup")
    if isinstance(warmup, int):
        return Warmup(requests=warmup)
    return Warmup(duration_s=warmup)


def _tags(pairs: tuple[str, ...]) -> dict[str, str]:
    tags: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"--tag {pair!r} is not of the form name=value")
        tags[name] = value
    return tags
