"""The simulated server's /metrics, under vLLM's current names. Must not know HTTP."""

from bisect import bisect_left

TTFT_EDGES = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
              80.0, 160.0, 640.0, 2560.0)  # fmt: skip
ITL_EDGES = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
E2E_EDGES = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
             960.0, 1920.0, 7680.0)  # fmt: skip

HISTOGRAMS = {
    "time_to_first_token_seconds": TTFT_EDGES,
    "inter_token_latency_seconds": ITL_EDGES,
    "request_time_per_output_token_seconds": ITL_EDGES,
    "e2e_request_latency_seconds": E2E_EDGES,
    "request_queue_time_seconds": E2E_EDGES,
    "request_prefill_time_seconds": E2E_EDGES,
    "request_decode_time_seconds": E2E_EDGES,
}


class Histogram:
    """Counts per bucket, sum and count."""

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += value * times


class ServerMetrics:
    """Counters and histograms of the simulated server."""

    def __init__(self, model: str) -> None:
        self._labels = f'engine="0",model_name="{model}"'
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.success = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.histograms = {name: Histogram(edges) for name, edges in HISTOGRAMS.items()}

    def observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)

    def exposition(self, gauges: dict[str, float], counters: dict[str, float], info: dict[str, str]) -> bytes:
        """The text format, version 0.0.4."""
        lines: list[str] = []
        for name, value in gauges.items():
            lines += [f"# TYPE vllm:{name} gauge", f"vllm:{name}{{{self._labels}}} {value}"]
        all_counters = counters | {
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
        }
        for name, value in all_counters.items():
            lines += [f"# TYPE vllm:{name} counter", f"vllm:{name}_total{{{self._labels}}} {float(value)}"]
        lines.append("# TYPE vllm:request_success counter")
        for reason, count in self.success.items():
            lines.append(f'vllm:request_success_total{{{self._labels},finished_reason="{reason}"}} {float(count)}')
        for name, histogram in self.histograms.items():
            lines += self._histogram(name, histogram)
        labels = ",".join(f'{key}="{value}"' for key, value in info.items())
        lines += ["# TYPE vllm:cache_config_info gauge", f'vllm:cache_config_info{{engine="0",{labels}}} 1.0']
        return ("\n".join(lines) + "\n").encode()

    def _histogram(self, name: str, histogram: Histogram) -> list[str]:
        lines = [f"# TYPE vllm:{name} histogram"]
        total = 0
        for edge, count in zip((*histogram.edges, "+Inf"), histogram.counts, strict=True):
            total += count
            lines.append(f'vllm:{name}_bucket{{{self._labels},le="{edge}"}} {float(total)}')
        lines.append(f"vllm:{name}_count{{{self._labels}}} {float(total)}")
        lines.append(f"vllm:{name}_sum{{{self._labels}}} {histogram.sum}")
        return lines
