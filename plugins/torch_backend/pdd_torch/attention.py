"""Attention of new tokens over a sequence's KV, as fast as it goes.

Queries are `[tokens, heads, head_dim]`, keys and values `[keys, kv_heads, head_dim]`; the query heads that share a
KV head are folded into rows, so that grouped-query attention is plain attention over `kv_heads` heads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def causal_mask(start: int, tokens: int, groups: int, dtype: torch.dtype) -> Tensor | None:
    """What the queries at `start`… may see of `start + tokens` keys, `[groups * tokens, keys]`, to be added."""
    if tokens == 1:
        return None
    mask = torch.full((tokens, start + tokens), float("-inf"), dtype=dtype).triu_(start + 1)
    return mask.repeat(groups, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Returns `[tokens, heads * head_dim]`."""
    rows = fold(q, k.shape[1])[None]
    out = scaled_dot_product_attention(rows, k.transpose(0, 1)[None], v.transpose(0, 1)[None], attn_mask=mask)
    return unfold(out[0], q.shape[0])


def fold(q: Tensor, kv_heads: int) -> Tensor:
    """[tokens, heads, head_dim] to [kv_heads, groups * tokens, head_dim]."""
    tokens, heads, head_dim = q.shape
    return q.view(tokens, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)


def unfold(rows: Tensor, tokens: int) -> Tensor:
    """[kv_heads, groups * tokens, head_dim] to [tokens, heads * head_dim]."""
    kv_heads, _, head_dim = rows.shape
    return rows.view(kv_heads, -1, tokens, head_dim).permute(2, 0, 1, 3).reshape(tokens, -1)
