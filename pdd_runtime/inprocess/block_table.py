"""The blocks of one sequence: found, taken, filled, published and given back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdd_runtime.errors import CapacityError
from pdd_runtime.kv import Block, BlockStore, child


class BlockTable:
    """Holds a reference to every block in `blocks`. On the event loop only."""

    def __init__(self, store: BlockStore, root: bytes) -> None:
        self.blocks: list[int] = []
        self.computed = 0
        """Tokens whose KV is in the blocks."""
        self._store, self._root, self._size = store, root, store.layout.block_size
        self._parent = root
        self._published = 0
        """Full blocks that are committed; `_parent` is the name of the last."""

    @property
    def full_tokens(self) -> int:
        """Computed tokens that fill whole blocks."""
        return self.computed // self._size * self._size

    def attach(self, tokens: Sequence[int], most: int) -> None:
        """Begin with the longest cached prefix of `tokens`, `most` tokens of it at most. Where that ends within a
        block that more tokens will be written into, the block is copied: a committed one never changes."""
        match = self._store.match(self._root, tokens)
        found = match.blocks if match.partial is None else [*match.blocks, match.partial]
        self.computed = min(match.full + match.partial_tokens, most)
        full, rest = divmod(self.computed, self._size)
        keep = len(found) if self.computed == len(tokens) else full
        self.blocks, spare = found[:keep], found[keep:]
        if rest and keep == full:
            try:
                self.blocks += self._store.allocate(1)
                self._rows(self.blocks[full])[:rest] = self._rows(spare[0])[:rest]
            except CapacityError:
                self.computed = full * self._size
        self._store.release(spare)
        self._name(tokens, full)

    def reserve(self, tokens: int) -> None:
        """Have blocks for so many tokens. Raises `CapacityError` where there is no room, with nothing taken."""
        missing = -(-tokens // self._size) - len(self.blocks)
        if missing > 0:
            self.blocks += self._store.allocate(missing)

    def advance(self, tokens: Sequence[int], computed: int) -> None:
        """The KV of the first `computed` of `tokens` is in the blocks now: publish the full ones."""
        self.computed = computed
        self._name(tokens, computed // self._size, publish=True)

    def publish_tail(self, tokens: Sequence[int]) -> None:
        """Publish what is computed behind the last full block. Nothing may be computed after that."""
        full, rest = divmod(self.computed, self._size)
        if not rest:
            return
        # Nothing of another sequence may stand behind the tail: the whole block travels.
        rows = self._rows(self.blocks[full])
        if rows[rest:].any():
            rows[rest:] = 0
        start = full * self._size
        self._commit(Block(child(self._parent, tokens[start : self.computed]), self._parent, start, rest))

    def release(self) -> None:
        """Give all blocks back; what is published stays cached while there is room. Idempotent."""
        blocks, self.blocks = self.blocks, []
        self.computed, self._published, self._parent = 0, 0, self._root
        self._store.release(blocks)

    def _name(self, tokens: Sequence[int], full: int, *, publish: bool = False) -> None:
        while self._published < full:
            start = self._published * self._size
            name = child(self._parent, tokens[start : start + self._size])
            if publish:
                self._commit(Block(name, self._parent, start, self._size))
            self._parent, self._published = name, self._published + 1

    def _commit(self, block: Block) -> None:
        index = block.start // self._size
        mine = self.blocks[index]
        present = self._store.commit(block, mine)
        if present != mine:  # another sequence made the same block first: use that one
            self._store.retain((present,))
            self._store.release((mine,))
            self.blocks[index] = present

    def _rows(self, block: int) -> NDArray[np.unsignedinteger]:
        """The elements of a block, tokens first."""
        return np.moveaxis(self._store.layout.elements(self._store.memory(block)), 2, 0)
