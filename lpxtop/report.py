"""A summary as text, JSON, markdown or CSV. Layer 6: no Textual, no arithmetic, every number through format.py.

Takes the dict of `metrics/summary.py`, live or read back from a file; what is missing there is "–" here.
"""

import csv as csv_module
import io
import textwrap
from collections.abc import Sequence
from typing import Any

import msgspec

from lpxtop import format
from lpxtop.metrics.definitions import BY_KEY
from lpxtop.metrics.distribution import MIN_SAMPLES

WIDTH = 80
CAUSES = 3
"""Causes that the text names; the JSON has all."""
_FIGURES = ("mean", "p50", "p90", "p95", "p99", "max")
_SHOWN = ("ttft", "ttft_due", "ttfo", "itl", "tpot", "e2e", "schedule_delay")
_LEVEL_COLUMNS = ("ttft", "itl", "tpot", "e2e")
_OF_LEVEL = ("count", *_FIGURES)
_OPEN_LOOP = ("constant", "poisson")


def to_json(summary: dict[str, Any]) -> bytes:
    """The summary as indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"


# --- text ---------------------------------------------------------------------------------------------------------


def text(summary: dict[str, Any]) -> str:
    """What a terminal of 80 columns shows: what was measured, how it went, how far to trust it."""
    if summary["run"].get("kind") == "watch":
        return "\n\n".join("\n".join(block) for block in _watched(summary) if block) + "\n"
    blocks = [
        _head(summary), _requests(summary), _latencies(summary), _throughput(summary), _levels(summary),
        _servers(summary), _gpus(summary), _why(summary), _quality(summary),
    ]  # fmt: skip
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _head(summary: dict[str, Any]) -> list[str]:
    run = summary["run"]
    target = run.get("target") or {}
    model, server = _word(target.get("model")), _server(run)
    marks = ["SIMULATED"] if run.get("simulated") else []
    marks += [f"{run['ended']}"] if run.get("ended") not in (None, "done") else []
    lines = [f"{model}  {_word(target.get('url'))}{'  ' + ' · '.join(marks) if marks else ''}"]
    if server:
        lines.append(server)
    lines.append(conditions(summary))
    return [_fit(line) for line in lines]


def _server(run: dict[str, Any]) -> str:
    negotiated = run.get("negotiated") or {}
    server = (run.get("target") or {}).get("server")
    known = server if isinstance(server, str) else negotiated.get("server_kind")
    version = negotiated.get("server_version")
    return _word(f"{known} {version}" if known and version and version not in known else known) if known else ""


def conditions(summary: dict[str, Any]) -> str:
    """How the load was made, in one line."""
    run = summary["run"]
    plan = run.get("plan") or {}
    load, sampling, prompts = plan.get("load") or {}, plan.get("sampling") or {}, plan.get("prompts") or {}
    mode = load.get("mode", "closed")
    if mode in _OPEN_LOOP:
        how = f"open loop ({mode}) {format.with_unit(load.get('rate'), 'req/s')}"
    else:
        how = f"concurrency {_span([level.get('concurrency') for level in summary['levels']], load.get('concurrency'))}"
    parts = [how]
    if prompts.get("tokens") is not None or prompts.get("path"):
        parts.append(f"prompts {prompts['path'] if prompts.get('path') else str(prompts['tokens']) + ' tok'}")
    if sampling.get("max_tokens") is not None:
        parts.append(f"max {sampling['max_tokens']} tok")
    if sampling.get("stream") is False:
        parts.append("no stream")
    return " · ".join([*parts, f"measured {format.duration(run.get('duration_s'))}"])


def _span(values: Sequence[int | None], planned: int | None) -> str:
    known = [value for value in values if value is not None] or ([] if planned is None else [planned])
    if not known:
        return format.UNKNOWN
    low, high = min(known), max(known)
    return format.count(low) if low == high else f"{format.count(low)}–{format.count(high)}"


def _requests(summary: dict[str, Any]) -> list[str]:
    requests = summary["requests"]
    counts = [f"{format.count(requests['due'])} due"]
    counts += [
        f"{format.count(requests[name])} {name}"
        for name in ("ok", "failed", "cut", "cancelled", "open")
        if requests.get(name) or name == "ok"
    ]
    if requests.get("failed"):
        counts.append(f"errors {format.percent(requests.get('error_rate'), 1)}")
    if requests.get("warmup"):
        counts.append(f"warm-up {format.count(requests['warmup'])} (apart)")
    lines = [f"requests   {' · '.join(counts)}"]
    other = {k: n for k, n in requests["by_outcome"].items() if k not in ("ok", "cut", "cancelled")}
    if other:
        lines.append(f"           {', '.join(f'{name} {format.count(n)}' for name, n in other.items())}")
    tokens = summary["tokens"]
    lines.append(
        f"tokens     {format.count(tokens['input'])} in · {format.count(tokens['output'])} out"
        f" (counted by {_word(tokens['source'])})"
    )
    return [_fit(line) for line in lines]


def _latencies(summary: dict[str, Any]) -> list[str]:
    """The table; a dash with samples behind it means too few for that percentile, and the footnote says so."""
    rows = [(key, summary["latency_ms"][key]) for key in _shown(summary)]
    if not any(row["count"] for _, row in rows):
        return ["latency    nothing to measure: no request was answered"]
    lines = [f"{'ms':<15}{'count':>9}" + "".join(f"{name:>9}" for name in _FIGURES)]
    few = False
    for key, row in rows:
        few = few or (row["count"] > 0 and (row["p95"] is None or row["p99"] is None))
        cells = "".join(f"{format.milliseconds(row[name]):>9}" for name in _FIGURES)
        lines.append(f"{_label(summary, key):<15}{format.count(row['count']):>9}{cells}")
    if few:
        lines.append(f"– too few samples: p95 needs {MIN_SAMPLES[950]}, p99 {MIN_SAMPLES[990]}")
    if not _per_chunk_known(summary):
        lines.append("ICL: gaps between chunks; tokens per chunk are not known, so there is no ITL")
    if summary["tokens"].get("tpot_first_chunk_assumed"):
        lines.append("TPOT takes the first chunk as one token: an estimate where chunks hold more")
    return lines


def _shown(summary: dict[str, Any]) -> list[str]:
    """The rows worth a line: TTFT from due where it differs, TTFO where there was reasoning, delay where it counts."""
    found = summary["latency_ms"]
    plan = summary["run"].get("plan") or {}
    open_loop = (plan.get("load") or {}).get("mode") in _OPEN_LOOP
    hidden = set()
    if not open_loop:
        hidden |= {"ttft_due"}
    if found["ttfo"] == found["ttft"]:
        hidden |= {"ttfo"}
    delay = found["schedule_delay"]["max"]
    if not open_loop and (delay is None or delay < 1):
        hidden |= {"schedule_delay"}
    return [key for key in _SHOWN if key not in hidden]


def _label(summary: dict[str, Any], key: str) -> str:
    return BY_KEY["icl" if key == "itl" and not _per_chunk_known(summary) else key].label


def _per_chunk_known(summary: dict[str, Any]) -> bool:
    return summary["tokens"].get("per_chunk_known") is not False


def _throughput(summary: dict[str, Any]) -> list[str]:
    found = summary["throughput"]
    rates = [
        format.with_unit(found["output_tokens_per_s"], "output tok/s"),
        format.with_unit(found["total_tokens_per_s"], "total tok/s"),
        format.with_unit(found["requests_per_s"], "req/s"),
    ]
    lines = [f"throughput {' · '.join(rates)}"]
    user = found["tokens_per_s_per_user"]
    if user["count"]:
        whole = found["request_tokens_per_s"]
        lines.append(
            f"per user   p50 {format.with_unit(user['p50'], 'tok/s')} once it flows"
            f" · {format.with_unit(whole['p50'], 'tok/s')} over the whole wait"
        )
    if found.get("output_tokens_by") == "finished":
        lines.append(
            f"           tokens of finished requests; live {format.with_unit(found['chunks_per_s'], 'chunk/s')}"
        )
    slo = summary["slo"]
    if slo["terms"]:
        goodput = format.with_unit(slo["goodput_requests_per_s"], "req/s")
        lines.append(f"SLO        {', '.join(slo['terms'])}")
        lines.append(f"           met by {format.percent(slo['attainment'], 1)} of requests due · goodput {goodput}")
    return [_fit(line) for line in lines]


def _levels(summary: dict[str, Any]) -> list[str]:
    """One line per load level, only when there was more than one."""
    if len(summary["levels"]) < 2:
        return []
    lines = [f"{'level':<14}{'tok/s':>9}{'req/s':>8}{'TTFT p50':>10}{'p95':>8}{'ITL p50':>9}{'p95':>8}  steady"]
    for level in summary["levels"]:
        ttft, itl = level["latency_ms"]["ttft"], level["latency_ms"]["itl"]
        rates = level["throughput"]
        steady = {True: "yes", False: "no", None: format.UNKNOWN}[level["steady"]]
        lines.append(
            f"{_load(level):<14}{format.significant(rates['output_tokens_per_s']):>9}"
            f"{format.significant(rates['requests_per_s']):>8}"
            f"{format.milliseconds(ttft['p50']):>10}{format.milliseconds(ttft['p95']):>8}"
            f"{format.milliseconds(itl['p50']):>9}{format.milliseconds(itl['p95']):>8}  {steady}"
        )
    return lines


def _load(level: dict[str, Any]) -> str:
    if level.get("rate") is not None:
        return format.with_unit(level["rate"], "req/s")
    return f"{format.count(level.get('concurrency'))} in flight"


def _watched(summary: dict[str, Any]) -> list[list[str]]:
    """The blocks of a watch: no request was ours, so there is only what the server and the GPUs said."""
    run = summary["run"]
    head = (
        f"watched {_word((run.get('target') or {}).get('url'))}, {format.duration(run.get('watched_s'))}, no load sent"
    )
    nothing = [] if summary["server"] or summary["gpu"] else ["neither a server's metrics nor a GPU could be read"]
    return [[_fit(head)], _servers(summary), _gpus(summary), _why(summary), nothing]


def _servers(summary: dict[str, Any]) -> list[str]:
    """The server's own figures: queues as mean (max), counters as what was added."""
    found = summary["server"]
    parts = [
        f"{label} {show(found[name]['mean'])} (max {show(found[name]['max'])})"
        for name, label, show in _SERVER_GAUGES
        if name in found
    ]
    parts += [
        f"{label} +{format.count(round(found[name]['gained']))}" for name, label in _SERVER_COUNTERS if name in found
    ]
    return textwrap.wrap(" · ".join(parts), WIDTH, initial_indent="server     ", subsequent_indent=" " * 11)


