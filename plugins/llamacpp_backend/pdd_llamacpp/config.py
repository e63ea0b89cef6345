"""What a pool may set for the llama.cpp engine."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pdd_runtime.inprocess import InProcessConfig


class LlamaCppConfig(InProcessConfig, frozen=True, extra="forbid"):
    # llama.cpp counts 256 sequences at most, and one is ours.
    batch_limit: int = Field(16, ge=1, le=255)
    """Sequences computed at once; more wait."""
    kv_dtype: Literal["float16", "float32", "bfloat16"] = "float16"
    """The number format of keys and values, in blocks and in llama.cpp. Of `float32` its attention sees no more than
    float16 either."""
    cells: int | None = Field(None, ge=1)
    """Tokens whose KV llama.cpp holds beside the blocks, in memory that is touched at start; at least a sequence's.
    What does not fit is copied in from its blocks when its turn comes. By default one longest sequence's."""
