"""The command line of trtllm-serve and its configuration file, both as strict as the real ones."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KvCacheConfig(Strict):
    enable_block_reuse: bool = True
    max_tokens: PositiveInt | None = None
    max_attention_window: list[int] | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = Field(None, ge=0, le=1)
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    attention_dp_events_gather_period_ms: int = 5
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    use_uvm: bool = False
    max_gpu_total_bytes: int = 0
    dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    tokens_per_block: int = 32

    @model_validator(mode="after")
    def _of_this_stand_in(self) -> KvCacheConfig:
        if self.tokens_per_block & (self.tokens_per_block - 1) or self.tokens_per_block < 1:
            raise ValueError(f"tokens_per_block {self.tokens_per_block} is no power of two")
        if not self.enable_block_reuse:
            raise ValueError("this stand-in always reuses blocks")
        return self


class KvCacheConnectorConfig(Strict):
    connector_module: str
    connector_scheduler_class: str
    connector_worker_class: str


class CudaGraphConfig(Strict):
    batch_sizes: list[int] | None = None
    max_batch_size: int = 0
    enable_padding: bool = False


class SchedulerConfig(Strict):
    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"] = "GUARANTEED_NO_EVICT"
    context_chunking_policy: Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"] | None = None
    dynamic_batch_config: dict[str, Any] | None = None


class CacheTransceiverConfig(Strict):
    """Whatever the backend, the stand-in moves KV over sockets of its own."""

    backend: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] | None = None
    transceiver_runtime: Literal["CPP", "PYTHON"] | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: PositiveInt | None = None
    kv_transfer_sender_future_timeout_ms: PositiveInt | None = None


class LlmArgs(Strict):
    """Those that the stand-in heeds have their types; the others are known, and of any."""

    model: str
    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_batch_size: PositiveInt = 2048
    max_num_tokens: PositiveInt = 8192
    max_seq_len: PositiveInt | None = None
    max_beam_width: PositiveInt = 1
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = False
    attn_backend: str = "TRTLLM"
    backend: Literal["pytorch", "tensorrt", "_autodeploy"] = "pytorch"
    enable_iter_perf_stats: bool = False
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    kv_connector_config: KvCacheConnectorConfig | None = None
    scheduler_config: SchedulerConfig = SchedulerConfig()
    cuda_graph_config: CudaGraphConfig | None = CudaGraphConfig()
    cache_transceiver_config: CacheTransceiverConfig | None = None
    free_gpu_memory_fraction: float = Field(0.9, ge=0, le=1)
    tokenizer: Any = None
    tokenizer_mode: Any = None
    skip_tokenizer_init: Any = None
    trust_remote_code: Any = None
    revision: Any = None
    context_parallel_size: Any = None
    gpus_per_node: Any = None
    moe_expert_parallel_size: Any = None
    moe_cluster_parallel_size: Any = None
    enable_attention_dp: Literal[False] = False
    load_format: Any = None
    fail_fast_on_attention_window_too_large: Any = None
    guided_decoding_backend: Any = None
    iter_stats_max_iterations: Any = None
    request_stats_max_iterations: Any = None
    speculative_config: Any = None
    max_input_len: Any = None
    gather_generation_logits: Any = None
    num_postprocess_workers: Any = None
    reasoning_parser: Any = None
    return_perf_metrics: Any = None
    perf_metrics_max_requests: Any = None
    garbage_collection_gen0_threshold: Any = None
    moe_config: Any = None
    sampler_type: Any = None
    enable_iter_req_stats: Any = None
    print_iter_log: Any = None
    batch_wait_timeout_ms: Any = None
    torch_compile_config: Any = None
    enable_autotuner: Any = None
    allreduce_strategy: Any = None
    checkpoint_format: Any = None
    stream_interval: Any = None
    otlp_traces_endpoint: Any = None

    @model_validator(mode="after")
    def _together(self) -> LlmArgs:
        if self.kv_connector_config is not None:
            if self.scheduler_config.capacity_scheduler_policy != "GUARANTEED_NO_EVICT":
                raise ValueError("KV connector is only supported with guaranteed no evict scheduler policy.")
            if self.speculative_config is not None:
                raise ValueError("KV connector is not supported with speculative decoding.")
            if self.pipeline_parallel_size > 1:
                raise ValueError("KV Cache Connector is not supported with pipeline parallelism.")
            if self.cache_transceiver_config is not None or self.kv_cache_config.enable_partial_reuse:
                raise ValueError("this stand-in has no connector beside transfers, or where parts of pages are reused")
        return self


class Serve(BaseModel):
    """One call of `trtllm-serve serve`."""

    host: str
    port: int
    log_level: str
    args: LlmArgs


def parse(argv: Sequence[str]) -> Serve:
    """Exits with a message for what the real command refuses, as `argparse` and it do. Raises `ValueError` for a
    configuration file that it would refuse."""
    words = list(argv)
    if words[:1] == ["serve"]:
        words = words[1:]
    found = vars(_parser().parse_args(words))
    config = found.pop("config")
    extra = {} if config is None else yaml.safe_load(Path(config).read_text())
    if not isinstance(extra, dict):
        raise ValueError(f"{config} holds no mapping")
    host, port, log_level = found.pop("host"), found.pop("port"), found.pop("log_level")
    given = {name: value for name, value in found.items() if value is not None}
    return Serve(host=host, port=port, log_level=log_level, args=LlmArgs.model_validate(given | extra))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trtllm-serve", allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    levels = ("internal_error", "error", "warning", "info", "verbose", "debug", "trace")
    parser.add_argument("--log_level", choices=levels, default="info")
    parser.add_argument("--backend", choices=("pytorch", "tensorrt", "_autodeploy"))
    for names in (
        ("--tokenizer",),
        ("--revision",),
        ("--reasoning_parser",),
        ("--otlp_traces_endpoint",),
    ):
        parser.add_argument(*names)
    parser.add_argument("--max_batch_size", type=int)
    parser.add_argument("--max_num_tokens", type=int)
    parser.add_argument("--max_seq_len", type=int)
    parser.add_argument("--max_beam_width", type=int)
    parser.add_argument("--tensor_parallel_size", "--tp_size", type=int)
    parser.add_argument("--pipeline_parallel_size", "--pp_size", type=int)
    parser.add_argument("--context_parallel_size", "--cp_size", type=int)
    parser.add_argument("--moe_expert_parallel_size", "--ep_size", type=int)
    parser.add_argument("--moe_cluster_parallel_size", "--cluster_size", type=int)
    parser.add_argument("--gpus_per_node", type=int)
    parser.add_argument("--free_gpu_memory_fraction", "--kv_cache_free_gpu_memory_fraction", type=float)
    parser.add_argument("--num_postprocess_workers", type=int)
    parser.add_argument("--trust_remote_code", action="store_true", default=None)
    parser.add_argument("--enable_chunked_prefill", action="store_true", default=None)
    parser.add_argument("--fail_fast_on_attention_window_too_large", action="store_true", default=None)
    parser.add_argument("--config", "--extra_llm_api_options", dest="config")
    return parser
