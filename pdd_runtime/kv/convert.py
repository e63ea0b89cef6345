"""Conversion of KV blocks from one layout to another, on the receiving side."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pdd_runtime.errors import LayoutError
from pdd_runtime.kv.layout import KvLayout

AT_ONCE = 1 << 18
"""Elements that change their dtype at once: what is made in between then stays in the processor's cache."""
_ALL, _K, _V = slice(None), slice(0, 1), slice(1, 2)


def obstacle(source: KvLayout, target: KvLayout) -> str | None:
    """Why blocks of `source` cannot become blocks of `target`, the field first; None: they can."""
    for field in ("layers", "kv_heads", "head_dim", "state_bytes"):
        ours, theirs = getattr(source, field), getattr(target, field)
        if ours != theirs:
            return f"{field}: {ours} != {theirs}"
    if source.rope != target.rope:
        if "none" in (source.rope, target.rope):
            return f"rope: {source.rope} != {target.rope}"
        if source.head_dim % 2:
            return f"head_dim: {source.head_dim} elements make no pairs for rope {target.rope}"
    if source.state_bytes and target.block_size % source.block_size:
        return (
            f"block_size: {target.block_size} is no multiple of {source.block_size}, and state (state_bytes) is known "
            "only where a block ends"
        )
    return None


class Conversion:
    """From blocks of `source` to blocks of `target`. Made once for a pair; thread-safe.

    Copies are strided, one for each run of heads that lies in one shard on both sides; K whose pairs lie otherwise
    goes in two, the first and the second elements of the pairs.
    """

    def __init__(self, source: KvLayout, target: KvLayout) -> None:
        """Raises `LayoutError`, which names both and the field."""
        why = obstacle(source, target)
        if why is not None:
            raise LayoutError(
                "KV of one layout cannot be converted to the other",
                why=f"{why} (source: {source}; target: {target})",
                fix="give both pools' engines settings that fit",
            )
        self.source, self.target = source, target
        runs = math.lcm(source.tp_size, target.tp_size)
        pairs: list[tuple[slice, slice, slice]] = [(_ALL, _ALL, _ALL)]
        if source.rope != target.rope:
            ours, theirs = _pairs(source), _pairs(target)
            pairs = [(_V, _ALL, _ALL), (_K, ours[0], theirs[0]), (_K, ours[1], theirs[1])]
        self._parts = [
            (_part(source, run, runs, kv, ours), _part(target, run, runs, kv, theirs))
            for run in range(runs)
            for kv, ours, theirs in pairs
        ]

    def tokens(self, source: memoryview, source_at: int, target: memoryview, target_at: int, count: int) -> None:
        """Convert `count` tokens, from the `source_at`-th of one block to the `target_at`-th of another."""
        # Needs numpy, which most processes do without.
        from pdd_runtime.kv.cast import cast

        have = self.source.elements(source)[:, :, source_at : source_at + count]
        want = self.target.elements(target)[:, :, target_at : target_at + count]
        layers = self.source.layers
        step = layers if self.source.dtype == self.target.dtype else max(1, AT_ONCE * layers // have.size)
        for first in range(0, layers, step):
            some, there = have[first : first + step], want[first : first + step]
            for ours, theirs in self._parts:
                cast(some[ours], self.source.dtype, there[theirs], self.target.dtype)

    def finish(self, source: memoryview, target: memoryview, tokens: int) -> None:
        """`target` has its `tokens` tokens, the last of them from `source`: its state follows, and behind a partial
        block's tokens there are zeros."""
        if tokens < self.target.block_size:
            self.target.elements(target)[:, :, tokens:] = 0
        self.target.state(target)[:] = self.source.state(source)


class Run:
    """Tokens `start` to `end` of a sequence on their way from the source's blocks into the target's, in any order, but
    one at a time."""

    def __init__(self, conversion: Conversion, start: int, end: int) -> None:
        """`start`: where one of the target's blocks begins. `end`: the last block may be partial on either side."""
        self.conversion, self._start, self._end = conversion, start, end
        size = conversion.target.block_size
        self._left = [min(size, end - at) for at in range(start, end, size)]
        self._added: set[int] = set()

    def add(self, at: int, source: memoryview, target: Callable[[int], memoryview]) -> list[int]:
        """Convert the source's block that begins with token `at`; one that was added before is ignored. `target` is
        asked for the memory of a block by its index, 0 for the one at `start`. Returns the indices of those that are
        whole by this."""
        if at in self._added:
            return []
        self._added.add(at)
        size, whole = self.conversion.target.block_size, []
        position, until = max(at, self._start), min(at + self.conversion.source.block_size, self._end)
        while position < until:
            index = (position - self._start) // size
            begin = self._start + index * size
            end = min(begin + size, self._end)
            count = min(until, end) - position
            memory = target(index)
            self.conversion.tokens(source, position - at, memory, position - begin, count)
            position += count
            if position == end:
                self.conversion.finish(source, memory, end - begin)
            self._left[index] -= count
            if not self._left[index]:
                whole.append(index)
        return whole


_Index = tuple[Any, ...]


def _part(layout: KvLayout, run: int, runs: int, kv: slice, elements: slice) -> _Index:
    """Where the heads of `run`, one of `runs` of equal length, lie in `KvLayout.elements`."""
    width, in_shard = layout.kv_heads // runs, runs // layout.tp_size
    first = run % in_shard * width
    return _ALL, kv, _ALL, run // in_shard, slice(first, first + width), elements


def _pairs(layout: KvLayout) -> tuple[slice, slice]:
    """The first elements of all pairs, and the second ones."""
    if layout.rope == "interleaved":
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, layout.head_dim // 2), slice(layout.head_dim // 2, None)
