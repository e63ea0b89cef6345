"""Attention of new tokens over a sequence's KV, in a fast and in an exact form.

Queries are `[tokens, heads, head_dim]`, keys and values `[keys, kv_heads, head_dim]`; the query heads that share a
KV head are folded into rows, so that grouped-query attention is plain attention over `kv_heads` heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

KEYS = 64
"""Exact mode adds up over so many keys at a time."""
_ROWS = 16
"""Exact mode computes multiples of so many rows."""
_TILE = 64
"""Exact mode computes so many query tokens at a time, so that masked keys cost little."""


def fast_mask(start: int, tokens: int, groups: int, dtype: torch.dtype) -> Tensor | None:
    """What the queries at `start`… may see of `start + tokens` keys, `[groups * tokens, keys]`, to be added."""
    if tokens == 1:
        return None
    mask = torch.full((tokens, start + tokens), float("-inf"), dtype=dtype).triu_(start + 1)
    return mask.repeat(groups, 1)


def fast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Returns `[tokens, heads * head_dim]`."""
    rows = _fold(q, k.shape[1])[None]
    out = scaled_dot_product_attention(rows, k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=mask)
    return _unfold(out[0], q.shape[0])


def _fold(q: Tensor, kv_heads: int) -> Tensor:
    """[tokens, heads, head_dim] to [kv_heads, groups * tokens, head_dim]."""
    tokens, heads, head_dim = q.shape
    return q.view(tokens, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)


def _unfold(rows: Tensor, tokens: int) -> Tensor:
    """[kv_heads, groups * tokens, head_dim] to [tokens, heads * head_dim]."""
    kv_heads, _, head_dim = rows.shape
    return rows.view(kv_heads, -1, tokens, head_dim).permute(2, 0, 1, 3).reshape(tokens, -1)


class Tile(NamedTuple):
    """Some queries of a chunk, and what they see."""

    first: int
    """Index of the first in the chunk."""
    tokens: int
    keys: int
    """How many keys to look at, a multiple of `KEYS`."""
    hidden: Tensor
    """Which of the last keys a row must not see, `[rows, last keys]`."""


def exact_tiles(start: int, tokens: int, groups: int) -> list[Tile]:
    """The tiles of a chunk whose first token is at position `start`."""
    tiles = []
    for first in range(0, tokens, _TILE):
        count, position = min(_TILE, tokens - first), start + first
        keys = -(-(position + count) // KEYS) * KEYS
        rows = torch.arange(-(-groups * count // _ROWS) * _ROWS)
        hidden = torch.arange(position // KEYS * KEYS, keys) > position + rows[:, None] % count
        tiles.append(Tile(first, count, keys, hidden))
    return tiles


def exact(q: Tensor, k: Tensor, v: Tensor, tiles: list[Tile]) -> Tensor:
    """All float32; `k` and `v` are zero behind the last token. A token's result has the same bits whatever other
    tokens are computed with it. Returns `[tokens, heads * head_dim]`."""
    kv_heads, head_dim = k.shape[1:]
    outs = []
    for first, tokens, keys, hidden in tiles:
        rows = _fold(q[first : first + tokens], kv_heads) * head_dim**-0.5
        padded = pad(rows, (0, 0, 0, hidden.shape[0] - rows.shape[1]))
        outs.append(_unfold(_exact_tile(padded, k[:keys], v[:keys], hidden)[:, : rows.shape[1]], tokens))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _exact_tile(rows: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    """`rows` [kv_heads, rows, head_dim] over all of `k` and `v`."""
    kv_heads, count, head_dim = rows.shape
    blocks = k.shape[0] // KEYS
    scores = torch.matmul(rows, k.permute(1, 2, 0))
    scores[:, :, -hidden.shape[1] :].masked_fill_(hidden, float("-inf"))
    # The maximum is the same in any order; with it, a masked key weighs exactly 0.
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_().view(kv_heads, count, blocks, KEYS)
    values = v.view(blocks, KEYS, kv_heads, head_dim)
    sums = _in_order(weights.sum(-1).permute(2, 0, 1))
    parts = rows.new_empty(kv_heads, blocks, count, head_dim)
    for head in range(kv_heads):
        torch.bmm(weights[head].transpose(0, 1), values[:, :, head], out=parts[head])
    return _in_order(parts.transpose(0, 1)) / sums[:, :, None]


def _in_order(parts: Tensor) -> Tensor:
    """Sum over the first dimension, as a tree that grows at its end only: more blocks that are zero change no bit."""
    while parts.shape[0] > 1:
        even = parts.shape[0] // 2 * 2
        pairs = parts[0:even:2] + parts[1:even:2]
        parts = torch.cat([pairs, parts[even:]]) if even < parts.shape[0] else pairs
    return parts[0]
