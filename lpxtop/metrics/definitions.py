"""What every number means: one table, once. Panels, summary, reports, gates and `lpxtop explain` iterate it.

Per-request rows also compute: `measure` takes one `Finished` and returns an integer in 1/`per_unit` of the row's
unit, or None where the quantity is not defined. Must not keep state or format numbers.
"""

import difflib
from collections.abc import Callable
from typing import Literal

import msgspec

from lpxtop.errors import UsageError
from lpxtop.events.records import Finished

NOT_FAILURES = frozenset({"ok", "cut", "cancelled"})
"""Outcomes that are not the server's fault: the answer came, the window ended, or somebody cancelled."""
ANSWERED = frozenset({"ok", "not_streamed"})
"""Outcomes with a whole answer: those whose wait counts."""

Better = Literal["lower", "higher", "neither"]


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One row. `population` says whose values it takes; `measure` is None for figures of a window or a node."""

    key: str
    label: str
    unit: str
    better: Better
    population: str
    formula: str
    sentence: str
    measure: Callable[[Finished], int | None] | None = None
    per_unit: int = 1000

    def value(self, request: Finished) -> float | None:
        """The quantity of one request in `unit`, whatever became of it."""
        measured = self.measure(request) if self.measure else None
        return None if measured is None else measured / self.per_unit


def failed(request: Finished) -> bool:
    """Whether the outcome counts as an error."""
    return request.outcome not in NOT_FAILURES


def ttft(request: Finished) -> int | None:
    return request.first_token_us


def ttft_due(request: Finished) -> int | None:
    delay = schedule_delay(request)
    return None if delay is None or request.first_token_us is None else delay + request.first_token_us


def ttft_any(request: Finished) -> int | None:
    return request.first_event_us


def ttfo(request: Finished) -> int | None:
    """Content when the worker told it apart; where nothing was reasoning, the first token."""
    if request.first_content_us is not None:
        return request.first_content_us
    return request.first_token_us if request.first_reasoning_us is None else None


def first_chunk_tokens(request: Finished) -> int:
    """n₁, taken as 1 where it is not known (flagged by `first_chunk_assumed`)."""
    return 1 if request.first_chunk_tokens is None else request.first_chunk_tokens


def first_chunk_assumed(request: Finished) -> bool:
    """tpot took n₁ = 1 although the request shows more tokens than chunks: its figure is an estimate."""
    out = request.output_tokens
    return request.first_chunk_tokens is None and out is not None and out > request.chunks > 0


def tpot(request: Finished) -> int | None:
    """In ns, so that dividing by the tokens loses nothing that could be seen."""
    out, first, last = request.output_tokens, request.first_token_us, request.last_token_us
    if out is None or first is None or last is None:
        return None
    after_first = out - first_chunk_tokens(request)
    return round((last - first) * 1000 / after_first) if after_first > 0 else None


def e2e(request: Finished) -> int | None:
    """Up to the last token; to the end of the answer where it was not streamed."""
    if request.last_token_us is not None:
        return request.last_token_us
    return request.end_us if request.outcome in ANSWERED else None


def schedule_delay(request: Finished) -> int | None:
    return None if request.sent is None else request.sent - request.due


def request_tokens_per_s(request: Finished) -> int | None:
    """In thousandths of a token per second."""
    took, out = e2e(request), request.output_tokens
    return round(out * 1e9 / took) if out is not None and took is not None and took > 0 else None


def tokens_per_s_per_user(request: Finished) -> int | None:
    """In thousandths of a token per second."""
    per_token = tpot(request)
    return round(1e12 / per_token) if per_token else None


_OK = "requests with outcome ok whose answer really streamed, warm-up left out"
_ANSWERED = "requests with a whole answer (ok, also buffered or not streamed), warm-up left out"
_GAPS = "every gap by its arrival time, whatever became of the request; the first gap is TTFT; warm-up left out"
_WINDOW = "what arrived inside the window the figure names; warm-up left out"
_LOAD = "the load process about itself"
_GPU = "samples of one GPU inside the measured time"
_SERVER = "the server's own metrics, all clients together"

PER_REQUEST: tuple[Metric, ...] = (
    Metric(
        key="ttft", label="TTFT", unit="ms", better="lower", population=_OK, measure=ttft,
        formula="a₁ − sent",
        sentence="Time to first token: from the request's last byte handed to the kernel to the first chunk with text "
        "(content, reasoning, refusal or tool call; a role-only chunk does not count).",
    ),
    Metric(
        key="ttft_due", label="TTFT from due", unit="ms", better="lower", population=_OK, measure=ttft_due,
        formula="a₁ − due",
        sentence="Time to first token from when the request should have been sent: in open loop the headline, because "
        "it shows the queue that a late client would hide.",
    ),
    Metric(
        key="ttft_any", label="TTFT, any event", unit="ms", better="lower", population=_OK, measure=ttft_any,
        formula="first event with choices − sent",
        sentence="Time to the first event, even one that only names the role: the number vLLM's bench client prints.",
    ),
    Metric(
        key="ttfo", label="TTFO", unit="ms", better="lower", population=_OK, measure=ttfo,
        formula="first non-reasoning token − sent",
        sentence="Time to the first token of the answer itself, after any reasoning.",
    ),
    Metric(
        key="tpot", label="TPOT", unit="ms", better="lower", population=_OK, measure=tpot, per_unit=1_000_000,
        formula="(aₘ − a₁) / (output tokens − n₁)",
        sentence="Time per output token after the first, one value per request; not defined when no token follows the "
        "first chunk. Where n₁ is not known it is taken as 1 and flagged.",
    ),
    Metric(
        key="e2e", label="E2E latency", unit="ms", better="lower", population=_ANSWERED, measure=e2e,
        formula="aₘ − sent",
        sentence="From sending the request to its last token (the usage chunk and the stream's end come after). "
        "Without streaming: to the end of the answer.",
    ),
    Metric(
        key="schedule_delay", label="schedule delay", unit="ms", better="lower", measure=schedule_delay,
        population="every request that was sent, whatever became of it, warm-up left out",
        formula="sent − due",
        sentence="How long a due request waited inside the client before it was sent.",
    ),
    Metric(
        key="tokens_per_s_per_user", label="tokens/s per user", unit="tok/s", better="higher", population=_OK,
        measure=tokens_per_s_per_user, formula="1 / tpot",
        sentence="How fast text flows to one user once it flows.",
    ),
    Metric(
        key="request_tokens_per_s", label="request tokens/s", unit="tok/s", better="higher", population=_ANSWERED,
        measure=request_tokens_per_s, formula="output tokens / e2e",
        sentence="What one user gets over the whole wait: the usual script's tokens/s; defined without streaming too.",
    ),
)  # fmt: skip
"""Rows that one finished request answers."""

OF_WINDOW: tuple[Metric, ...] = (
    Metric(
        key="icl", label="ICL", unit="ms", better="lower", population=_GAPS, formula="aⱼ − aⱼ₋₁, pooled",
        sentence="Inter-chunk latency: the gaps between chunks with text, of all streams together.",
    ),
    Metric(
        key="itl", label="ITL", unit="ms", better="lower", population=_GAPS,
        formula="(aⱼ − aⱼ₋₁) / nⱼ, counted nⱼ times",
        sentence="Inter-token latency: each gap shared by the tokens that came with it. Needs a trustworthy token "
        "count per chunk; without one it equals ICL and is labelled so.",
    ),
    Metric(
        key="output_tokens_per_s", label="output tokens/s", unit="tok/s", better="higher", population=_WINDOW,
        formula="tokens by arrival time in the window / window",
        sentence="Output throughput. Where tokens per chunk are not known: usage of the requests that finished in the "
        "window / window, while the live rate is chunks/s and says so.",
    ),
    Metric(
        key="chunks_per_s", label="chunks/s", unit="chunk/s", better="higher", population=_WINDOW,
        formula="chunks by arrival time in the window / window",
        sentence="The rate of chunks with text; equals tokens/s when each chunk holds one token.",
    ),
    Metric(
        key="input_tokens_per_s", label="input tokens/s", unit="tok/s", better="higher", population=_WINDOW,
        formula="prompt tokens of requests by first-token time / window",
        sentence="Prefill throughput, counted when the first token shows that the prompt was processed.",
    ),
    Metric(
        key="total_tokens_per_s", label="total tokens/s", unit="tok/s", better="higher", population=_WINDOW,
        formula="input_tokens_per_s + output_tokens_per_s",
        sentence="Prompt and output tokens together; depends on the prompt length as much as on the server.",
    ),
    Metric(
        key="requests_per_s", label="requests/s", unit="req/s", better="higher", population=_WINDOW,
        formula="requests with outcome ok that ended in the window / window",
        sentence="Completed requests per second.",
    ),
    Metric(
        key="tokens_per_chunk", label="tokens per chunk", unit="tok", better="neither", population=_WINDOW,
        formula="tokens / chunks",
        sentence="Other than 1 when the server speculates, batches its output or a proxy gathers it.",
    ),
    Metric(
        key="tokens_per_s_per_gpu", label="tokens/s per GPU", unit="tok/s", better="higher", population=_WINDOW,
        formula="output_tokens_per_s / GPUs serving",
        sentence="Output throughput per GPU that serves this endpoint.",
    ),
    Metric(
        key="energy_per_token_j", label="energy per token", unit="J", better="lower", population=_WINDOW,
        formula="energy of the GPUs in the window / output tokens",
        sentence="GPU energy (counter difference, else power integrated and marked so) per output token; includes "
        "idle power and other jobs on those GPUs.",
    ),
    Metric(
        key="goodput", label="goodput", unit="req/s", better="higher", population=_WINDOW,
        formula="ok requests that meet every SLO term / window",
        sentence="Requests per second that are good enough.",
    ),
    Metric(
        key="attainment", label="SLO attainment", unit="ratio", better="higher",
        population="every request due in the window, failed ones included, minus cut and cancelled",
        formula="requests that meet every SLO term / requests due",
        sentence="The share of requests that were good enough. A failed request met nothing.",
    ),
    Metric(
        key="error_rate", label="errors", unit="ratio", better="lower",
        population="every request due; on the live screen the requests that ended in the window",
        formula="outcomes other than ok, cut, cancelled / requests due",
        sentence="The share of requests that failed; what was cut by the end of the run or cancelled is no failure.",
    ),
    Metric(
        key="in_flight", label="in flight", unit="requests", better="neither", population=_LOAD,
        formula="requests sent and not ended", sentence="How many requests the server holds at this moment.",
    ),
)  # fmt: skip
"""Rows of a window, a level or a whole run."""

OF_CLIENT: tuple[Metric, ...] = (
    Metric(
        key="read_delay", label="read delay", unit="µs", better="lower", population=_LOAD,
        formula="reader's clock − kernel's receive stamp",
        sentence="How long arrived bytes waited for the client. The figures do not contain it (the kernel stamps), "
        "but it shows whether the client kept up.",
    ),
    Metric(
        key="loop_lag", label="loop lag", unit="ms", better="lower", population=_LOAD,
        formula="timer fired − timer due",
        sentence="How late the load process's event loop ran; large values mean that the client was the bottleneck.",
    ),
    Metric(
        key="send_lateness", label="send lateness", unit="ms", better="lower", population=_LOAD,
        formula="sent − due", sentence="How late due requests were sent, as the load process saw it.",
    ),
    Metric(
        key="coalesced_ratio", label="coalesced", unit="ratio", better="lower", population=_LOAD,
        formula="events completed by a read together with a later one / events",
        sentence="Share of chunks whose stamp is that of the read that completed several: late by at most the time "
        "since the previous read.",
    ),
    Metric(
        key="client_cpu_ratio", label="client CPU", unit="ratio", better="lower", population=_LOAD,
        formula="CPU time / wall time of the busiest load process",
        sentence="Near 1 the client has no headroom and the figures are the client's, not the server's.",
    ),
)  # fmt: skip
"""Rows about the measurement itself."""

OF_NODE: tuple[Metric, ...] = (
    Metric(key="utilization_percent", label="GPU utilisation", unit="%", better="neither", population=_GPU,
           formula="NVML utilization.gpu",
           sentence="Share of time in which any kernel ran; 100 % does not mean that the GPU is full."),
    Metric(key="memory_used_bytes", label="GPU memory", unit="B", better="neither", population=_GPU,
           formula="NVML memory.used",
           sentence="Allocated memory; a server that reserves its KV cache at start shows a flat line."),
    Metric(key="power_watts", label="power", unit="W", better="neither", population=_GPU,
           formula="NVML power, instant where offered", sentence="Electrical power of the board or module."),
    Metric(key="sm_clock_mhz", label="SM clock", unit="MHz", better="higher", population=_GPU,
           formula="NVML clock SM", sentence="Clock of the compute units; falls when power or heat limits."),
    Metric(key="temperature_c", label="temperature", unit="°C", better="lower", population=_GPU,
           formula="NVML temperature", sentence="GPU core temperature."),
    Metric(key="energy_j", label="energy", unit="J", better="lower", population=_GPU,
           formula="difference of the energy counter, else power integrated over time",
           sentence="Energy within the measured time; `energy_source` says which of the two."),
    Metric(key="throttled", label="throttled", unit="s", better="lower", population=_GPU,
           formula="difference of the reason's counter, else time of the samples with its bit",
           sentence="Seconds in which a limit held the clocks down, by reason."),
    Metric(key="running", label="running", unit="requests", better="neither", population=_SERVER,
           formula="server gauge", sentence="Requests in the server's current batch."),
    Metric(key="waiting", label="waiting", unit="requests", better="lower", population=_SERVER,
           formula="server gauge", sentence="Requests that the server accepted and has not begun."),
    Metric(key="kv_usage", label="KV cache", unit="ratio", better="neither", population=_SERVER,
           formula="server gauge",
           sentence="Share of the KV cache in use; near 1 the server queues or preempts."),
    Metric(key="prefix_hit_rate", label="prefix hits", unit="ratio", better="higher", population=_SERVER,
           formula="hit tokens / queried tokens, by counter differences in the window",
           sentence="Share of prompt tokens that the prefix cache already held."),
    Metric(key="preemptions_per_s", label="preemptions/s", unit="1/s", better="lower", population=_SERVER,
           formula="counter difference / time",
           sentence="Running requests thrown out of the batch for want of KV cache, to be done again."),
)  # fmt: skip
"""Rows of the node and of the server's own metrics."""

TABLE: tuple[Metric, ...] = (*PER_REQUEST, *OF_WINDOW, *OF_CLIENT, *OF_NODE)
BY_KEY: dict[str, Metric] = {row.key: row for row in TABLE}


def find(key: str) -> Metric:
    """The row of `key`. Raises UsageError that offers the nearest keys."""
    row = BY_KEY.get(key.strip().lower().replace("-", "_").replace(" ", "_"))
    if row is not None:
        return row
    near = difflib.get_close_matches(key.lower(), BY_KEY, n=3)
    hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(BY_KEY)}"
    raise UsageError(f"no metric is called {key!r}", hint)


def explain(key: str | None = None) -> str:
    """What `key` means, as a few plain lines; without a key one line for every metric."""
    if key is None:
        return _overview()
    row = find(key)
    lines = [f"{row.key}: {row.label} ({row.unit})", f"  {row.sentence}", f"  formula     {row.formula}"]
    lines.append(f"  population  {row.population}")
    if row.better != "neither":
        lines.append(f"  better      {row.better}")
    return "\n".join(lines)


def _overview() -> str:
    width = max(len(row.key) for row in TABLE)
    return "\n".join(f"{row.key:<{width}}  {row.formula}" for row in TABLE)
