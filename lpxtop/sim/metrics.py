"""The simulated server's /metrics: vLLM's current names, labels and bucket edges. Must not know HTTP.

Only what the simulated engine knows is exposed; a first comment line says that it is simulated.
"""

import time
from bisect import bisect_left
from collections.abc import Mapping

from lpxtop import __version__

TTFT_EDGES = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
              80.0, 160.0, 640.0, 2560.0)  # fmt: skip
ITL_EDGES = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
E2E_EDGES = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
             960.0, 1920.0, 7680.0)  # fmt: skip
ITERATION_EDGES = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
PREEMPTION_EDGES = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)

REASONS = ("stop", "length", "abort", "error", "repetition")


def token_edges(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50 … up to the longest context there can be."""
    edges = [float(step * 10**power) for power in range(12) for step in (1, 2, 5)]
    return tuple(edge for edge in edges if edge <= most)


class Histogram:
    """Counts per bucket, sum and count."""

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.edges, value)] += 1
        self.sum += value


class ServerMetrics:
    """Counters and histograms of the simulated server."""

    def __init__(self, model: str, max_model_len: int) -> None:
        self._labels = {"engine": "0", "model_name": model}
        self._started_s = time.time()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.success = dict.fromkeys(REASONS, 0)
        tokens = token_edges(max_model_len)
        self.histograms = {
            name: Histogram(edges)
            for name, edges in {
                "request_prompt_tokens": tokens,
                "request_generation_tokens": tokens,
                "iteration_tokens_total": ITERATION_EDGES,
                "request_params_max_tokens": tokens,
                "time_to_first_token_seconds": TTFT_EDGES,
                "inter_token_latency_seconds": ITL_EDGES,
                "request_time_per_output_token_seconds": ITL_EDGES,
                "e2e_request_latency_seconds": E2E_EDGES,
                "request_queue_time_seconds": E2E_EDGES,
                "request_inference_time_seconds": E2E_EDGES,
                "request_prefill_time_seconds": E2E_EDGES,
                "request_decode_time_seconds": E2E_EDGES,
                "request_num_preemptions": PREEMPTION_EDGES,
            }.items()
        }

    def observe(self, name: str, value: float) -> None:
        """One observation of a histogram, in its unit (seconds, tokens)."""
        self.histograms[name].observe(value)

    def exposition(self, gauges: Mapping[str, float], counters: Mapping[str, float], info: Mapping[str, str]) -> bytes:
        """The text format, version 0.0.4; counters are named without `_total`."""
        lines = [f"# simulated by lpxtop-sim {__version__}"]
        lines += _family("process_start_time_seconds", "gauge", [({}, self._started_s)])
        for name, value in gauges.items():
            lines += self._plain(name, "gauge", value)
        lines += self._labelled("num_requests_waiting_by_reason", "gauge", "reason",
                                {"capacity": gauges["num_requests_waiting"], "deferred": 0})  # fmt: skip
        own = {
            "prompt_tokens": self.prompt_tokens,
            "prompt_tokens_cached": self.cached_tokens,
            "generation_tokens": self.generation_tokens,
        }
        for name, value in (*counters.items(), *own.items()):
            lines += self._plain(f"{name}_total", "counter", value)
        computed = self.prompt_tokens - self.cached_tokens
        lines += self._labelled("prompt_tokens_by_source_total", "counter", "source",
                                {"local_compute": computed, "local_cache_hit": self.cached_tokens})  # fmt: skip
        lines += self._labelled("request_success_total", "counter", "finished_reason", self.success)
        for name, histogram in self.histograms.items():
            lines += self._histogram(name, histogram)
        lines += _family("vllm:cache_config_info", "gauge", [({"engine": "0"} | dict(info), 1.0)])
        return ("\n".join(lines) + "\n").encode()

    def _plain(self, name: str, kind: str, value: float) -> list[str]:
        return _family(f"vllm:{name}", kind, [(self._labels, value)])

    def _labelled(self, name: str, kind: str, label: str, values: Mapping[str, float]) -> list[str]:
        samples = [(self._labels | {label: text}, value) for text, value in values.items()]
        return _family(f"vllm:{name}", kind, samples)

    def _histogram(self, name: str, histogram: Histogram) -> list[str]:
        lines = [f"# TYPE vllm:{name} histogram"]
        total = 0
        for edge, count in zip((*histogram.edges, "+Inf"), histogram.counts, strict=True):
            total += count
            lines.append(_sample(f"vllm:{name}_bucket", self._labels | {"le": str(edge)}, total))
        lines.append(_sample(f"vllm:{name}_count", self._labels, total))
        lines.append(_sample(f"vllm:{name}_sum", self._labels, histogram.sum))
        return lines


def _family(name: str, kind: str, samples: list[tuple[dict[str, str], float]]) -> list[str]:
    return [f"# TYPE {name} {kind}", *(_sample(name, labels, value) for labels, value in samples)]


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    text = ",".join(f'{key}="{_escaped(labels[key])}"' for key in sorted(labels))
    return f"{name}{{{text}}} {float(value)}" if text else f"{name} {float(value)}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
