"""How a block may be written on the wire other than as it lies: compressed, or, with loss, quantised."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from pdd_runtime.errors import PluginError
from pdd_runtime.kv import KvLayout
from pdd_runtime.kv.cast import cast
from pdd_runtime.kv.layout import DTYPE_BYTES

AS_IT_LIES, BLOSC2, INT8 = 0, 1, 2
"""Flags: one that is both is quantised first."""
NAMES = {BLOSC2: "blosc2", INT8: "int8-channel (lossy)", INT8 | BLOSC2: "int8-channel (lossy), blosc2"}
SLOW_LINK = 1e9
"""Bits/s up to which `compression: auto` compresses: one thread compresses some 0.45 GB/s to two thirds."""
_FACTOR, _SCALE = np.dtype("<f4"), np.dtype("<f2")
_SMALLEST_SCALE = np.float16(6e-8)
"""The smallest number above 0."""


def blosc2_missing() -> PluginError | None:
    """Why nothing can be compressed here, or None."""
    try:
        importlib.import_module("blosc2")
    except ImportError as error:
        return PluginError(
            "compression: blosc2 needs the package blosc2",
            why=str(error),
            fix='pip install "pdd-tcp[compression]", or set compression: off on this edge',
        )
    return None


class Encoder:
    """Writes the blocks of one fetch."""

    def __init__(self, layout: KvLayout, *, compress: bool, quantize: bool) -> None:
        self._layout, self._compress, self._quantize = layout, compress, quantize

    def encode(self, memory: memoryview, tokens: int) -> tuple[int, memoryview]:
        """A block of which `tokens` tokens are in use: its flags and its bytes, which are fewer than `memory`'s, or
        else `AS_IT_LIES` and `memory` itself."""
        flags, data, width = AS_IT_LIES, memory, DTYPE_BYTES[self._layout.dtype]
        if self._quantize and (quantised := quantize(memory, self._layout, tokens)) is not None:
            flags, data, width = INT8, memoryview(quantised), 1
        if self._compress:
            packed = compress(data, width)
            if len(packed) < len(data):
                flags, data = flags | BLOSC2, memoryview(packed)
        return (flags, data) if len(data) < len(memory) else (AS_IT_LIES, memory)


def decode(flags: int, data: bytes | bytearray, memory: memoryview, layout: KvLayout) -> None:
    """Write the block that was encoded into `memory`. Raises `ValueError` for bytes that are no such block."""
    if flags & BLOSC2:
        size = len(memory) if not flags & INT8 else quantised_bytes(layout)
        data = decompress(data, size)
    if flags & INT8:
        dequantize(data, memory, layout)
    else:
        memory[:] = data


def compress(data: memoryview, width: int) -> bytes:
    """blosc2: the bytes of numbers of `width` bytes shuffled, then zstd at level 1."""
    blosc2: Any = importlib.import_module("blosc2")
    packed: bytes = blosc2.compress2(
        data, codec=blosc2.Codec.ZSTD, clevel=1, typesize=width, filters=[blosc2.Filter.SHUFFLE], nthreads=1
    )
    return packed


def decompress(data: bytes | bytearray, size: int) -> bytes:
    """Raises `ValueError` where it is not `size` bytes."""
    blosc2: Any = importlib.import_module("blosc2")
    try:
        told, packed, _ = blosc2.get_cbuffer_sizes(bytes(data[:32]))
        if (told, packed) != (size, len(data)):
            raise ValueError(f"{packed} bytes that hold {told}, where {len(data)} should hold {size}")
        plain: bytes = blosc2.decompress2(bytes(data), nthreads=1)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"no compressed block: {error}") from error
    return plain


def quantised_bytes(layout: KvLayout) -> int:
    """Of a block: a factor for each layer's K and V, a scale for each channel, and a byte for each number."""
    both = 2 * layout.layers
    return both * _FACTOR.itemsize + _channels(layout) * (_SCALE.itemsize + layout.block_size) + layout.state_bytes


def quantize(memory: memoryview, layout: KvLayout, tokens: int) -> bytes | None:
    """With loss. A channel is one element of one head of K or of V in one layer. Its numbers over the block's first
    `tokens` tokens become integers from -127 to 127, and 127 stands for its largest magnitude: that of the largest
    channel of the layer's K or V, as float32, times the channel's share of it, as float16. State is kept as it is, and
    what is behind these tokens becomes 0. None where a number is not finite."""
    bits = layout.elements(memory)
    wide = np.empty((*bits.shape[:2], tokens, *bits.shape[3:]), np.uint32)
    cast(bits[:, :, :tokens], layout.dtype, wide, "float32")
    numbers = wide.view(np.float32)
    peaks = np.abs(numbers).max(axis=2)
    factors = peaks.max(axis=(2, 3, 4), keepdims=True).astype(_FACTOR)
    if not np.isfinite(factors).all():
        return None
    factors[factors == 0] = 1
    scales = np.maximum((peaks / factors).astype(_SCALE), _SMALLEST_SCALE)
    quantised = np.zeros(bits.shape, np.int8)
    quantised[:, :, :tokens] = np.rint(numbers / (factors * scales / 127)[:, :, None]).clip(-127, 127)
    return b"".join((factors.tobytes(), scales.tobytes(), quantised.tobytes(), layout.state(memory)))


def dequantize(data: bytes | bytearray, memory: memoryview, layout: KvLayout) -> None:
    """The other way round. Raises `ValueError` for bytes that are no such block."""
    if len(data) != quantised_bytes(layout):
        raise ValueError(f"{len(data)} bytes, where a quantised block has {quantised_bytes(layout)}")
    target, channels = layout.elements(memory), _channels(layout)
    layers, both, tokens, *rest = target.shape
    factors = np.frombuffer(data, _FACTOR, layers * both).reshape(layers, both, 1, 1, 1, 1)
    scales = np.frombuffer(data, _SCALE, channels, factors.nbytes).reshape(layers, both, 1, *rest)
    quantised = np.frombuffer(data, np.int8, channels * tokens, factors.nbytes + scales.nbytes).reshape(target.shape)
    numbers = quantised * (factors * scales / 127)
    cast(numbers.view(np.uint32), "float32", target, layout.dtype)
    layout.state(memory)[:] = data[len(data) - layout.state_bytes :]


def _channels(layout: KvLayout) -> int:
    return layout.layers * 2 * layout.kv_heads * layout.head_dim
