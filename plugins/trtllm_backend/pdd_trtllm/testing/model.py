"""A model without weights that computes with what lies in its pages: KV of other tokens gives other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import xxhash
from msgspec import structs
from numpy.typing import NDArray

from pdd_runtime.kv import KvLayout
from pdd_runtime.plugins.engine import Sampling
from pdd_runtime.testing.toy_choice import ToyChoice
from pdd_runtime.testing.toy_model import ToyModel

Rows = NDArray[np.unsignedinteger]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class PagedModel:
    """The KV row of a position is drawn from its token and from all rows before it, as they lie in the pages; the next
    token from all rows. Each rank has its part of the heads, in a tensor `[pages, layers, 2, heads * tokens * dim]`."""

    def __init__(self, directory: Path, layout: KvLayout, *, pages: int) -> None:
        """`layout`: of a page, one shard a rank."""
        self.layout = layout
        page, ranks = layout.block_size, layout.tp_size
        weights = xxhash.xxh3_64_hexdigest((directory / "model.safetensors").read_bytes())
        # Text that a person can read; what ends a text never comes.
        self._toy = ToyModel(weights, structs.replace(layout, tp_size=1), range(32, 127), -1, None)
        self._heads = layout.kv_heads // ranks
        shape = (pages, layout.layers, 2, self._heads * page * layout.head_dim)
        self.caches = [torch.zeros(shape, dtype=_DTYPES[layout.dtype]) for _ in range(ranks)]
        bits = {4: torch.int32, 2: torch.int16}[self.caches[0].element_size()]
        self._unsigned = {4: np.uint32, 2: np.uint16}[self.caches[0].element_size()]
        split = (pages, layout.layers, 2, self._heads, page, layout.head_dim)
        self._views = [cache.view(bits).view(split).numpy().view(self._unsigned) for cache in self.caches]

    def extend(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> int:
        """Compute the KV of the tokens from position `start` on, where that of those before lies in `pages`. Returns
        the state after the last."""
        digest = 0
        for row in self._read(pages, start):
            digest = self._mix(digest, row)
        made = []
        for token in tokens[start:]:
            state = xxhash.xxh3_64_intdigest(digest.to_bytes(8, "little") + token.to_bytes(4, "little"))
            made.append(np.ascontiguousarray(self._toy.rows([state])[:, :, 0, 0]))
            digest = self._mix(digest, made[-1])
        self._write(pages, start, made)
        return digest

    def choose(self, state: int, tokens: Sequence[int], sampling: Sampling) -> int:
        """The token behind `tokens`."""
        return ToyChoice(self._toy, sampling, tokens, len(tokens)).next(state, len(tokens)).id

    @staticmethod
    def _mix(digest: int, row: Rows) -> int:
        return xxhash.xxh3_64_intdigest(digest.to_bytes(8, "little") + row.tobytes())

    def _read(self, pages: Sequence[int], tokens: int) -> Rows:
        """Rows `[tokens, layers, 2, heads, head_dim]` of all ranks' heads."""
        layout = self.layout
        size = layout.block_size
        numbers = list(pages[: -(-tokens // size)])
        parts = [view[numbers] for view in self._views]
        heads = np.concatenate(parts, axis=3) if len(parts) > 1 else parts[0]
        rows = heads.transpose(0, 4, 1, 2, 3, 5).reshape(-1, layout.layers, 2, layout.kv_heads, layout.head_dim)
        return np.ascontiguousarray(rows[:tokens])

    def _write(self, pages: Sequence[int], start: int, rows: Sequence[Rows]) -> None:
        size = self.layout.block_size
        for offset, row in enumerate(rows):
            page, place = divmod(start + offset, size)
            for rank, view in enumerate(self._views):
                view[pages[page], :, :, :, place] = row[:, :, rank * self._heads : (rank + 1) * self._heads]
