"""The prefix index: committed blocks by name, as a tree, with eviction from its leaves."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from pdd_runtime.kv.names import Block, child


class Entry:
    """One committed block in the tree."""

    __slots__ = ("block", "children", "name", "number", "pinned", "queued", "stamp")

    def __init__(self, block: Block, number: int) -> None:
        self.block, self.number = block, number
        self.name = block.name
        self.children = 0
        """Committed blocks right behind this one."""
        self.pinned = False
        """Somebody references the block."""
        self.queued = False
        """It stands in the eviction queue."""
        self.stamp = 0
        """When it was last used, in ticks."""

    @property
    def evictable(self) -> bool:
        return not self.pinned and self.children == 0


class PrefixIndex:
    """A radix tree over token sequences with a block per edge. A name stands for its whole path (it is a hash
    chain), so the tree is a dictionary by name, and each entry knows its parent's name and how many children it has.

    A block is evicted only while unpinned and childless: so nothing committed is ever out of reach behind a hole.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._entries: dict[bytes, Entry] = {}
        self._tails: dict[bytes, dict[int, int]] = {}
        """Parent name → lengths of the partial blocks behind it, with their number."""
        self._queue: list[tuple[int, int, Entry]] = []
        """A heap of (stamp, block number, entry), one item an entry at most. An item may be out of date: a stamp only
        grows, so it is put right when it comes up."""
        self._tick = 0
        self.unpinned = 0

    def names(self) -> list[bytes]:
        return list(self._entries)

    def get(self, name: bytes) -> Entry | None:
        """The entry of a name; counts as a use."""
        entry = self._entries.get(name)
        if entry is not None:
            self._touch(entry)
        return entry

    def add(self, block: Block, number: int) -> Entry:
        """Enter a pinned block whose name is new. Raises `ValueError` where its parent is not here."""
        parent = self._entries.get(block.parent)
        if block.start and parent is None:
            raise ValueError(f"block at token {block.start} is committed before the block it follows")
        entry = Entry(block, number)
        entry.pinned = True
        self._insert(entry)
        self._touch(entry)
        return entry

    def pin(self, entry: Entry) -> None:
        if not entry.pinned:
            entry.pinned = True
            self.unpinned -= 1
        self._touch(entry)

    def unpin(self, entry: Entry) -> None:
        entry.pinned = False
        self.unpinned += 1
        self._touch(entry)
        self._enqueue(entry)

    def walk(self, root: bytes, tokens: Sequence[int]) -> Iterator[Entry]:
        """The entries of the longest cached prefix: full blocks, then the longest partial tail, if one fits."""
        size, parent, start = self.block_size, root, 0
        while start + size <= len(tokens):
            entry = self._entries.get(child(parent, tokens[start : start + size]))
            if entry is None:
                break
            yield entry
            parent, start = entry.name, start + size
        for length in sorted(self._tails.get(parent, ()), reverse=True):
            if start + length <= len(tokens):
                entry = self._entries.get(child(parent, tokens[start : start + length]))
                if entry is not None:
                    yield entry
                    return

    def evict(self, n: int) -> list[Entry]:
        """Remove the `n` blocks used longest ago, leaves first, and return them in that order; or, where fewer can
        go, none at all."""
        evicted = self._evict(n)
        if len(evicted) == n:
            return evicted
        for entry in reversed(evicted):
            self._insert(entry)
            self.unpinned += 1
            self._enqueue(entry)
        return []

    def evict_all(self) -> list[Entry]:
        """Remove whatever can go."""
        return self._evict(self.unpinned)

    def _evict(self, n: int) -> list[Entry]:
        evicted: list[Entry] = []
        while len(evicted) < n and self._queue:
            stamp, _, entry = heapq.heappop(self._queue)
            entry.queued = False
            if stamp != entry.stamp:
                self._enqueue(entry)
            elif entry.evictable:
                self._remove(entry)
                evicted.append(entry)
        return evicted

    def _insert(self, entry: Entry) -> None:
        block = entry.block
        self._entries[entry.name] = entry
        parent = self._entries.get(block.parent)
        if parent is not None:
            parent.children += 1
        if block.tokens < self.block_size:
            lengths = self._tails.setdefault(block.parent, {})
            lengths[block.tokens] = lengths.get(block.tokens, 0) + 1

    def _remove(self, entry: Entry) -> None:
        block = entry.block
        del self._entries[entry.name]
        self.unpinned -= 1
        parent = self._entries.get(block.parent)
        if parent is not None:
            parent.children -= 1
            self._enqueue(parent)
        if block.tokens < self.block_size:
            lengths = self._tails[block.parent]
            lengths[block.tokens] -= 1
            if not lengths[block.tokens]:
                del lengths[block.tokens]
            if not lengths:
                del self._tails[block.parent]

    def _touch(self, entry: Entry) -> None:
        self._tick += 1
        entry.stamp = self._tick

    def _enqueue(self, entry: Entry) -> None:
        if entry.evictable and not entry.queued:
            entry.queued = True
            heapq.heappush(self._queue, (entry.stamp, entry.number, entry))
