"""What a pool may set for any in-process engine."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ByteSize, Field, model_validator

from pdd_runtime.graph.units import Duration


class InProcessConfig(BaseModel, frozen=True, extra="forbid"):
    threads: int = Field(1, ge=1)
    """Cores one forward pass uses. `mode: exact` holds among workers that set the same number."""
    kv_memory: ByteSize = ByteSize(2**30)
    """Memory for blocks of KV, e.g. `2GiB`. Pages exist only once they are touched."""
    kv_blocks: int | None = Field(None, ge=1)
    """The same as a number of blocks; wins over `kv_memory`."""
    block_size: int = Field(16, ge=1, le=1024)
    """Tokens in a block."""
    batch_limit: int = Field(16, ge=1)
    """Sequences computed at once; more wait."""
    token_budget: int = Field(128, ge=1)
    """Tokens in one forward pass: one for every decoding sequence, the rest for prompts and extends. Larger is a
    little faster at prefill; smaller keeps the pause short that a prompt makes between two tokens of the others."""
    step_timeout: Duration = Field(120.0, gt=0)
    """How long one forward pass may take, the first one included, which reads the weights that are not in memory yet.
    One that takes longer hangs: the worker says where, and is started again."""
    kv_wait: Duration = Field(30.0, gt=0)
    """How long a request waits for blocks of KV while nothing is computed that could give it some. Then it fails, it
    alone, and can be served elsewhere."""
    context_length: int | None = Field(None, ge=1)
    """Refuse longer sequences than this; by default the model's own limit."""

    @model_validator(mode="after")
    def _room_for_every_decode(self) -> Self:
        if self.token_budget < self.batch_limit:
            raise ValueError(
                f"token_budget {self.token_budget} is below batch_limit {self.batch_limit}: "
                "a step must have a token for every decoding sequence"
            )
        return self
