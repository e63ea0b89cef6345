"""The scripted engine's native data plane: a store of its own, and KV straight to another engine of its kind."""

from __future__ import annotations

import asyncio

import msgspec

from pdd_runtime.errors import EngineError
from pdd_runtime.kv import Block, BlockStore, CachedNames
from pdd_runtime.plugins.engine import Offer
from pdd_runtime.testing.scripted_desk import ScriptedDesk, Ticket, pull
from pdd_runtime.testing.scripted_request import ScriptedRequest
from pdd_runtime.testing.toy_sequence import ToySequence


class NamedStore(BlockStore):
    """A store that no agent sees; of its full blocks the names are told."""

    def __init__(self, names: CachedNames, blocks: int) -> None:
        super().__init__(names.layout, blocks)
        self._names = names
        self._whole: set[bytes] = set()
        self.watch(self._on_block)

    def commit(self, block: Block, index: int) -> int:
        if block.tokens == self.layout.block_size:
            self._whole.add(block.name)
        return super().commit(block, index)

    def _on_block(self, name: bytes, added: bool) -> None:
        if not added:
            self._whole.discard(name)
            self._names.remove(name)
        elif name in self._whole:
            self._names.add(name)


class ScriptedNative:
    """Keeps KV for readers, and reads what others keep."""

    def __init__(self, store: BlockStore, model: str, rate: float | None, lease: float) -> None:
        """`lease`: seconds for a reader to come."""
        self.desk = ScriptedDesk(model, rate)
        self._store, self._model, self.lease = store, model, lease

    async def receive(
        self, running: ScriptedRequest, sequence: ToySequence, offer: Offer, timeout: float | None
    ) -> int:
        """Fill the sequence's blocks with what is offered; returns how many tokens' KV has come. Raises
        `EngineError`."""
        ticket = self._ticket(offer, len(sequence.tokens))
        size = self._store.layout.block_size
        first = sequence.cached // size
        if sequence.cached == len(sequence.tokens):
            return 0
        missing = len(sequence.blocks) - first
        try:
            async with asyncio.timeout(timeout):
                read = await running.during(pull(ticket, first, missing, self._store.layout.block_bytes))
        except TimeoutError:
            raise EngineError(
                f"what was offered did not come in {timeout:g} s", where=f"request {running.id}"
            ) from None
        sequence.fill(first, read)
        return len(sequence.tokens) - first * size

    def _ticket(self, offer: Offer, tokens: int) -> Ticket:
        try:
            ticket = msgspec.convert(offer.params, Ticket)
        except msgspec.ValidationError as error:
            raise EngineError("this is no offer of a scripted engine", why=str(error)) from None
        if ticket.model != self._model:
            raise EngineError("the offer is of another model", why=f"{ticket.model} there, {self._model} here")
        if ticket.tokens != tokens:
            raise EngineError(f"{ticket.tokens} tokens are offered, and {tokens} asked for")
        return ticket