_SERVER_GAUGES = (
    ("running", "running", format.significant),
    ("waiting", "waiting", format.significant),
    ("kv_usage", "KV", format.percent),
)
_SERVER_COUNTERS = (("preemptions", "preemptions"), ("output_tokens", "output tokens"))


def _gpus(summary: dict[str, Any]) -> list[str]:
    lines = []
    for gpu in summary["gpu"]:
        busy, power = gpu["utilization_percent"], gpu["power_watts"]
        memory, heat = gpu["memory_used_bytes"], gpu["temperature_c"]
        name = f"GPU {gpu['index']} {_word(gpu.get('name')) if gpu.get('name') else ''}".rstrip()
        energy = _energy(gpu)
        lines.append(
            f"{name}: {_percent(busy)} busy · {format.bytes_iec(_max(memory))} · {_mean(power)} W"
            f" (max {_whole(_max(power))}) · {_whole(_max(heat))} °C{energy}"
        )
        held = [
            f"{reason.replace('_', ' ')} {format.duration(seconds)}" for reason, seconds in gpu["throttled"].items()
        ]
        if held:
            lines.append(f"  throttled: {', '.join(held)}")
    return [_fit(line) for line in lines]


def _energy(gpu: dict[str, Any]) -> str:
    """Energy of the measured time; "~" where it is power integrated over samples, not a counter."""
    if gpu["energy_j"] is None:
        return ""
    about = "~" if gpu["energy_source"] == "integrated" else ""
    return f" · {about}{format.with_unit(gpu['energy_j'] / 1000, 'kJ')}"


