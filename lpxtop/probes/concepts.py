"""What servers call the same thing: a versioned table from canonical concepts to candidate families, best first.

Read off the servers' own sources and documents (vLLM, SGLang, TensorRT-LLM, NIM, TGI, llama.cpp, LMDeploy, Dynamo).
Must not hold code that reads: data only.
"""

import msgspec

TABLE_VERSION = 1


class Concept(msgspec.Struct, frozen=True):
    """A canonical quantity. `kind`: gauge (`join` says how engines combine), counter, histogram.

    `scale` brings the exposed unit to the canonical one: seconds, tokens, ratios 0..1.
    """

    name: str
    kind: str
    families: tuple[str, ...]
    join: str = "sum"
    scale: float = 1.0


CONCEPTS: tuple[Concept, ...] = (
    Concept("running", "gauge", (
        "vllm:num_requests_running", "sglang:num_running_reqs", "trtllm_num_requests_running", "num_requests_running",
        "tgi_batch_current_size", "llamacpp:requests_processing", "lmdeploy:num_requests_running",
        "dynamo_frontend_active_requests", "dynamo_frontend_inflight_requests")),
    Concept("waiting", "gauge", (
        "vllm:num_requests_waiting", "sglang:num_queue_reqs", "trtllm_num_requests_waiting", "num_requests_waiting",
        "tgi_queue_size", "llamacpp:requests_deferred", "lmdeploy:num_requests_waiting",
        "dynamo_frontend_queued_requests")),
    Concept("kv_usage", "gauge", (
        "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "trtllm_kv_cache_utilization",
        "gpu_cache_usage_perc", "llamacpp:kv_cache_usage_ratio", "lmdeploy:gpu_cache_usage_perc",
        "dynamo_component_gpu_cache_usage_percent", "dynamo_component_kvstats_gpu_cache_usage_percent"), join="max"),
    Concept("prefix_cache_queries", "counter", (
        "vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries", "sglang:prompt_tokens")),
    Concept("prefix_cache_hits", "counter", (
        "vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits", "sglang:cached_tokens")),
    Concept("preemptions", "counter", ("vllm:num_preemptions", "sglang:num_retracted_requests")),
    Concept("prompt_tokens", "counter", (
        "vllm:prompt_tokens", "sglang:prompt_tokens", "trtllm_prompt_tokens", "prompt_tokens", "llamacpp:prompt_tokens",
        "lmdeploy:prompt_tokens")),
    Concept("output_tokens", "counter", (
        "vllm:generation_tokens", "sglang:generation_tokens", "trtllm_generation_tokens", "generation_tokens",
        "llamacpp:tokens_predicted", "lmdeploy:generation_tokens", "dynamo_frontend_output_tokens")),
    Concept("requests_finished", "counter", (
        "vllm:request_success", "sglang:num_requests", "trtllm_request_success", "request_finish",
        "tgi_request_success",
        "lmdeploy:request_success", "dynamo_frontend_requests")),
    Concept("decode_seconds", "counter", ("llamacpp:tokens_predicted_seconds",)),
    Concept("prefill_seconds", "counter", ("llamacpp:prompt_seconds",)),
    Concept("ttft", "histogram", (
        "vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds", "trtllm_time_to_first_token_seconds",
        "time_to_first_token_seconds", "lmdeploy:time_to_first_token_seconds",
        "dynamo_frontend_time_to_first_token_seconds")),
    Concept("itl", "histogram", (
        "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds", "sglang:inter_token_latency_seconds",
        "sglang:time_per_output_token_seconds", "lmdeploy:iter_token_latency",
        "dynamo_frontend_inter_token_latency_seconds")),
    Concept("tpot", "histogram", (
        "vllm:request_time_per_output_token_seconds", "trtllm_time_per_output_token_seconds",
        "time_per_output_token_seconds", "tgi_request_mean_time_per_token_duration",
        "lmdeploy:time_per_output_token_seconds")),
    Concept("e2e", "histogram", (
        "vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds", "trtllm_e2e_request_latency_seconds",
        "e2e_request_latency_seconds", "tgi_request_duration", "lmdeploy:e2e_request_latency_seconds",
        "dynamo_frontend_request_duration_seconds")),
    Concept("queue", "histogram", (
        "vllm:request_queue_time_seconds", "sglang:queue_time_seconds", "trtllm_request_queue_time_seconds",
        "tgi_request_queue_duration", "lmdeploy:request_queue_time_seconds")),
)  # fmt: skip

INFO_FAMILIES = ("vllm:cache_config_info", "sglang:cache_config_info", "trtllm_kv_cache_config_info")
START_TIME = "process_start_time_seconds"
WANTED = frozenset(name for concept in CONCEPTS for name in concept.families) | {*INFO_FAMILIES, START_TIME}
