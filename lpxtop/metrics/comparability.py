"""May two sets of runs be compared, and what differs between them? Asked before any figure is looked at.

A difference either `blocks` the comparison (it was another experiment), `withholds` some figures, or is `noted`: it
may be the very thing under test. Must not look at latencies.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal

import msgspec

from lpxtop.metrics.samples import RunSample

Effect = Literal["blocks", "withholds", "noted"]
_TOKEN_FIGURES = ("itl", "tpot", "output_tokens_per_s", "energy_per_token_j")
_PROMPT_BAND = 0.05
_LENGTH_DISTANCE = 0.1


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that differs; `withheld` are the metrics without a verdict because of it."""

    what: str
    a: str
    b: str
    effect: Effect
    withheld: tuple[str, ...] = ()


Reader = Callable[[RunSample], Any]
Fact = tuple[str, Reader, Effect, tuple[str, ...]]
"""Name, how it is read, what a difference does, and to which metrics."""


def _in(*path: str) -> Reader:
    """Reads a value out of the summary's `run`; None where a part is missing."""

    def read(run: RunSample) -> Any:
        value: Any = run.summary["run"]
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return value

    return read


def _tokens(name: str) -> Reader:
    return lambda run: run.summary["tokens"].get(name)


def _server(run: RunSample) -> Any:
    negotiated = run.summary["run"].get("negotiated") or {}
    kind, version = negotiated.get("server_kind"), negotiated.get("server_version")
    known = " ".join(str(part) for part in (kind, version) if part)
    return known or (run.summary["run"].get("target") or {}).get("server")


def _gpus(run: RunSample) -> Any:
    names = sorted(set(run.gpu_names))
    return ", ".join(f"{run.gpu_names.count(name)}× {name}" for name in names) or None


def _power(run: RunSample) -> Any:
    known = [limit for limit in run.power_limits if limit is not None]
    return "/".join(f"{limit:g} W" for limit in sorted(set(known))) or None


def _clocks(run: RunSample) -> Any:
    gpus = run.summary["run"].get("gpus") or []
    clocks = [gpu.get("sm_clock_max_mhz") for gpu in gpus if isinstance(gpu, dict)]
    known = {clock for clock in clocks if clock is not None}
    return "/".join(f"{clock} MHz" for clock in sorted(known)) or None


def _mode(run: RunSample) -> Any:
    mode = (run.summary["run"].get("plan") or {}).get("load", {}).get("mode", "closed")
    return "closed loop" if mode == "closed" else f"open loop ({mode})"


def _slo(run: RunSample) -> Any:
    return ", ".join(run.summary["slo"]["terms"]) or None


def _host(run: RunSample) -> Any:
    return (run.summary["run"].get("host") or {}).get("name")


_ROWS: tuple[Fact, ...] = (
    ("kind of recording", _in("kind"), "noted", ()),
    ("simulated", _in("simulated"), "blocks", ()),
    ("API", _in("target", "api"), "blocks", ()),
    ("model", _in("target", "model"), "blocks", ()),
    ("load mode", _mode, "blocks", ()),
    ("max tokens", _in("plan", "sampling", "max_tokens"), "blocks", ()),
    ("temperature", _in("plan", "sampling", "temperature"), "blocks", ()),
    ("top-p", _in("plan", "sampling", "top_p"), "blocks", ()),
    ("streaming", _in("plan", "sampling", "stream"), "blocks", ()),
    ("extra body", _in("plan", "sampling", "extra_body"), "blocks", ()),
    ("ignore EOS", _in("negotiated", "ignore_eos"), "blocks", ()),
    ("system prompt", _in("plan", "prompts", "system"), "blocks", ()),
    ("prompts from", lambda run: run.prompts.get("source"), "blocks", ()),
    ("SLO", _slo, "withholds", ("goodput",)),
    ("token source", _tokens("source"), "withholds", _TOKEN_FIGURES),
    ("tokens per chunk known", _tokens("per_chunk_known"), "withholds", _TOKEN_FIGURES),
    ("stamps", lambda run: run.summary["quality"].get("timestamp_source"), "noted", ()),
    ("limit parameter", _in("negotiated", "limit_parameter"), "noted", ()),
    ("endpoint", _in("target", "url"), "noted", ()),
    ("server", _server, "noted", ()),
    ("GPUs", _gpus, "noted", ()),
    ("power cap", _power, "noted", ()),
    ("highest SM clock", _clocks, "noted", ()),
    ("driver", lambda run: ", ".join(run.drivers) or None, "noted", ()),
    ("client host", _host, "noted", ()),
    ("load processes", _in("plan", "workers"), "noted", ()),
    ("lpxtop", _in("lpxtop"), "noted", ()),
)
"""What is compared, how it is read, and what a difference does."""

NAMES = (*(row[0] for row in _ROWS), "prompts", "prompt length", "output length")
"""What may be named as meant to differ."""


def differences(a: Sequence[RunSample], b: Sequence[RunSample], meant: Collection[str] = ()) -> list[Difference]:
    """Everything that differs between the sides or within one, the most serious first. What is `meant` to differ is
    noted only."""
    found = [_row(row, a, b) for row in _ROWS]
    found += [_tags(name, a, b) for name in _tag_names([*a, *b])]
    found += [_prompts(a, b), _prompt_length(a, b), _output_length(a, b), _client(a, b)]
    known = [difference for difference in found if difference is not None]
    softened = [_soften(difference) if difference.what in meant else difference for difference in known]
    return sorted(softened, key=lambda difference: ("blocks", "withholds", "noted").index(difference.effect))


