"""Sequence states: the form in which llama.cpp gives away and takes in the KV of a sequence, to and from blocks.

A state, little endian, without flash attention's transposed V:

    u32 magic, u32 sequence, u32 streams = 1, u32 cells
    for every cell: i32 position, u32 sequences = 1, i32 sequence
    u32 v_transposed = 0, u32 layers, u32 0, u32 0
    for every layer's K, then for every layer's V: i32 type, u64 bytes of a row, rows[cells]

It belongs to one release of llama.cpp: `library.RELEASE`. Blocks are `[layers, 2, block_size, row]` each, in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdd_llamacpp.library import RELEASE
from pdd_runtime.errors import EngineError

Bytes = NDArray[np.uint8]

_MAGIC = 0xAF143CD8
_HEAD, _CELL, _MIDDLE, _ROWS = 16, 12, 16, 12
"""Bytes of what stands before the cells, of a cell, between cells and rows, and before the rows of a layer."""


@dataclass(frozen=True)
class StateFormat:
    """The states of one model."""

    layers: int
    kind: int
    """ggml's number of the rows' number format."""
    row: int
    """Bytes of one token's K, or V, in one layer."""

    @classmethod
    def of(cls, state: Bytes) -> StateFormat:
        """The format of the states that look like this one of a single cell. Raises `EngineError` where its layers
        are not alike, or nothing of all this holds."""
        words = state[: _HEAD + _CELL + _MIDDLE + _ROWS].view(np.uint32)
        form = cls(layers=int(words[8]), kind=int(words[11]), row=int(words[12]))
        form._body(state, 1)
        return form

    def pack(self, memory: Bytes, blocks: Sequence[int], start: int, end: int) -> Bytes:
        """The state of the tokens at [start, end) of a sequence with these blocks. `memory`: all blocks,
        `[blocks, layers, 2, block_size, row]`."""
        cells = end - start
        state = np.empty(self._size(cells), np.uint8)
        state[:_HEAD].view(np.uint32)[:] = (_MAGIC, 0, 1, cells)
        table = state[_HEAD : _HEAD + cells * _CELL].view(np.int32).reshape(cells, 3)
        table[:] = (0, 1, 0)
        table[:, 0] = np.arange(start, end)
        behind = state[_HEAD + cells * _CELL :]
        behind[:_MIDDLE].view(np.uint32)[:] = (0, self.layers, 0, 0)
        body = behind[_MIDDLE:].reshape(2, self.layers, -1)
        body[:, :, :_ROWS] = np.array((self.kind, self.row, 0), np.uint32).view(np.uint8)
        rows = body[:, :, _ROWS:].reshape(2, self.layers, cells, self.row)
        for block, inside, outside in _pieces(memory.shape[3], start, end):
            rows[:, :, outside] = memory[blocks[block], :, :, inside].swapaxes(0, 1)
        return state

    def unpack(self, state: Bytes, memory: Bytes, blocks: Sequence[int], start: int, end: int) -> None:
        """Write the rows of a state of the tokens at [start, end) into their blocks. Raises `EngineError` for a state
        of another form."""
        cells = end - start
        body = self._body(state, cells)
        rows = body[:, :, _ROWS:].reshape(2, self.layers, cells, self.row)
        positions = state[_HEAD : _HEAD + cells * _CELL].view(np.int32)[::3]
        order = np.argsort(positions)  # cells stand where there was room, not one behind the other
        if not np.array_equal(positions[order], np.arange(start, end)):
            raise _foreign(f"positions {positions[order]} instead of {start} to {end - 1}")
        if not np.array_equal(order, np.arange(cells)):
            rows = rows[:, :, order]
        for block, inside, outside in _pieces(memory.shape[3], start, end):
            memory[blocks[block], :, :, inside] = rows[:, :, outside].swapaxes(0, 1)

    def _size(self, cells: int) -> int:
        return _HEAD + cells * _CELL + _MIDDLE + 2 * self.layers * (_ROWS + cells * self.row)

    def _body(self, state: Bytes, cells: int) -> Bytes:
        """`[K and V, layers, bytes]` of a state that is checked from end to end."""
        if len(state) != self._size(cells):
            raise _foreign(f"{len(state)} bytes instead of {self._size(cells)}")
        head, middle = state[:_HEAD].view(np.uint32), _HEAD + cells * _CELL
        found = (*head[[0, 2, 3]], *state[middle : middle + _MIDDLE].view(np.uint32))
        if found != (expected := (_MAGIC, 1, cells, 0, self.layers, 0, 0)):
            raise _foreign(f"{tuple(map(int, found))} instead of {expected}")
        body = state[middle + _MIDDLE :].reshape(2, self.layers, -1)
        before = np.array((self.kind, self.row, 0), np.uint32).view(np.uint8)
        if (body[:, :, :_ROWS] != before).any():
            raise _foreign("its layers are not alike")
        return body


def _pieces(size: int, start: int, end: int) -> Iterator[tuple[int, slice, slice]]:
    """Which block [start, end) touches, where inside of it, and where in [start, end)."""
    for block in range(start // size, -(-end // size)):
        first, last = max(start, block * size), min(end, (block + 1) * size)
        yield block, slice(first - block * size, last - block * size), slice(first - start, last - start)


def _foreign(why: str) -> EngineError:
    return EngineError(
        "llama.cpp gave a sequence state that cannot be read",
        why=why,
        fix=f"use a model whose layers all keep a key and a value for each token, with xllamacpp {RELEASE}",
    )
