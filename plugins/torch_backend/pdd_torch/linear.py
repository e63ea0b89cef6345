"""Matrix products, in a fast form and in one whose rows do not depend on how many rows there are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

Linear = Callable[[Tensor], Tensor]
"""[rows, in] to [rows, out]."""

_BASE = {torch.float32: 16, torch.bfloat16: 32}
"""What exact mode calls right: the bits of a product of so many rows. Any number would do; with these, smaller products
and, for float32, larger ones give the same bits (measured with MKL and oneDNN, with AVX-512 and AMX). With 64 for
bfloat16 larger ones would instead: a faster prefill, but a slower decode."""
_STEP = 64
"""Above so many rows, a pass over the weights more costs less than computing rows for nothing."""


class Linears:
    """Makes the linear layers of a model."""

    def __init__(self, *, exact: bool, most_rows: int) -> None:
        """`most_rows`: the largest product worth a kernel of its own."""
        self._exact, self._most_rows = exact, most_rows
        self._sizes: dict[torch.Size, list[int]] = {}

    def make(self, weight: Tensor) -> Linear:
        """`weight` is `[in, out]`."""
        if not self._exact:
            return partial(_fast, weight)
        if weight.shape not in self._sizes:
            self._sizes[weight.shape] = equal_sizes(weight, self._most_rows)
        return partial(_exact, weight, self._sizes[weight.shape])


def equal_sizes(weight: Tensor, most_rows: int) -> list[int]:
    """Numbers of rows, largest first, that give the same bits here as the base size does.

    A matrix library picks its kernel by shape, and kernels add up in different orders. Which sizes agree differs by
    library, CPU, shape and memory order (bfloat16 with AMX: 32 and 64 rows do not), so it is tried.
    """
    base = _BASE[weight.dtype]
    sizes = [1 << i for i in range(10) if 1 << i < most_rows * 2 or 1 << i <= base]
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(max(sizes), weight.shape[0], generator=generator).to(weight.dtype)
    expected = _in_pieces(weight, [base], sample)
    return [size for size in reversed(sizes) if _agrees(weight, size, sample, expected)]


def _agrees(weight: Tensor, size: int, sample: Tensor, expected: Tensor) -> bool:
    rows = max(_BASE[weight.dtype], size)
    return torch.equal(_in_pieces(weight, [size], sample[:rows]), expected[:rows])


def _fast(weight: Tensor, x: Tensor) -> Tensor:
    # For one row, the matrix-vector product reads bfloat16 weights almost twice as fast.
    return torch.mv(weight.t(), x[0])[None] if x.shape[0] == 1 else x @ weight


def _exact(weight: Tensor, sizes: list[int], x: Tensor) -> Tensor:
    rows = x.shape[0]
    step = next((size for size in sizes if size <= _STEP), sizes[-1])
    padded = -(-rows // step) * step if rows > step else min(size for size in sizes if size >= rows)
    return _in_pieces(weight, sizes, pad(x, (0, 0, 0, padded - rows)) if padded > rows else x)[:rows]


def _in_pieces(weight: Tensor, sizes: list[int], x: Tensor) -> Tensor:
    """`x @ weight`, always the largest of `sizes` that is left at a time."""
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
