"""Matrix products, in a fast form and in one whose rows do not depend on how many rows there are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from pdd_runtime.errors import EngineError

Linear = Callable[[Tensor], Tensor]
"""[rows, in] to [rows, out]."""

_BASE = {torch.float32: 16, torch.bfloat16: 32}
"""What exact mode calls right: the bits of a product of so many rows. Any number would do; with these, smaller products
and, for float32, larger ones give the same bits (measured with MKL and oneDNN, with AVX-512 and AMX). With 64 for
bfloat16 larger ones would instead: a faster prefill, but a slower decode."""
_STEP = 64
"""Above so many rows, a pass over the matrix more costs less than computing rows for nothing."""


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


def _fast(weight: Tensor, x: Tensor) -> Tensor:
    # For one row, the matrix-vector product reads bfloat16 weights almost twice as fast.
    return torch.mv(weight.t(), x[0])[None] if x.shape[0] == 1 else x @ weight


def equal_sizes(matrix: Tensor, most_rows: int) -> list[int]:
    """Numbers of rows, largest first, that give the same bits here as the base size does.

    A matrix library picks its kernel by shape, and kernels add up in different orders. Which sizes agree differs by
    library, CPU, shape and memory order (bfloat16 with AMX: 32 and 64 rows do not; float32 with AVX2: 16 and 32 do
    not), so it is tried, on a matrix like this one. `matrix` is `[in, out]` or a batch of such; then a batch must agree
    with single ones, too. Raises `EngineError` where it does not.
    """
    base = _BASE[matrix.dtype]
    sizes = [1 << i for i in range(10) if 1 << i < most_rows * 2 or 1 << i <= base]
    x, probe = _probe(matrix, max(sizes))
    if probe.dim() == 2:
        expected = in_pieces(x, probe, [base])
    else:
        expected = torch.cat([in_pieces(rows[None], one[None], [base]) for rows, one in zip(x, probe, strict=True)])
    equal = [size for size in reversed(sizes) if _agrees(x, probe, size, expected)]
    if base not in equal:
        raise EngineError(
            "mode: exact is not possible here",
            why=f"a batch of products of shape {tuple(matrix.shape[-2:])} differs from single ones on this CPU",
            fix="use mode: fast",
        )
    return equal


def _probe(matrix: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Factors of a product, the second as `matrix` lies in memory. Every term has one that cancels it elsewhere, so
    the result is nothing but rounding errors: the order of addition shows in every bit, after rounding to bfloat16
    too, where a usual product hides it in all but one element of thousands."""
    generator = torch.Generator().manual_seed(0)
    *batch, inner, outer = matrix.shape
    order = torch.randperm(inner // 2, generator=generator)
    x = torch.randn(*batch, rows, inner // 2, generator=generator)
    w = torch.randn(*batch, inner // 2, min(outer, 64), generator=generator).repeat(
        *[1] * len(batch), 1, -(-outer // 64)
    )
    probe = torch.empty_strided(matrix.shape, matrix.stride(), dtype=matrix.dtype)
    probe.copy_(pad(torch.cat([w, -w[..., order, :]], dim=-2)[..., :outer], (0, 0, 0, inner % 2)))
    return pad(torch.cat([x, x[..., order]], dim=-1), (0, inner % 2)).to(matrix.dtype), probe


def padded(rows: int, sizes: list[int]) -> int:
    """So many rows that they can be had in pieces of `sizes`, at little cost."""
    step = next((size for size in sizes if size <= _STEP), sizes[-1])
    return -(-rows // step) * step if rows > step else min(size for size in sizes if size >= rows)


def in_pieces(x: Tensor, matrix: Tensor, sizes: list[int], out: Tensor | None = None) -> Tensor:
    """`x @ matrix`, always the largest of `sizes` that is left at a time. Both may be batches."""
    rows = x.shape[-2]
    if out is None:
        out = x.new_empty(*x.shape[:-1], matrix.shape[-1])
    product = torch.mm if x.dim() == 2 else torch.bmm
    done = 0
    while done < rows:
        size = next(size for size in sizes if size <= rows - done)
        product(x[..., done : done + size, :], matrix, out=out[..., done : done + size, :])
        done += size
    return out


def _exact(weight: Tensor, sizes: list[int], x: Tensor) -> Tensor:
    rows = x.shape[0]
    missing = padded(rows, sizes) - rows
    return in_pieces(pad(x, (0, 0, 0, missing)), weight, sizes)[:rows] if missing else in_pieces(x, weight, sizes)


def _agrees(x: Tensor, matrix: Tensor, size: int, expected: Tensor) -> bool:
    rows = max(_BASE[matrix.dtype], size)
    return torch.equal(in_pieces(x[..., :rows, :], matrix, [size]), expected[..., :rows, :])
