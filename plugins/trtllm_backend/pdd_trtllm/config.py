"""What a pool may set for TensorRT-LLM."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from pdd_runtime.server.config import ServerConfig

OURS = {
    "kv_connector_config": "KV goes through the connector of pdd-runtime",
    "kv_cache_config.enable_block_reuse": "the connector is asked only where blocks are reused",
    "kv_cache_config.enable_partial_reuse": "a page that is found in part is written while the connector loads",
    "kv_cache_config.tokens_per_block": "set block_size",
    "kv_cache_config.dtype": "set spec.model.dtype",
    "kv_cache_config.max_gpu_total_bytes": "set engine_kv_memory",
    "scheduler_config.capacity_scheduler_policy": "a connector needs that no request is evicted",
    "speculative_config": "TensorRT-LLM has no connector beside speculative decoding",
    "enable_attention_dp": "the connector does not have it",
    "pipeline_parallel_size": "TensorRT-LLM has no connector beside pipeline parallelism",
    "tensor_parallel_size": "set tp",
    "max_seq_len": "set context_length",
    "max_batch_size": "set batch_limit",
    "max_num_tokens": "set token_budget",
    "cuda_graph_config": "set cuda_graphs",
    "disable_overlap_scheduler": "set overlap",
    "attn_backend": "set attention",
    "dtype": "set spec.model.dtype",
}
"""Places in the configuration file that `options` may not touch, and why."""


class TrtllmConfig(ServerConfig, frozen=True, extra="forbid"):
    block_size: int = Field(32, ge=1, le=1024)
    """Tokens in a block, and in a page of TensorRT-LLM's cache: a power of two."""
    token_budget: int = Field(8192, ge=1)
    """Tokens in one pass; longer prompts are computed in parts."""
    overlap: bool = True
    """Begin a pass before the tokens of the one before it are known."""
    cuda_graphs: bool = True
    """Replay decoding passes instead of launching their kernels one by one."""
    attention: Literal["TRTLLM", "FLASHINFER"] = "TRTLLM"
    """The attention kernels."""
    options: dict[str, Any] = Field(default_factory=dict)
    """More for TensorRT-LLM's configuration file, e.g. `{kv_cache_config: {free_gpu_memory_fraction: 0.8}}`."""

    @field_validator("block_size")
    @classmethod
    def _power(cls, size: int) -> int:
        if size & (size - 1):
            raise ValueError(f"{size} is no power of two, as TensorRT-LLM's pages are")
        return size

    @field_validator("options")
    @classmethod
    def _not_ours(cls, options: dict[str, Any]) -> dict[str, Any]:
        for place, why in OURS.items():
            head, _, tail = place.partition(".")
            inside = options.get(head)
            if (not tail and head in options) or (tail and isinstance(inside, dict) and tail in inside):
                raise ValueError(f"{place} is not for options: {why}")
        return options

    @model_validator(mode="after")
    def _whole_pages(self) -> Self:
        if self.token_budget < self.block_size:
            raise ValueError(f"token_budget {self.token_budget} is less than a block of {self.block_size}")
        return self
