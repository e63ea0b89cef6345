"""Matrix products, in a fast form and in one whose rows do not depend on how many rows there are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""[rows, in] to [rows, out]."""

BASE = {torch.float32: 16, torch.bfloat16: 32}
"""Exact mode computes multiples of so many rows. A matrix library picks its kernel by shape, and kernels add up in
different orders; below so many rows it picks others (measured with MKL and oneDNN, with AVX-512 and AMX)."""


class Linears:
    """Makes the linear layers of one model: `exact` ones take multiples of `BASE` rows."""

    def __init__(self, *, exact: bool, most_rows: int) -> None:
        self._exact, self._most_rows = exact, most_rows
        self._sizes: dict[torch.Size, list[int]] = {}

    def make(self, weight: Tensor) -> Linear:
        """`weight` is `[in, out]`."""
        if not self._exact:
            return lambda x: x @ weight
        if weight.shape not in self._sizes:
            self._sizes[weight.shape] = equal_sizes(weight, self._most_rows)
        sizes = self._sizes[weight.shape]
        return lambda x: in_pieces(x, weight, sizes)


def equal_sizes(weight: Tensor, most_rows: int) -> list[int]:
    """Numbers of rows, largest first, that give the same bits here as pieces of the base size do. Which those are
    differs by library, CPU and shape (with bfloat16 and AMX even 32 and 128 differ), so it is tried."""
    base = BASE[weight.dtype]
    larger = [base << i for i in range(1, 6) if base << i < most_rows + base]
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(max([base, *larger]), weight.shape[0], generator=generator).to(weight.dtype)
    expected = in_pieces(sample, weight, [base])
    return [size for size in reversed(larger) if torch.equal(in_pieces(sample, weight, [size]), expected)] + [base]


def in_pieces(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """`x @ weight`, so many rows at a time: always the largest of `sizes` that is left."""
    rows = x.shape[0]
    if rows in sizes:
        return x @ weight
    out = x.new_empty(rows, weight.shape[1])
    done = 0
    while done < rows:
        size = next(size for size in sizes if size <= rows - done)
        torch.mm(x[done : done + size], weight, out=out[done : done + size])
        done += size
    return out
