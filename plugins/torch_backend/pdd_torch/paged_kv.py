"""The block memory as tensors: writing new KV rows into it, gathering a sequence's rows from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdd_runtime.inprocess import Chunk
from pdd_runtime.kv import KvLayout


class PagedKv:
    """A view of the store's memory, `[blocks, layers, 2, block_size, kv_heads, head_dim]`; nothing is copied."""

    def __init__(self, layout: KvLayout, memory: memoryview) -> None:
        self.layout = layout
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        self._width = layout.kv_heads * layout.head_dim
        flat = torch.frombuffer(memory, dtype=self.dtype)
        self._rows = flat.view(-1, self._width)
        self._runs = flat.view(-1, layout.block_size * self._width)
        self._buffer = flat.new_empty(0)

    def write_plan(self, chunks: Sequence[Chunk]) -> Tensor:
        """Row numbers of the chunks' tokens, `[layers, 2, tokens]`."""
        size, per_block = self.layout.block_size, self.layout.layers * 2
        first = torch.tensor(
            [
                chunk.blocks[at // size] * per_block * size + at % size
                for chunk in chunks
                for at in range(chunk.start, chunk.end)
            ]
        )
        return (torch.arange(per_block)[:, None] * size + first).view(self.layout.layers, 2, -1)

    def write(self, rows: Tensor, kv: Tensor) -> None:
        """Store one layer's K and V. `rows`: `[2, tokens]` of the write plan; `kv`: `[2, tokens, ...]`."""
        self._rows.index_copy_(0, rows.view(-1), kv.reshape(-1, self._width))

    def read_plan(self, chunk: Chunk, multiple: int = 1) -> Tensor:
        """Run numbers of a sequence's blocks for `read`, `[layers, 2 * blocks]`; padded so that the tokens fill whole
        groups of `multiple`."""
        size, per_block = self.layout.block_size, self.layout.layers * 2
        blocks = -(-(-(-chunk.end // multiple) * multiple) // size)
        padded = (chunk.blocks + chunk.blocks[:1] * blocks)[:blocks]
        first = torch.tensor(padded) * per_block
        return (torch.arange(per_block)[:, None] + first).view(self.layout.layers, 2 * blocks)

    def read(self, runs: Tensor) -> tuple[Tensor, Tensor]:
        """One layer's K and V of a sequence, `[tokens, kv_heads, head_dim]` each, in a buffer that the next call
        overwrites. Rows behind the sequence's end are whatever memory held."""
        need = runs.numel() * self._runs.shape[1]
        if self._buffer.numel() < need:
            self._buffer = self._runs.new_empty(need * 2)
        out = self._buffer[:need].view(runs.numel(), -1)
        torch.index_select(self._runs, 0, runs, out=out)
        k, v = out.view(2, -1, self.layout.kv_heads, self.layout.head_dim).unbind(0)
        return k, v
