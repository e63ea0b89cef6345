"""Floating point numbers of KV from one dtype to another, as arrays of their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[Any]
"""Unsigned integers of the dtype's size; of any strides."""


def cast(source: Bits, source_dtype: str, target: Bits, target_dtype: str) -> None:
    """Write `source` into `target`, of the same shape. Rounds to the nearest, ties to even; what is too large for
    float16 becomes infinite, NaN stays NaN. Between equal dtypes every bit stays.

    All in whole passes over the array, by way of float32; numpy's own conversions of float16 take two to four times
    as long.
    """
    if source_dtype == target_dtype:
        np.copyto(target, source)
        return
    wide = source if source_dtype == "float32" else _WIDEN[source_dtype](source)
    np.copyto(target, wide if target_dtype == "float32" else _NARROW[target_dtype](wide), casting="unsafe")


def _widen_bfloat16(bits: Bits) -> Bits:
    """A bfloat16 is the upper half of a float32."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide


def _narrow_bfloat16(bits: Bits) -> Bits:
    """The lower half is rounded away: add just under half of the last place that stays, and one more where that place
    is odd. NaN would round to infinity or zero; it keeps its upper half, and is made quiet."""
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    if (nan := _nan(bits)) is not None:
        rounded[nan] = bits[nan] >> 16 | 0x40
    return rounded


def _widen_float16(bits: Bits) -> Bits:
    """Sign, exponent and fraction in their places of a float32 make a number 2^112 times too small, a subnormal one
    included. What then has the exponent of infinity and NaN gets theirs."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    sign = wide & 0x80000000
    wide &= 0x7FFFFFFF
    wide >>= 3
    numbers = wide.view(np.float32)
    numbers *= np.float32(2.0**112)
    special = wide >= 0x47800000
    if special.any():
        wide[special] |= 0x7F800000
    wide |= sign
    return wide


def _narrow_float16(bits: Bits) -> Bits:
    """As for bfloat16, with another exponent: 112 less. From 2^16 on all is infinite. Below 2^-14, float16's smallest
    normal number, the fraction is counted in steps of 2^-24: those of a float32 from 0.5 to 1, so adding 0.5 rounds."""
    size = bits & 0x7FFFFFFF
    np.minimum(size, 0x47800000, out=size)
    rounded = size >> 13
    rounded &= 1
    rounded += 0x0FFF
    rounded += size
    rounded -= 112 << 23
    rounded >>= 13
    subnormal = size < 0x38800000
    numbers = size.view(np.float32)
    numbers += np.float32(0.5)
    size -= 0x3F000000
    np.copyto(rounded, size, where=subnormal)
    if (nan := _nan(bits)) is not None:
        rounded[nan] = 0x7E00
    np.right_shift(bits, 16, out=size)
    size &= 0x8000
    rounded |= size
    return rounded


def _nan(bits: Bits) -> NDArray[np.bool_] | None:
    """Where float32 is NaN; None: nowhere, as nearly always."""
    numbers = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        return np.isnan(numbers) if numbers.size and np.isnan(numbers.max()) else None


_WIDEN = {"bfloat16": _widen_bfloat16, "float16": _widen_float16}
_NARROW = {"bfloat16": _narrow_bfloat16, "float16": _narrow_float16}
