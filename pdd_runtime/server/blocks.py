"""The blocks of one request at a server: what is offered to it, where it publishes, and what of that is committed."""

from __future__ import annotations

from collections.abc import Sequence

from pdd_runtime.errors import CapacityError
from pdd_runtime.kv import Block, BlockStore, child


class Blocks:
    """References to the blocks of one sequence, from the first token on.

    The server copies KV into blocks that are ours alone; `commit` enters them under their names as it says that it has.
    """

    def __init__(self, store: BlockStore, root: bytes, tokens: Sequence[int]) -> None:
        """Takes what is cached of `tokens`; `release` in any case."""
        self._store, self.size = store, store.layout.block_size
        self.tokens = list(tokens)
        """All known tokens; the caller appends."""
        match = store.match(root, tokens)
        self.numbers = list(match.blocks)
        self._partial = match.partial
        self.cached = match.full + match.partial_tokens
        """Tokens whose KV was in the store."""
        self.first = len(self.numbers)
        """The first block that is ours to be written."""
        self._committed = self.first
        self._entered = 0
        self._parent = root
        for start in range(0, match.full, self.size):
            self._parent = child(self._parent, tokens[start : start + self.size])
        self.open = False
        """Whether more is published, as far as blocks can be had."""

    @property
    def committed(self) -> int:
        """Leading tokens whose KV can be found by name."""
        return max(self.cached, self._entered)

    @property
    def published(self) -> int:
        """Tokens that have a place in the blocks."""
        return len(self.numbers) * self.size

    def open_for(self, tokens: int) -> None:
        """Have room to publish the first `tokens` tokens. What is cached in part is copied, for a committed block never
        changes. Raises `CapacityError`, with nothing taken."""
        n = -(-tokens // self.size) - len(self.numbers)
        if n > 0:
            taken = self._store.allocate(n)
            if self._partial is not None and self.first == len(self.numbers):
                self._store.memory(taken[0])[:] = self._store.memory(self._partial)
                self._store.release((self._partial,))
                self._partial = None
            self.numbers += taken
        self.open = True

    def offer_only(self) -> None:
        """Publish nothing; what is cached can be read where it is."""
        if self._partial is not None:
            self.numbers.append(self._partial)
            self._partial = None
        self.first = len(self.numbers)

    def commit(self, written: int) -> None:
        """The KV of the first `written` tokens lies in the blocks: enter the full ones that are known."""
        while (end := (self._committed + 1) * self.size) <= min(written, len(self.tokens), self.published):
            if self._committed >= self.first:
                self._enter(self._committed, end)
            self._committed += 1

    def commit_tail(self, written: int) -> None:
        """The same, and no more will be written: enter the last block as it is."""
        self.commit(written)
        end = min(written, len(self.tokens), self.published)
        if end > self._committed * self.size and self._committed >= self.first:
            self._enter(self._committed, end)

    def release(self) -> None:
        """Give all references back. Idempotent."""
        if self._partial is not None:
            self.numbers.append(self._partial)
            self._partial = None
        self._store.release(self.numbers)
        self.numbers = []
        self.open = False

    def grow(self, tokens: int) -> tuple[int, ...]:
        """Room for `tokens` tokens in all, where it can be had; the blocks added. Where it cannot, publishing ends:
        the cache is the poorer, and nothing else."""
        n = -(-tokens // self.size) - len(self.numbers)
        if not self.open or n <= 0:
            return ()
        try:
            added = self._store.allocate(n)
        except CapacityError:
            self.open = False
            return ()
        self.numbers += added
        return tuple(added)

    def _enter(self, index: int, end: int) -> None:
        start = index * self.size
        name = child(self._parent, self.tokens[start:end])
        self._store.commit(Block(name, self._parent, start, end - start), self.numbers[index])
        self._entered = end
        if end - start == self.size:
            self._parent = name
