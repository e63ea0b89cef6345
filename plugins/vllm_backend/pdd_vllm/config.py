"""What a pool may set for vLLM."""

from __future__ import annotations

from pydantic import Field

from pdd_runtime.server.config import ServerConfig


class VllmConfig(ServerConfig, frozen=True, extra="forbid"):
    block_size: int = Field(32, ge=1, le=1024)
    """Tokens in a block, and in a page of vLLM. Its CPU attention wants a multiple of 32."""
    threads: int | None = Field(None, ge=1)
    """Cores of one forward pass where vLLM computes on a CPU; by default all that it finds, each bound to one thread.
    Of no use on a GPU."""
    max_logprobs: int = Field(20, ge=0)
    """The most alternatives that a request may ask for with each token."""
