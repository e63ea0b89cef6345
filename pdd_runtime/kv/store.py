"""The block store of one worker: what engine and KV agent share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pdd_runtime.errors import CapacityError
from pdd_runtime.kv.index import Entry, PrefixIndex
from pdd_runtime.kv.layout import KvLayout
from pdd_runtime.kv.names import Block
from pdd_runtime.kv.pool import BlockPool
from pdd_runtime.watchers import Watchers

Watcher = Callable[[bytes, bool], None]
"""Gets (name, added): True on commit, False on eviction."""


class Match(NamedTuple):
    """The longest cached prefix of a token sequence; the caller holds a reference to every block in it."""

    blocks: list[int]
    """The full blocks, in order."""
    full: int
    """Tokens in them."""
    partial: int | None
    """A committed partial block whose tokens are the next ones. Copy it before writing behind its tail."""
    partial_tokens: int
    """Tokens in `partial`; 0 without one."""


class Stats(NamedTuple):
    """Blocks by state; `used + cached + free == total`."""

    used: int
    """Referenced by somebody."""
    cached: int
    """Committed, and nobody's: evicted when room is needed."""
    free: int
    total: int


class BlockStore:
    """Blocks of KV with reference counts, and an index that finds committed ones by content.

    Methods belong to the event loop's thread. The *memory* of a block may be touched by any thread as long as
    somebody holds a reference to it. A committed block never changes.
    """

    def __init__(self, layout: KvLayout, blocks: int, *, shared: bool = False) -> None:
        """`shared`: other processes may map the blocks' memory, by `fd`."""
        self.layout, self.blocks = layout, blocks
        self._pool = BlockPool(layout.block_bytes, blocks, shared=shared)
        self._index = PrefixIndex(layout.block_size)
        self._committed: dict[int, Entry] = {}
        self._twins: dict[int, int] = {}
        """Block → the committed block of the same name that it keeps referenced."""
        self._watchers: Watchers[bytes, bool] = Watchers()

    def memory(self, block: int) -> memoryview:
        """The block's bytes, writable, `layout.block_bytes` long."""
        return self._pool.memory(block)

    def buffer(self) -> memoryview:
        """All blocks one after another, `blocks * layout.block_bytes` bytes."""
        return self._pool.buffer()

    @property
    def fd(self) -> int:
        """The descriptor of the memory of a shared store."""
        return self._pool.fd

    @property
    def stats(self) -> Stats:
        return Stats(self._pool.referenced, self._index.unpinned, self._pool.free, self.blocks)

    def allocate(self, n: int) -> list[int]:
        """`n` blocks of undefined content, each with one reference. Evicts cached blocks where needed, the ones
        used longest ago first. Raises `CapacityError`, with nothing taken and nothing evicted."""
        missing = n - self._pool.free
        evicted = self._index.evict(missing) if missing > 0 else []
        if len(evicted) < missing:
            used, cached, free, total = self.stats
            raise CapacityError(
                f"no room for {n} blocks of KV",
                why=f"of {total} blocks {used} are in use, {cached} cached and {free} free",
                fix="wait for requests to end, or give the pool more blocks",
            )
        self._drop(evicted)
        taken = self._pool.take(n)
        self._notify(evicted)
        return taken

    def retain(self, blocks: Iterable[int]) -> None:
        """One reference more to each, which must be referenced or committed."""
        for block in blocks:
            entry = self._committed.get(block)
            if entry is None and self._pool.references(block) == 0:
                raise ValueError(f"block {block} is free: it cannot be retained")
            if self._pool.retain(block) and entry is not None:
                self._index.pin(entry)

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each. At none, a committed block stays as cached and any other is free.
        Raises `ValueError` for a block that has no reference left."""
        for block in blocks:
            if not self._pool.release(block):
                continue
            entry = self._committed.get(block)
            if entry is not None:
                self._index.unpin(entry)
                continue
            self._pool.give_back(block)
            self._part(block)

    def commit(self, block: Block, index: int) -> int:
        """Enter block number `index`, whole and referenced, under its name; returns the number found under it.

        Where another block has the name already, that one's number is returned and yours stays uncommitted. While
        you hold yours, that one stays: so whoever holds a chain can always commit the next block behind it.
        Raises `ValueError` where the parent is not committed, or the block has another name already.
        """
        if self._pool.references(index) == 0:
            raise ValueError(f"block {index} is committed without a reference to it")
        if block.start % self.layout.block_size or not 1 <= block.tokens <= self.layout.block_size:
            raise ValueError(f"{block.tokens} tokens at {block.start} are no block of {self.layout.block_size}")
        known = self._committed.get(index)
        if known is not None and known.name != block.name:
            raise ValueError(f"block {index} has a name already, and a committed block never changes")
        present = self._index.get(block.name)
        if present is None:
            self._part(index)
            self._committed[index] = self._index.add(block, index)
            self._watchers.tell(block.name, True)
            return index
        if present.number != index and self._twins.get(index) != present.number:
            self._part(index)
            self._twins[index] = present.number
            self.retain((present.number,))
        return present.number

    def find(self, name: bytes) -> int | None:
        """The number of a committed block, without a reference to it. Counts as a use."""
        entry = self._index.get(name)
        return None if entry is None else entry.number

    def match(self, root: bytes, tokens: Sequence[int]) -> Match:
        """The longest cached prefix of `tokens` behind `root`, with a reference to each of its blocks."""
        entries = list(self._index.walk(root, tokens))
        self.retain(entry.number for entry in entries)
        for entry in entries:
            self._index.pin(entry)
        partial = entries.pop() if entries and entries[-1].block.tokens < self.layout.block_size else None
        return Match(
            [entry.number for entry in entries],
            len(entries) * self.layout.block_size,
            None if partial is None else partial.number,
            0 if partial is None else partial.block.tokens,
        )

    def cached(self, root: bytes, tokens: Sequence[int]) -> int:
        """How many leading tokens `match` would find. Retains nothing and is no use."""
        return sum(entry.block.tokens for entry in self._index.walk(root, tokens))

    def watch(self, callback: Watcher) -> Callable[[], None]:
        """Call `callback` on every commit and eviction, at once, until the function returned is called."""
        return self._watchers.add(callback)

    def names(self) -> Iterable[bytes]:
        """The names of all committed blocks, a parent before its children."""
        return self._index.names()

    def reset_cache(self) -> None:
        """Evict every cached block (one with a referenced block behind it stays)."""
        evicted = self._index.evict_all()
        self._drop(evicted)
        self._notify(evicted)

    def _part(self, block: int) -> None:
        twin = self._twins.pop(block, None)
        if twin is not None:
            self.release((twin,))

    def _drop(self, evicted: list[Entry]) -> None:
        for entry in evicted:
            del self._committed[entry.number]
            self._pool.give_back(entry.number)

    def _notify(self, evicted: list[Entry]) -> None:
        for entry in evicted:
            self._watchers.tell(entry.name, False)
