"""What the scripted engine can be told."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, Field, model_validator

from pdd_runtime.kv import KvLayout
from pdd_runtime.kv.layout import DTYPE_BYTES
from pdd_runtime.testing import byte_tokenizer

_LAYERS = 2


class ScriptedConfig(BaseModel, extra="forbid", use_attribute_docstrings=True):
    """How the scripted engine behaves."""

    vocab_size: int = Field(byte_tokenizer.SIZE, ge=byte_tokenizer.SIZE)
    """Prompts may hold ids below this; the tokenizer knows the first 258."""
    alphabet: Literal["ascii", "bytes"] = "ascii"
    """What it answers with: printable characters, or any bytes (which are seldom whole UTF-8)."""
    eos_every: int | None = Field(None, ge=1)
    """The token at every position that this divides is the end token."""
    lacks: frozenset[Literal["logprobs", "penalties", "logit_bias", "min_tokens"]] = frozenset()
    """Capabilities not to have; requests that need one of them are refused."""
    claims: frozenset[Literal["guided"]] = frozenset()
    """Capabilities to declare all the same: it answers as if the request had not asked for them."""
    token_bytes: int = Field(128, ge=16, multiple_of=16)
    """Bytes of KV a token."""
    block_size: int = Field(16, ge=1)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the KV. Its numbers are exact in all of them."""
    kv_heads: int = Field(1, ge=1)
    tp_size: int = Field(1, ge=1)
    """Shards that the KV lies in."""
    axes: str = "lkthd"
    """Order of layers, K and V, tokens, heads and elements in a shard of a block."""
    capacity_blocks: int = Field(1024, ge=1)
    context_length: int = Field(8192, ge=2)
    batch_limit: int = Field(16, ge=1)
    """Requests that are computed at once; the others wait in order."""
    chunk: int = Field(64, ge=1)
    """Tokens of known text computed in one pass."""
    prefill_rate: float | None = Field(None, gt=0)
    """Known tokens computed in a second, for each request; none: at once."""
    token_time: float = Field(0.0, ge=0)
    """Seconds for each token it makes."""
    start_time: float = Field(0.0, ge=0)
    """Seconds to start."""
    start_error: str = ""
    """Fail to start, with this message."""
    data_plane: Literal["pdd", "native"] = "pdd"
    """`native`: it opens no store, and moves KV straight to engines of its kind, over the loopback."""
    extend: Literal["local", "prefill_assisted"] = "local"
    """With native KV, `prefill_assisted`: it computes no known tokens, every decode needs an offer of all of them."""
    lease: float = Field(30.0, gt=0)
    """With native KV: seconds that it keeps KV for a reader who does not come."""
    native_rate: float | None = Field(None, gt=0)
    """With native KV: bytes a second that it sends to a reader; none: at once."""
    crash_after: int | None = Field(None, ge=1)
    """Fail for good after so many tokens."""

    @model_validator(mode="after")
    def _check_layout(self) -> Self:
        if self.layout.token_bytes != self.token_bytes:
            raise ValueError(f"{self.token_bytes} bytes a token cannot be split over {self.kv_heads} heads")
        if self.extend != "local" and self.data_plane != "native":
            raise ValueError("extend: prefill_assisted needs data_plane: native")
        return self

    @property
    def layout(self) -> KvLayout:
        return KvLayout(
            layers=_LAYERS,
            kv_heads=self.kv_heads,
            head_dim=self.token_bytes // (_LAYERS * 2 * self.kv_heads * DTYPE_BYTES[self.dtype]),
            dtype=self.dtype,
            block_size=self.block_size,
            rope="none",
            axes=self.axes,
            tp_size=self.tp_size,
        )
