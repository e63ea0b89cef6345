"""A model without weights that computes with what lies in its pages: KV of other tokens gives other tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from msgspec import structs
from numpy.typing import NDArray

from pdd_runtime.kv import KvLayout
from pdd_runtime.plugins.engine import Sampling
from pdd_runtime.testing.toy_choice import ToyChoice
from pdd_runtime.testing.toy_model import ToyModel

if TYPE_CHECKING:
    import torch

Rows = NDArray[np.unsignedinteger]


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
        self.unsigned = np.dtype(np.uint32 if layout.dtype == "float32" else np.uint16)
        """Of one element, as it lies there."""
        self.row = (layout.layers, 2, layout.kv_heads, layout.head_dim)
        """The KV of one token."""
        split = (pages, layout.layers, 2, self._heads, page, layout.head_dim)
        self._views = [np.zeros(split, self.unsigned) for _ in range(ranks)]

    def caches(self) -> list[torch.Tensor]:
        """The pages of each rank, as a connector sees them."""
        import torch  # A server without a connector starts sooner.

        signed = np.dtype(f"i{self.unsigned.itemsize}")
        shape = (*self._views[0].shape[:3], -1)
        return [
            torch.from_numpy(view.view(signed).reshape(shape)).view(getattr(torch, self.layout.dtype))
            for view in self._views
        ]

    def extend(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> int:
        """Compute the KV of the tokens from position `start` on, where that of those before lies in `pages`. Returns
        the state after the last."""
        digest = 0
        for row in self.rows(pages, 0, start):
            digest = self._mix(digest, row)
        made = []
        for token in tokens[start:]:
            state = xxhash.xxh3_64_intdigest(digest.to_bytes(8, "little") + token.to_bytes(4, "little"))
            made.append(np.ascontiguousarray(self._toy.rows([state])[:, :, 0, 0]))
            digest = self._mix(digest, made[-1])
        self.put(pages, start, made)
        return digest

    def choose(self, state: int, tokens: Sequence[int], sampling: Sampling) -> int:
        """The token behind `tokens`."""
        return ToyChoice(self._toy, sampling, tokens, len(tokens)).next(state, len(tokens)).id

    def rows(self, pages: Sequence[int], start: int, end: int) -> Rows:
        """`[tokens, *row]`: the KV, of all ranks' heads, of the tokens from `start` to `end` as it lies in `pages`."""
        layout = self.layout
        first, last = start // layout.block_size, -(-end // layout.block_size)
        numbers = list(pages[first:last])
        parts = [view[numbers] for view in self._views]
        heads = np.concatenate(parts, axis=3) if len(parts) > 1 else parts[0]
        rows = heads.transpose(0, 4, 1, 2, 3, 5).reshape(-1, *self.row)
        return np.ascontiguousarray(rows[start - first * layout.block_size :][: end - start])

    def put(self, pages: Sequence[int], start: int, rows: Iterable[Rows]) -> None:
        """The same, the other way."""
        for offset, row in enumerate(rows):
            page, place = divmod(start + offset, self.layout.block_size)
            for rank, view in enumerate(self._views):
                view[pages[page], :, :, :, place] = row[:, :, rank * self._heads : (rank + 1) * self._heads]

    def copy(self, source: int, target: int) -> None:
        """A page."""
        for view in self._views:
            view[target] = view[source]

    @staticmethod
    def _mix(digest: int, row: Rows) -> int:
        return xxhash.xxh3_64_intdigest(digest.to_bytes(8, "little") + row.tobytes())
