"""What a pool may set for vLLM."""

from __future__ import annotations

from pydantic import Field, field_validator

from pdd_runtime.server.config import ServerConfig

_SET = {
    "--model": "spec.model.source",
    "--dtype": "spec.model.dtype",
    "--host": "the worker: only it speaks with its server",
    "--port": "port",
    "--block-size": "block_size",
    "--tensor-parallel-size": "tp",
    "-tp": "tp",
    "--max-num-seqs": "batch_limit",
    "--max-model-len": "context_length",
    "--kv-cache-memory-bytes": "engine_kv_memory",
    "--max-logprobs": "max_logprobs",
    "--kv-transfer-config": "the worker: without its connector there is no KV to share",
}
"""Flags of vLLM → where their values come from; a second value would make worker and server disagree."""


class VllmConfig(ServerConfig, frozen=True, extra="forbid"):
    block_size: int = Field(32, ge=1, le=1024)
    """Tokens in a block, and in a page of vLLM. Its CPU attention wants a multiple of 32."""
    threads: int | None = Field(None, ge=1)
    """Cores of one forward pass where vLLM computes on a CPU; by default all that it finds, each bound to one thread.
    Of no use on a GPU."""
    max_logprobs: int = Field(20, ge=0)
    """The most alternatives that a request may ask for with each token."""

    @field_validator("args")
    @classmethod
    def _not_ours(cls, args: tuple[str, ...]) -> tuple[str, ...]:
        for arg in args:
            name = arg.partition("=")[0].replace("_", "-")
            if name in _SET:
                raise ValueError(f"{name} is set by {_SET[name]}")
        return args
