"""Attention whose result for a token has the same bits whatever other tokens are computed with it.

Keys come in groups of `KEYS`, and every product is of one group with one of a few numbers of rows. There is one
maximum over all groups, so a masked key weighs exactly 0, and the groups are added up in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pdd_torch.attention import fold, unfold
from pdd_torch.linear import equal_sizes, in_pieces, padded

KEYS = 64
_ROWS = 64
"""Rows computed at once: more would look at many keys that are hidden from them, and leave the cache."""


class Tile(NamedTuple):
    """Some queries of a chunk, and what they see."""

    first: int
    """Index of the first in the chunk."""
    tokens: int
    rows: int
    """Rows to compute, the ones for nothing included."""
    groups: int
    """Groups of keys to look at."""
    hidden: Tensor
    """Which keys of the last groups a row must not see, `[last groups, rows, KEYS]`."""


class ExactAttention:
    """All in float32. Raises `EngineError` where this CPU's products cannot be made alike."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int) -> None:
        self._shared = heads // kv_heads
        k, v = torch.randn(2, 3 * KEYS, kv_heads, head_dim, generator=torch.Generator().manual_seed(0))
        self._tokens = max(1, _ROWS // self._shared)
        """Query tokens of a tile."""
        scores = equal_sizes(_groups(k)[0].transpose(1, 2), _ROWS)
        values = equal_sizes(_groups(v)[0], _ROWS)
        self._sizes = [size for size in scores if size in values]

    def tiles(self, start: int, tokens: int) -> list[Tile]:
        """The tiles of a chunk whose first token is at position `start`."""
        tiles = []
        for first in range(0, tokens, self._tokens):
            count, position = min(self._tokens, tokens - first), start + first
            rows = torch.arange(padded(self._shared * count, self._sizes))
            groups, begun = -(-(position + count) // KEYS), position // KEYS
            keys = torch.arange(begun * KEYS, groups * KEYS).view(-1, 1, KEYS)
            tiles.append(Tile(first, count, len(rows), groups, keys > position + rows[:, None] % count))
        return tiles

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tiles: list[Tile]) -> Tensor:
        """`q`: `[tokens, heads, head_dim]`; `k`, `v`: `[keys, kv_heads, head_dim]`, whole groups at least, zero behind
        the last token. Returns `[tokens, heads * head_dim]`."""
        whole, outs = tiles[-1].groups * KEYS, []
        keys, values = _groups(k[:whole]), _groups(v[:whole])
        for tile in tiles:
            queries = fold(q[tile.first : tile.first + tile.tokens], k.shape[1]) * q.shape[2] ** -0.5
            rows = pad(queries, (0, 0, 0, tile.rows - queries.shape[1]))
            out = self._tile(rows, keys[:, : tile.groups], values[:, : tile.groups], tile.hidden)
            outs.append(unfold(out[:, : queries.shape[1]], tile.tokens))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _tile(self, rows: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        """`rows` `[kv_heads, rows, head_dim]` over `k` and `v` `[kv_heads, groups, KEYS, head_dim]`."""
        kv_heads, groups = k.shape[:2]
        scores = rows.new_empty(kv_heads, groups, rows.shape[1], KEYS)
        for head in range(kv_heads):
            queries = rows[head].expand(groups, -1, -1)
            in_pieces(queries, k[head].transpose(1, 2), self._sizes, out=scores[head])
        scores[:, -len(hidden) :].masked_fill_(hidden, float("-inf"))
        weights = scores.sub_(scores.amax((1, 3), keepdim=True)).exp_()
        values = rows.new_empty(kv_heads, groups, *rows.shape[1:])
        for head in range(kv_heads):
            in_pieces(weights[head], v[head], self._sizes, out=values[head])
        return _in_order(values) / _in_order(weights.sum(-1, keepdim=True))


def _groups(kv: Tensor) -> Tensor:
    """[keys, kv_heads, head_dim] to [kv_heads, groups, KEYS, head_dim]."""
    return kv.view(-1, KEYS, *kv.shape[1:]).permute(2, 0, 1, 3)


def _in_order(parts: Tensor) -> Tensor:
    """Sum over the groups, `[kv_heads, groups, ...]`, as a tree that grows at its end only: more groups that are zero
    change no bit."""
    while (groups := parts.shape[1]) > 1:
        even = groups // 2 * 2
        pairs = parts[:, 0:even:2] + parts[:, 1:even:2]
        parts = torch.cat([pairs, parts[:, even:]], dim=1) if even < groups else pairs
    return parts[:, 0]
