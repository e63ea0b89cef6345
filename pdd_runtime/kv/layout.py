"""How the bytes of one block of KV lie in memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of a block: `[tp_size, layers, 2 (K then V), block_size tokens, kv_heads / tp_size, head_dim]`, C
    order, or with `axes` in another order; `state_bytes` follow.

    A block is contiguous, all layers together, so one block is one run of `block_bytes` bytes.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: Literal["float32", "bfloat16", "float16"]
    block_size: int
    rope: Literal["half", "interleaved", "none"] = "half"
    """Which K elements RoPE turns together: (i, i + head_dim/2) or (2i, 2i + 1)."""
    axes: str = "lkthd"
    """The order of layers, K and V, tokens, heads and elements within a shard: a permutation of these letters."""
    tp_size: int = 1
    """Tensor-parallel shards, one after another in the block, each with its part of the heads."""
    state_bytes: int = 0
    """State of constant size behind the block's tokens (sliding windows, recurrent layers), as it is after the last
    of them. It travels whole."""

    def __post_init__(self) -> None:
        if sorted(self.axes) != sorted("lkthd"):
            raise ValueError(f"axes must be a permutation of lkthd, not {self.axes!r}")
        if self.tp_size < 1 or self.kv_heads % self.tp_size:
            raise ValueError(f"{self.kv_heads} heads cannot be split over {self.tp_size} shards")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V over all layers and shards."""
        return self.layers * 2 * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size + self.state_bytes

    @property
    def spec(self) -> str:
        """The part that does not depend on how bytes lie: what a block's name is seeded with."""
        return f"{self.layers}x{self.kv_heads}x{self.head_dim}"

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, {self.kv_heads} heads of {self.head_dim}, {self.dtype}, "
            f"blocks of {self.block_size} tokens, rope {self.rope}, axes {self.axes}, {self.tp_size} shards, "
            f"{self.state_bytes} bytes of state"
        )

    def elements(self, memory: memoryview) -> NDArray[np.unsignedinteger]:
        """A block's elements as unsigned integers of their size, nothing copied, and in one order whatever theirs in
        memory: `[layers, 2, block_size, tp_size, kv_heads / tp_size, head_dim]`."""
        # Most processes of a graph convert nothing, and start sooner without it.
        import numpy as np

        sizes = {"l": self.layers, "k": 2, "t": self.block_size, "h": self.kv_heads // self.tp_size, "d": self.head_dim}
        shape = (self.tp_size, *(sizes[axis] for axis in self.axes))
        bits = np.frombuffer(memory, f"<u{DTYPE_BYTES[self.dtype]}", math.prod(shape)).reshape(shape)
        layers, kv, tokens, heads, width = (1 + self.axes.index(axis) for axis in "lkthd")
        return bits.transpose(layers, kv, tokens, 0, heads, width)

    def state(self, memory: memoryview) -> memoryview:
        """The state behind a block's tokens, `state_bytes` long."""
        return memory[self.token_bytes * self.block_size : self.block_bytes]

    def difference(self, other: KvLayout) -> str | None:
        """The first field in which two layouts differ, as `name: mine != theirs`, or None."""
        for field in self.__struct_fields__:
            mine, theirs = getattr(self, field), getattr(other, field)
            if mine != theirs:
                return f"{field}: {mine} != {theirs}"
        return None
