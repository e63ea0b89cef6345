"""What a pool may set for SGLang."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from pdd_runtime.server.config import ServerConfig

OURS = {
    "--model-path": "set spec.model.source",
    "--model": "set spec.model.source",
    "--dtype": "set spec.model.dtype",
    "--port": "set port",
    "--tp-size": "set tp",
    "--tensor-parallel-size": "set tp",
    "--context-length": "set context_length",
    "--max-running-requests": "set batch_limit",
    "--max-total-tokens": "set engine_kv_memory",
    "--chunked-prefill-size": "set token_budget",
    "--attention-backend": "set attention",
    "--device": "set device",
    "--page-size": "with pages of one token a prompt's KV is shared to its last token",
    "--kv-cache-dtype": "KV is shared in the model's own dtype",
    "--disable-radix-cache": "KV is shared through the radix cache",
    "--radix-cache-backend": "KV is shared through the radix cache that SGLang has by default",
    "--enable-hierarchical-cache": "SGLang has no linker beside HiCache",
    "--disaggregation-mode": "each server answers ordinary requests; roles are the graph's",
    "--pp-size": "the linker does not have pipeline parallelism",
    "--pipeline-parallel-size": "the linker does not have pipeline parallelism",
    "--speculative-algorithm": "the linker does not have speculative decoding",
    "--enable-dp-attention": "the linker does not have data-parallel attention",
}
"""Flags that `args` may not have, and what to do instead, or why."""


class SglangConfig(ServerConfig, frozen=True, extra="forbid"):
    device: Literal["cuda", "cpu"] = "cuda"
    """What it computes on. `cpu` is for tests: small models on PyTorch alone, with the package `pdd-sglang-cpu` where
    the server runs."""
    token_budget: int | None = Field(None, ge=1)
    """Tokens of a prompt in one pass; longer prompts are computed in parts, and each part is published as it is done.
    By default what SGLang takes for the accelerator."""
    attention: str | None = None
    """SGLang's attention backend: one that can have pages of one token. By default what SGLang takes."""

    @field_validator("args")
    @classmethod
    def _not_ours(cls, args: tuple[str, ...]) -> tuple[str, ...]:
        for arg in args:
            if why := OURS.get(arg.split("=", 1)[0]):
                raise ValueError(f"{arg} is not for args: {why}")
        return args
