"""How the bytes of one block of KV lie in memory."""

from __future__ import annotations

from typing import Literal

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of a block: `[layers, 2 (K then V), block_size tokens, kv_heads, head_dim]`, C order.

    A block is contiguous, all layers together, so one block is one run of `block_bytes` bytes.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: Literal["float32", "bfloat16", "float16"]
    block_size: int
    rope: Literal["half", "interleaved", "none"] = "half"
    """Which K elements RoPE turns together: (i, i + head_dim/2) or (2i, 2i + 1)."""
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V over all layers held here."""
        heads = self.kv_heads // self.tp_size
        return self.layers * 2 * heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    @property
    def spec(self) -> str:
        """The part that does not depend on how bytes lie: what a block's name is seeded with."""
        return f"{self.layers}x{self.kv_heads}x{self.head_dim}"

    def difference(self, other: KvLayout) -> str | None:
        """The first field in which two layouts differ, as `name: mine != theirs`, or None."""
        for field in self.__struct_fields__:
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                return f"{field}: {mine} != {theirs}"
        return None
