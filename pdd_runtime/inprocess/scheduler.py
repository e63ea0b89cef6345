"""Which tokens the next forward pass computes, and what its results mean for the sequences."""

from __future__ import annotations

from collections import deque
from itertools import count

from pdd_runtime.clock import now
from pdd_runtime.errors import CapacityError, PddError
from pdd_runtime.inprocess.chunk import Chunk
from pdd_runtime.inprocess.sequence import Sequence
from pdd_runtime.kv import BlockStore
from pdd_runtime.plugins.engine import Token

Planned = list[tuple[Sequence, Chunk]]


class Scheduler:
    """Continuous batching: every pass takes decodes, extends and prompts together. On the event loop only."""

    def __init__(self, store: BlockStore, batch_limit: int, token_budget: int) -> None:
        self._store, self._batch_limit, self._token_budget = store, batch_limit, token_budget
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """Oldest first; held sequences are no longer here."""
        self._numbers = count()
        self._forgotten: list[int] = []

    def add(self, sequence: Sequence) -> None:
        sequence.number, sequence.since = next(self._numbers), now()
        self.waiting.append(sequence)

    def plan(self) -> Planned:
        """The next pass: one token for every sequence that decodes, then known tokens up to the budget. Blocks are
        taken as they are needed; where there are none the youngest sequence gives way and waits."""
        self._admit()
        shares = {s: 1 for s in self.running if s.pending == 1}
        shares |= self._share(self._token_budget - len(shares), [s for s in self.running if s.pending > 1])
        planned: dict[Sequence, Chunk] = {}
        for sequence in [s for s in self.running if s in shares]:
            if self._reserve(sequence, sequence.table.computed + shares[sequence], planned):
                planned[sequence] = self._chunk(sequence, shares[sequence])
        for sequence in planned:
            sequence.in_step = True
        return list(planned.items())

    def forgotten(self) -> list[int]:
        """The numbers of the sequences that have left the batch since this was asked last: for good, or to wait."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def finish(self, planned: Planned, tokens: list[Token | PddError | None]) -> None:
        """Take the results of a pass, in its order."""
        for (sequence, chunk), token in zip(planned, tokens, strict=True):
            sequence.in_step = False
            if isinstance(token, PddError):
                sequence.fail(token)
                self.remove(sequence)
            elif not sequence.over:
                sequence.advance(chunk.end, token)
                self._retire(sequence)
            else:
                self.remove(sequence)

    def seal(self, sequence: Sequence, tokens: int) -> None:
        sequence.seal(tokens)
        self._retire(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Give up a sequence in any state. Its blocks are free at once, or when the pass that writes them has ended."""
        sequence.over = True
        if sequence.in_step:
            return
        self._forget(sequence)
        sequence.free()

    def _retire(self, sequence: Sequence) -> None:
        """Make room for the next where a sequence has stopped."""
        if not sequence.over or sequence.in_step:
            return
        self._forget(sequence)
        if not sequence.hold:
            sequence.free()

    def _forget(self, sequence: Sequence) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
            self._forgotten.append(sequence.number)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._batch_limit:
            sequence = self.waiting[0]
            stats = self._store.stats
            if self.running and self._blocks(len(sequence.tokens)) > stats.free + stats.cached:
                return  # it would only be preempted, or take the blocks that the running ones need next
            self.running.append(self.waiting.popleft())
            sequence.begin()
            self._retire(sequence)

    def _share(self, budget: int, sequences: list[Sequence]) -> dict[Sequence, int]:
        """How many of its pending tokens each sequence may compute. Half is the oldest one's, so that nothing starves;
        the rest goes to whoever has the least left, so that a short extend does not wait behind a long prompt."""
        shares = {sequence: min(sequence.pending, -(-budget // 2)) for sequence in sequences[:1]}
        for sequence in sorted(sequences, key=lambda s: s.pending):
            have = shares.get(sequence, 0)
            more = min(sequence.pending - have, budget - sum(shares.values()))
            if more > 0:
                shares[sequence] = have + more
        return shares

    def _reserve(self, sequence: Sequence, tokens: int, planned: dict[Sequence, Chunk]) -> bool:
        """Blocks for the first `tokens` tokens, taken from younger sequences where need be. False: it had to yield."""
        while sequence in self.running:
            try:
                sequence.table.reserve(tokens)
                return True
            except CapacityError:
                youngest = self.running.pop()
                planned.pop(youngest, None)
                youngest.table.release()
                self._forgotten.append(youngest.number)
                self.waiting.appendleft(youngest)
        return False

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        start, end = sequence.table.computed, sequence.table.computed + count
        return Chunk(
            sequence=sequence.number,
            tokens=tuple(sequence.tokens[start:end]),
            start=start,
            blocks=tuple(sequence.table.blocks[: self._blocks(end)]),
            samples=end == len(sequence.tokens) and sequence.samples,
        )

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._store.layout.block_size)
