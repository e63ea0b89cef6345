"""Floating point numbers of KV from one dtype to another, as arrays of their bits."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[Any]
"""Unsigned integers of the dtype's size; of any strides."""


def cast(source: Bits, source_dtype: str, target: Bits, target_dtype: str) -> None:
    """Write `source` into `target`, of the same shape. Rounds to the nearest, ties to even; what is too large for
    float16 becomes infinite, NaN stays NaN. Between equal dtypes every bit stays."""
    match source_dtype, target_dtype:
        case _ if source_dtype == target_dtype:
            np.copyto(target, source)
        case "bfloat16", "float32":
            _widen(source, target)
        case "float32", "bfloat16":
            _narrow(source, target)
        case "bfloat16", "float16":
            wide = np.empty_like(source, np.uint32)
            _widen(source, wide)
            _convert(wide.view(np.float32), target.view(np.float16))
        case "float16", "bfloat16":
            wide = np.empty_like(source, np.uint32)
            _convert(source.view(np.float16), wide.view(np.float32))
            _narrow(wide, target)
        case "float16", "float32":
            _convert(source.view(np.float16), target.view(np.float32))
        case "float32", "float16":
            _convert(source.view(np.float32), target.view(np.float16))


def _convert(source: NDArray[np.floating], target: NDArray[np.floating]) -> None:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        np.copyto(target, source, casting="same_kind")


def _widen(source: Bits, target: Bits) -> None:
    """A bfloat16 is the upper half of a float32."""
    np.copyto(target, source)
    np.left_shift(target, 16, out=target)


def _narrow(source: Bits, target: Bits) -> None:
    """The half that goes is rounded away: add just under half of the last place that stays, and one more where that
    place is odd. NaN would round to infinity or zero; it keeps its upper half, and is made quiet."""
    rounded = source >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += source
    rounded >>= 16
    np.copyto(target, rounded, casting="unsafe")
    numbers = source.view(np.float32)
    with np.errstate(invalid="ignore"):
        any_nan = source.size and np.isnan(numbers.max())
    if any_nan:
        nan = np.isnan(numbers)
        target[nan] = (source[nan] >> 16) | 0x40
