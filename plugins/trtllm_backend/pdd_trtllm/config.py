"""What a pool may set for TensorRT-LLM."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from pdd_runtime.graph.units import Duration
from pdd_runtime.server.config import ServerConfig

_OURS = {
    "kv_cache_config.enable_block_reuse": "what is not reused cannot be gone on from",
    "kv_cache_config.tokens_per_block": "set block_size",
    "kv_cache_config.dtype": "set spec.model.dtype",
    "kv_cache_config.max_gpu_total_bytes": "set engine_kv_memory",
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
_BY_CONNECTOR = {
    "kv_connector_config": "KV goes through the connector of pdd-runtime",
    "kv_cache_config.enable_partial_reuse": "a page that is found in part is written while the connector loads",
    "scheduler_config.capacity_scheduler_policy": "a connector needs that no request is evicted",
    "speculative_config": "TensorRT-LLM has no connector beside speculative decoding",
    "enable_attention_dp": "the connector does not have it",
    "pipeline_parallel_size": "TensorRT-LLM has no connector beside pipeline parallelism",
}
_BY_TRANSCEIVER = {
    "cache_transceiver_config": "set transceiver, transfer_timeout and transfer_tokens",
    "kv_connector_config": "with data_plane: native there is no connector",
    "kv_cache_config.event_buffer_max_size": "the worker asks for all events",
    "speculative_config": "what a draft keeps of a prompt was not tried to be transferred",
    "enable_attention_dp": "pages of one rank are not found by another",
}
_OF_NATIVE = ("transceiver", "transfer_timeout", "transfer_tokens")


class TrtllmConfig(ServerConfig, frozen=True, extra="forbid"):
    block_size: int = Field(32, ge=1, le=1024)
    """Tokens in a block, and in a page of TensorRT-LLM's cache: a power of two."""
    token_budget: int = Field(8192, ge=1)
    """Tokens in one pass; longer prompts are computed in parts."""
    overlap: bool = True
    """Begin a pass before the tokens of the one before it are known. With data_plane: native not where the pool
    prefills: there TensorRT-LLM cannot."""
    cuda_graphs: bool = True
    """Replay decoding passes instead of launching their kernels one by one."""
    attention: Literal["TRTLLM", "FLASHINFER"] = "TRTLLM"
    """The attention kernels."""
    options: dict[str, Any] = Field(default_factory=dict)
    """More for TensorRT-LLM's configuration file, e.g. `{kv_cache_config: {free_gpu_memory_fraction: 0.8}}`."""
    data_plane: Literal["pdd", "native"] = "pdd"
    """What KV goes by. `pdd`: our connector and the worker's agent, to engines of any kind. `native`: TensorRT-LLM's
    own disaggregated serving, from TensorRT-LLM to TensorRT-LLM; its edges have no transport."""
    transceiver: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] = "DEFAULT"
    """With `native`: what moves KV. DEFAULT is TensorRT-LLM's choice."""
    transfer_timeout: Duration = Field(300.0, gt=0)
    """With `native`: how long KV is kept for its reader, and how long a reader waits. More than the link needs for the
    longest prompt; an abandoned transfer keeps its KV so long."""
    transfer_tokens: int | None = Field(None, ge=1)
    """With `native`: tokens in the buffers that transfers pass on each accelerator, no fewer than the longest prompt
    has; by default the longest sequence."""

    @property
    def native(self) -> bool:
        return self.data_plane == "native"

    @property
    def by_socket(self) -> bool:
        return not self.native

    @field_validator("block_size")
    @classmethod
    def _power(cls, size: int) -> int:
        if size & (size - 1):
            raise ValueError(f"{size} is no power of two, as TensorRT-LLM's pages are")
        return size

    @model_validator(mode="after")
    def _not_ours(self) -> Self:
        for place, why in (_OURS | (_BY_TRANSCEIVER if self.native else _BY_CONNECTOR)).items():
            head, _, tail = place.partition(".")
            inside = self.options.get(head)
            if (not tail and head in self.options) or (tail and isinstance(inside, dict) and tail in inside):
                raise ValueError(f"options: {place} is not for options: {why}")
        return self

    @model_validator(mode="after")
    def _whole_pages(self) -> Self:
        if self.token_budget < self.block_size:
            raise ValueError(f"token_budget {self.token_budget} is less than a block of {self.block_size}")
        return self

    @model_validator(mode="after")
    def _of_one_plane(self) -> Self:
        unused = [name for name in _OF_NATIVE if name in self.model_fields_set]
        if unused and not self.native:
            raise ValueError(f"{unused[0]} is of no use without data_plane: native")
        if self.native and "kv_memory" in self.model_fields_set:
            raise ValueError(
                "kv_memory is of no use with data_plane: native: KV is in TensorRT-LLM alone, see engine_kv_memory"
            )
        return self