def _mean(pair: dict[str, float] | None) -> str:
    return format.significant(None if pair is None else pair["mean"])


def _whole(value: float | None) -> str:
    return format.count(None if value is None else round(value))


def _percent(pair: dict[str, float] | None) -> str:
    return format.percent(None if pair is None else pair["mean"] / 100)


def _max(pair: dict[str, float] | None) -> float | None:
    return None if pair is None else pair["max"]


def _causes(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The weightiest verdicts that come with a next step: why it is as slow as it is."""
    return [verdict for verdict in summary["verdicts"] if verdict.get("next")][:CAUSES]


def _why(summary: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for cause in _causes(summary):
        lines += _wrapped(_MARKS.get(cause["level"], "i  "), cause["text"])
        lines += textwrap.wrap(
            format.clean(cause["next"], 500),
            WIDTH,
            initial_indent="   → ",
            subsequent_indent="     ",
            break_on_hyphens=False,
        )
    return ["why", *lines] if lines else []


_MARKS = {"error": "!! ", "warn": "!  "}


def _quality(summary: dict[str, Any]) -> list[str]:
    found = summary["quality"]
    delay = found["read_delay_us"]["p99"]
    lines = [
        f"quality    {_word(found['timestamp_source'])} stamps"
        f" · read delay p99 {format.latency(None if delay is None else delay / 1000)}"
        f" · coalesced {format.percent(found['coalesced_ratio'], 1)}",
        f"           client CPU {format.percent(found['client_cpu_ratio'])}"
        f" · loop lag p99 {format.latency(found['loop_lag_ms']['p99'])}"
        f" · sends late p99 {format.latency(found['send_lateness_ms']['p99'])}",
    ]
    said = [verdict["code"] for verdict in _causes(summary)]
    misleading = [verdict for verdict in summary["verdicts"] if verdict["code"] in found["verdicts"]]
    for verdict in misleading:
        if verdict["code"] not in said:
            lines += _wrapped(_MARKS.get(verdict["level"], "i  "), verdict["text"])
    if not misleading:
        lines.append("           nothing found that would make these figures misleading")
    return [_fit(line) for line in lines]


def _wrapped(mark: str, sentence: str) -> list[str]:
    return textwrap.wrap(format.clean(sentence, 500), WIDTH, initial_indent=mark, subsequent_indent="   ")


def _word(value: Any) -> str:
    return format.UNKNOWN if value is None else format.clean(str(value), 200)


def _fit(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


# --- markdown and CSV ---------------------------------------------------------------------------------------------


def markdown(summary: dict[str, Any]) -> str:
    """A section to paste into a ticket: conditions, latencies, throughput, verdicts."""
    run = summary["run"]
    target = run.get("target") or {}
    lines = [f"### {_word(target.get('model'))} at {_word(target.get('url'))}", "", conditions(summary), ""]
    if run.get("simulated"):
        lines += ["**Simulated server and GPU.**", ""]
    lines += _bar(["ms", "count", *_FIGURES])
    for key in _shown(summary):
        row = summary["latency_ms"][key]
        cells = [format.milliseconds(row[name]) for name in _FIGURES]
        lines.append(_row([_label(summary, key), format.count(row["count"]), *cells]))
    lines += ["", *(f"- {line.strip()}" for line in [*_requests(summary), *_throughput(summary), *_gpus(summary)])]
    if len(summary["levels"]) > 1:
        lines += ["", *_level_table(summary)]
    lines += ["", *(f"- **{verdict['level']}** {verdict['text']}{_next(verdict)}" for verdict in summary["verdicts"])]
    return "\n".join(lines).rstrip() + "\n"


def _next(verdict: dict[str, Any]) -> str:
    return f" → {verdict['next']}" if verdict.get("next") else ""


def _level_table(summary: dict[str, Any]) -> list[str]:
    lines = _bar(["load", "tok/s", "req/s", "TTFT p50", "TTFT p95", "ITL p50", "ITL p95", "E2E p50"])
    for level in summary["levels"]:
        found, rates = level["latency_ms"], level["throughput"]
        pairs = (("ttft", "p50"), ("ttft", "p95"), ("itl", "p50"), ("itl", "p95"), ("e2e", "p50"))
        cells = [format.milliseconds(found[key][name]) for key, name in pairs]
        speed = [format.significant(rates[name]) for name in ("output_tokens_per_s", "requests_per_s")]
        lines.append(_row([_load(level), *speed, *cells]))
    return lines


def _bar(names: Sequence[str]) -> list[str]:
    return [_row(names), _row(["---", *["---:"] * (len(names) - 1)])]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def csv(summary: dict[str, Any]) -> str:
    """One line per load level, numbers in full; an unknown value is an empty field."""
    out = io.StringIO()
    writer = csv_module.writer(out, lineterminator="\n")
    writer.writerow(
        ["model", "concurrency", "rate", "from_s", "to_s", "measured_s", "steady", "ended", "failed", "excluded",
         "output_tokens_per_s", "requests_per_s",
         *(f"{key}_count" if name == "count" else f"{key}_{name}_ms" for key in _LEVEL_COLUMNS for name in _OF_LEVEL)]
    )  # fmt: skip
    model = (summary["run"].get("target") or {}).get("model")
    for level in summary["levels"]:
        requests, rates, found = level["requests"], level["throughput"], level["latency_ms"]
        writer.writerow(
            [model, level["concurrency"], level["rate"], level["from_s"], level["to_s"], level["measured_s"],
             level["steady"], requests["ended"], requests["failed"], requests["excluded"],
             rates["output_tokens_per_s"], rates["requests_per_s"],
             *(found[key][name] for key in _LEVEL_COLUMNS for name in _OF_LEVEL)]
        )  # fmt: skip
    return out.getvalue()
