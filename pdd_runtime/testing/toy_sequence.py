"""The KV of one request in the scripted engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdd_runtime.errors import EngineError
from pdd_runtime.kv import Block, BlockStore, child
from pdd_runtime.testing.toy_model import ToyModel


class ToySequence:
    """Tokens, the model's states after them, and the blocks with their KV. Every block it references is dropped by
    `release`, which may be called at any time and twice."""

    def __init__(self, store: BlockStore, model: ToyModel, root: bytes, tokens: Sequence[int], request_id: str) -> None:
        """Finds what is cached, checks its bytes, and takes blocks for the rest. Raises `EngineError` where cached
        KV is not what this model would have computed, `CapacityError` where there is no room."""
        self.store, self.model, self.request_id = store, model, request_id
        self.tokens = list(tokens)
        self.blocks: list[int] = []
        self._size = store.layout.block_size
        match = store.match(root, tokens)
        found = [*match.blocks] if match.partial is None else [*match.blocks, match.partial]
        try:
            self.cached = match.full + match.partial_tokens
            """Leading tokens whose KV was here."""
            self.states = model.states(model.start, self.tokens[: self.cached])
            self._check(found, 0)
            own = store.allocate(-(-len(tokens) // self._size) - len(match.blocks))
            if match.partial is not None:
                store.memory(own[0])[:] = store.memory(match.partial)
        except BaseException:
            store.release(found)
            raise
        if match.partial is not None:
            store.release((match.partial,))
        self.blocks = match.blocks + own
        self._written = self.cached
        self._parents = [root]
        """The name before each block that is committed, and before the first one that is not."""
        self._name_blocks(match.full)

    def compute(self, to: int) -> int:
        """The KV of the first `to` tokens; whole blocks are committed. Returns the state after them."""
        self.states += self.model.states(
            self.states[-1] if self.states else self.model.start, self.tokens[len(self.states) : to]
        )
        missing = -(-to // self._size) - len(self.blocks)
        if missing > 0:
            self.blocks += self.store.allocate(missing)
        whole = to // self._size * self._size
        if whole // self._size >= len(self._parents):
            self._write(whole)
            for index, block in self._name_blocks(whole):
                self.store.commit(block, self.blocks[index])
        return self.states[to - 1]

    def fill(self, first: int, content: bytes) -> None:
        """The KV of the tokens in the blocks from index `first` on has come from elsewhere; whole blocks are committed.
        Raises `EngineError` where it is not what this model would have computed."""
        size = self.model.layout.block_bytes
        for index, number in enumerate(self.blocks[first:]):
            self.store.memory(number)[:] = content[index * size : (index + 1) * size]
        known = self.states[: first * self._size]
        self.states = known + self.model.states(
            known[-1] if known else self.model.start, self.tokens[first * self._size :]
        )
        self._check(self.blocks[first:], first)
        self._written = len(self.tokens)
        for index, block in self._name_blocks(len(self.tokens)):
            self.store.commit(block, self.blocks[index])

    def commit_tail(self) -> None:
        """Publish the partial block behind the whole ones, if there is one. Nothing may be computed after that."""
        computed = len(self.states)
        index, rest = divmod(computed, self._size)
        if not rest:
            return
        self._write(computed)
        self.model.layout.elements(self.store.memory(self.blocks[index]))[:, :, rest:] = 0
        start, parent = index * self._size, self._parents[index]
        name = child(parent, self.tokens[start:computed])
        self.store.commit(Block(name, parent, start, rest), self.blocks[index])

    def release(self) -> None:
        blocks, self.blocks = self.blocks, []
        self.store.release(blocks)

    def _name_blocks(self, whole: int) -> list[tuple[int, Block]]:
        """Names of the whole blocks in the first `whole` tokens that have none yet, with their indices."""
        named = []
        for index in range(len(self._parents) - 1, whole // self._size):
            start, parent = index * self._size, self._parents[index]
            name = child(parent, self.tokens[start : start + self._size])
            self._parents.append(name)
            named.append((index, Block(name, parent, start, self._size)))
        return named

    def _write(self, to: int) -> None:
        """Put the rows up to `to` into the blocks: late, so that decoding costs one write a block."""
        if to <= self._written:
            return
        rows = self.model.rows(self.states[self._written : to])
        done = self._written
        while self._written < to:
            index, offset = divmod(self._written, self._size)
            n = min(self._size - offset, to - self._written)
            view = self.model.layout.elements(self.store.memory(self.blocks[index]))
            view[:, :, offset : offset + n] = rows[:, :, self._written - done : self._written - done + n]
            self._written += n

    def _check(self, found: Sequence[int], first: int) -> None:
        for index, number in enumerate(found, first):
            start = index * self._size
            expected = self.model.rows(self.states[start : start + self._size])
            tokens = expected.shape[2]
            view = self.model.layout.elements(self.store.memory(number))
            if not np.array_equal(view[:, :, :tokens], expected) or view[:, :, tokens:].any():
                raise EngineError(
                    f"the cached KV of tokens {start} to {start + tokens} is wrong",
                    where=f"request {self.request_id}",
                    why="the bytes under that block's name are not what this model computes for its tokens",
                )