def same(a: Sequence[RunSample], b: Sequence[RunSample]) -> list[tuple[str, str]]:
    """What both sides share, of what a reader asks for first."""
    wanted = ("model", "load mode", "max tokens", "streaming", "server", "GPUs")
    rows = [(name, _shown(a, read), _shown(b, read)) for name, read, _, _ in _ROWS if name in wanted]
    hashes = [{_hash(run) for run in side} for side in (a, b)]
    found = [(name, left) for name, left, right in rows if left == right and left != "not known"]
    if hashes[0] == hashes[1] and len(hashes[0]) == 1 and None not in hashes[0]:
        found.append(("prompts", f"sha256 {str(next(iter(hashes[0])))[:8]}"))
    return found


def _soften(difference: Difference) -> Difference:
    return msgspec.structs.replace(difference, effect="noted", withheld=())


def _row(row: Fact, a: Sequence[RunSample], b: Sequence[RunSample]) -> Difference | None:
    what, read, effect, withheld = row
    left, right = _values(a, read), _values(b, read)
    if left == right and len(left) == 1:
        return None
    return Difference(what=what, a=_shown(a, read), b=_shown(b, read), effect=effect, withheld=withheld)


def _values(runs: Iterable[RunSample], read: Reader) -> set[str]:
    return {_word(read(run)) for run in runs}


def _shown(runs: Iterable[RunSample], read: Reader) -> str:
    return " | ".join(sorted(_values(runs, read)))


def _word(value: Any) -> str:
    if value is None or value in ({}, []):
        return "not known" if value is None else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _tag_names(runs: Iterable[RunSample]) -> list[str]:
    return sorted({name for run in runs for name in run.summary["run"].get("tags") or {}})


def _tags(name: str, a: Sequence[RunSample], b: Sequence[RunSample]) -> Difference | None:
    return _row((name, _in("tags", name), "noted", ()), a, b)


def _hash(run: RunSample) -> Any:
    return run.prompts.get("sha256")


def _prompts(a: Sequence[RunSample], b: Sequence[RunSample]) -> Difference | None:
    """Other synthetic prompts of the same length are as good; other entries of a file are another experiment."""
    synthetic = all(run.prompts.get("source") == "synthetic" for run in [*a, *b])
    found = _row(("prompts", _hash, "noted" if synthetic else "blocks", ()), a, b)
    if found is None:
        return None
    return msgspec.structs.replace(found, a=_short(found.a), b=_short(found.b))


def _short(hashes: str) -> str:
    return " | ".join(word if word == "not known" else f"sha256 {word[:8]}" for word in hashes.split(" | "))


def _prompt_length(a: Sequence[RunSample], b: Sequence[RunSample]) -> Difference | None:
    lengths = [[_mean_prompt(run) for run in side] for side in (a, b)]
    known = [length for side in lengths for length in side if length is not None]
    if len(known) < len(a) + len(b) or max(known) <= min(known) * (1 + _PROMPT_BAND):
        return None
    left, right = (" | ".join(f"{length:.0f} tok" for length in sorted({round(x or 0) for x in s})) for s in lengths)
    return Difference(what="prompt length", a=left, b=right, effect="blocks")


def _mean_prompt(run: RunSample) -> float | None:
    if run.input_lengths:
        return sum(run.input_lengths) / len(run.input_lengths)
    planned = run.prompts.get("tokens")
    return float(planned) if isinstance(planned, int | float) else None


def _output_length(a: Sequence[RunSample], b: Sequence[RunSample]) -> Difference | None:
    """Kolmogorov-Smirnov distance of the answers' lengths: beyond 0.1, and beyond what so few answers may show."""
    left, right = (sorted(length for run in side for length in run.output_lengths) for side in (a, b))
    if not left or not right:
        return None
    distance = ks_distance(left, right)
    chance = 1.63 * ((len(left) + len(right)) / (len(left) * len(right))) ** 0.5
    if distance <= max(_LENGTH_DISTANCE, chance):
        return None
    means = [f"mean {sum(side) / len(side):.0f} tok" for side in (left, right)]
    return Difference(what="output length", a=means[0], b=means[1], effect="blocks")


def ks_distance(left: Sequence[int], right: Sequence[int]) -> float:
    """The largest difference of two empirical distributions; both sorted."""
    i = j = 0
    largest = 0.0
    while i < len(left) and j < len(right):
        value = min(left[i], right[j])
        while i < len(left) and left[i] == value:
            i += 1
        while j < len(right) and right[j] == value:
            j += 1
        largest = max(largest, abs(i / len(left) - j / len(right)))
    return largest


def _client(a: Sequence[RunSample], b: Sequence[RunSample]) -> Difference | None:
    """Figures of a client that was the bottleneck are the client's."""
    limited = [any("client_limited" in run.summary["quality"]["verdicts"] for run in side) for side in (a, b)]
    if not any(limited):
        return None
    left, right = ("limited by its client" if side else "kept up" for side in limited)
    return Difference(what="client", a=left, b=right, effect="blocks")
