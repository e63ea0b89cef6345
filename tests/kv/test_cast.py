"""Promises of the dtypes' conversion, against arithmetic in float64, which holds all of them exactly."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdd_runtime.kv.cast import Bits, cast
from pdd_runtime.kv.layout import DTYPE_BYTES

INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80}


def numbers(bits: Bits, dtype: str) -> NDArray[np.float64]:
    """What bits mean."""
    with np.errstate(invalid="ignore"):
        if dtype == "float16":
            return bits.view(np.float16).astype(np.float64)
        wide = bits.astype(np.uint32) << 16 if dtype == "bfloat16" else bits
        return wide.view(np.float32).astype(np.float64)


def nearest(values: NDArray[np.float64], dtype: str) -> Bits:
    """The bits of the number of two bytes that is nearest to each value, of two the even one. The bits of positive
    numbers are in their order, and infinity begins where the next number after the largest would be."""
    known = numbers(np.arange(INFINITY[dtype] + 1, dtype=np.uint16), dtype)
    known[-1] = 2 * known[-2] - known[-3]
    size = np.minimum(np.abs(values), known[-1])
    above = np.searchsorted(known, size)
    below = np.maximum(above - 1, 0)
    up, down = known[above] - size, size - known[below]
    chosen = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (chosen | np.signbit(values) * 0x8000).astype(np.uint16)


def casted(bits: Bits, source: str, target: str) -> Bits:
    out = np.empty(bits.shape, f"<u{DTYPE_BYTES[target]}")
    with warnings.catch_warnings(action="error"):
        cast(bits, source, out, target)
    return out


def check(bits: Bits, source: str, target: str) -> None:
    out, values = casted(bits, source, target), numbers(bits, source)
    nan = np.isnan(values)
    np.testing.assert_array_equal(np.isnan(numbers(out, target)), nan)
    if target == "float32":
        np.testing.assert_array_equal(numbers(out[~nan], target), values[~nan])
        np.testing.assert_array_equal(np.signbit(numbers(out, target)), np.signbit(values))
    else:
        np.testing.assert_array_equal(out[~nan], nearest(values[~nan], target))


@pytest.mark.parametrize("source", ["bfloat16", "float16"])
@pytest.mark.parametrize("target", DTYPE_BYTES)
def test_every_number_of_two_bytes_goes_to_the_nearest(source: str, target: str) -> None:
    check(np.arange(1 << 16, dtype=np.uint16), source, target)


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
def test_float32_is_rounded_to_the_nearest_and_ties_to_even(target: str) -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 18, np.uint32)
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    edges = upper | np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    check(np.concatenate([bits, edges.ravel()]), "float32", target)


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=20), st.sampled_from(list(DTYPE_BYTES)))
def test_what_was_rounded_once_is_not_changed_again(words: list[int], middle: str) -> None:
    once = casted(casted(np.array(words, np.uint32), "float32", middle), middle, "float32")
    again = casted(casted(once, "float32", middle), middle, "float32")
    np.testing.assert_array_equal(once, again)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_equal_dtypes_keep_every_bit(dtype: str) -> None:
    bits = np.random.default_rng(2).integers(0, 1 << 16, 1 << 12, np.uint16).view(f"<u{DTYPE_BYTES[dtype]}")
    np.testing.assert_array_equal(casted(bits, dtype, dtype), bits)
