"""One fetch: the blocks it holds, those it waits for, and those that land."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, MutableMapping, Sequence
from typing import Any

from pdd_runtime.errors import Cancelled
from pdd_runtime.kv import Block
from pdd_runtime.plugins.transport import TransferReport
from pdd_runtime.worker.sink import FetchSink
from pdd_runtime.worker.store import WorkerStore

Claims = MutableMapping[bytes, asyncio.Event]
"""Names of blocks on their way into this worker; the event: committed, or not coming any more."""


class Fetch:
    """Brings the blocks of a token sequence here, and holds the leading ones that are here until it is closed.

    Everything on the loop. Whatever it has taken goes back exactly once: after `close`, and not before its transfer
    has really ended, so that no transport thread writes into memory that is somebody else's by then.
    """

    def __init__(
        self, store: WorkerStore, claims: Claims, blocks: Sequence[Block], released: Callable[[Fetch], None]
    ) -> None:
        """`released` is called once, when everything has been given back."""
        self._store, self._claims, self._blocks, self._released = store, claims, blocks, released
        self._held: list[int] = []
        """The numbers of the leading blocks that are here, each with a reference of ours."""
        self._wanted: Sequence[Block] = ()
        self._landing: list[int] = []
        """The numbers of the blocks that the wanted ones are received into, where they are not in `_held`."""
        self._whole: set[int] = set()
        self.received = 0
        """Blocks that have crossed the network, as their source cuts them."""
        self._committed = 0
        self._mine: dict[bytes, asyncio.Event] = {}
        self._closed = False
        self._transfer: asyncio.Task[TransferReport] | None = None
        self.progress = asyncio.Event()
        """Set when a block has come and when the transfer ends."""

    @property
    def missing(self) -> Sequence[Block]:
        """The blocks behind the leading ones that are here."""
        return self._blocks[len(self._held) :]

    @property
    def blocks_here(self) -> int:
        return len(self._held)

    @property
    def tokens_here(self) -> int:
        """Leading tokens whose KV is here, and held."""
        return sum(block.tokens for block in self._blocks[: len(self._held)])

    @property
    def transferring(self) -> bool:
        return self._transfer is not None and not self._transfer.done()

    def hold_cached(self) -> None:
        """Hold what is here by now."""
        for block in self.missing:
            number = self._store.find(block.name)
            if number is None:
                return
            self._store.retain((number,))
            self._held.append(number)

    async def claim(self) -> None:
        """Wait while another fetch brings what comes next, then claim what is still missing: the bytes of a block
        cross the network once. Whoever has a block claimed has all before it here or claimed, so to look at the
        first missing one is enough."""
        self.hold_cached()
        while self.missing and (claimed := self._claims.get(self.missing[0].name)) is not None:
            await claimed.wait()
            self._check()
            self.hold_cached()
        for block in self.missing:
            self._mine[block.name] = self._claims[block.name] = asyncio.Event()
        self._wanted = self.missing

    async def make_room(self) -> None:
        """Take a block for each that is wanted, waiting for as long as there is no room."""
        landing = await self._store.room(len(self._wanted))
        if self._closed:
            self._store.release(landing)
        self._check()
        self._landing = landing

    def begin(self, run: Callable[[FetchSink], Coroutine[Any, Any, TransferReport]]) -> None:
        """Start the transfer of the wanted blocks into their memory."""
        memory = [self._store.memory(number) for number in self._landing]
        sink = FetchSink(memory, asyncio.get_running_loop(), self._on_received, self._on_whole)

        async def transfer() -> TransferReport:
            try:
                return await run(sink)
            finally:
                sink.close()

        self._transfer = asyncio.create_task(transfer(), name="kv transfer")
        self._transfer.add_done_callback(self._on_end)

    def report(self) -> TransferReport:
        """What the transfer did; raises what it raised."""
        if self._transfer is None:
            return TransferReport(bytes=0, blocks=0, gone=0, seconds=0.0)
        return self._transfer.result()

    def close(self) -> None:
        """Give everything back, now or as soon as the transfer has ended. Idempotent."""
        first, self._closed = not self._closed, True
        if self._transfer is not None and not self._transfer.done():
            self._transfer.cancel()
        elif first:
            self._give_back()

    async def ended(self, timeout: float | None = None) -> None:
        """Return when no transport touches its memory any more, or after `timeout` seconds."""
        if self._transfer is not None:
            await asyncio.wait({self._transfer}, timeout=timeout)

    def _check(self) -> None:
        if self._closed:
            raise Cancelled("the fetch was closed")

    def _on_received(self) -> None:
        self.received += 1
        self.progress.set()

    def _on_whole(self, index: int) -> None:
        """A wanted block is in memory: commit it, if all before it are; names are a chain."""
        self._whole.add(index)
        while self._committed in self._whole:
            block, number = self._wanted[self._committed], self._landing[self._committed]
            present = self._store.commit(block, number)
            # Where somebody else was faster, theirs is held, and ours goes back with the transfer's end.
            self._store.retain((present,))
            self._held.append(present)
            self._committed += 1
            self._arrived(block.name)

    def _on_end(self, transfer: asyncio.Task[TransferReport]) -> None:
        if not transfer.cancelled():
            transfer.exception()  # Whoever has closed the fetch does not ask for it, and that is no fault.
        landing, self._landing = self._landing, []
        self._store.release(landing)
        for name in list(self._mine):
            self._arrived(name)
        self.progress.set()
        if self._closed:
            self._give_back()

    def _arrived(self, name: bytes) -> None:
        mine = self._mine.pop(name)
        if self._claims.get(name) is mine:
            del self._claims[name]
        mine.set()

    def _give_back(self) -> None:
        for name in list(self._mine):
            self._arrived(name)
        held, self._held = self._held, []
        landing, self._landing = self._landing, []
        self._store.release([*landing, *reversed(held)])
        self._released(self)
