"""The receiving side's agents: several, where a processor does the reading and one is not enough."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np

from pdd_rdma.library import MakeAgent
from pdd_rdma.memory import MemoryType, address_of
from pdd_rdma.reader import Landing, Numbers, Reader, Remote
from pdd_runtime.waiting import to_its_end

T = TypeVar("T")


class Readers:
    """What is said of one `Reader` is true of all: each knows every peer, and every landing. On the loop. Raises
    `NixlError` where one of them cannot do what it is asked; the others have then not done it either."""

    def __init__(self, make: MakeAgent, memory: memoryview, kind: MemoryType, count: int) -> None:
        self._readers = [Reader(make, memory, kind, f"pdd-rdma-read-{number}") for number in range(count)]
        self._turns = itertools.cycle(range(count))

    async def meet(self, name: str, metadata: bytes) -> None:
        await self._all(lambda reader: reader.meet(name, metadata), lambda reader, _: reader.forget(name))

    def forget(self, name: str) -> None:
        for reader in self._readers:
            reader.forget(name)

    @asynccontextmanager
    async def landing(self, blocks: Sequence[memoryview]) -> AsyncIterator[Sequence[Landing]]:
        """Where `blocks`, all of one size, are to be read into, until the end of the context; nothing may be on its way
        then."""
        addresses, size = np.array([address_of(block) for block in blocks], np.int64), blocks[0].nbytes
        landings = await self._all(
            lambda reader: reader.land(addresses, size), lambda reader, landing: reader.lift(landing)
        )
        try:
            yield landings
        finally:
            lifted = [reader.lift(landing) for reader, landing in zip(self._readers, landings, strict=True)]
            await to_its_end(asyncio.gather(*map(asyncio.wrap_future, lifted), return_exceptions=True))

    def read(
        self, remote: Remote, size: int, numbers: Numbers, landings: Sequence[Landing], indices: Numbers
    ) -> Future[None]:
        """By each in turn."""
        turn = next(self._turns)
        return self._readers[turn].read(remote, size, numbers, landings[turn], indices)

    async def rebuild(self) -> None:
        """End all reads."""
        await asyncio.gather(*(asyncio.wrap_future(reader.rebuild()) for reader in self._readers))

    def close(self) -> None:
        """Blocks until all threads have ended. Idempotent."""
        for reader in self._readers:
            reader.close()

    async def _all(self, do: Callable[[Reader], Future[T]], undo: Callable[[Reader, T], object]) -> list[T]:
        futures = [do(reader) for reader in self._readers]
        waiting: asyncio.Future[list[Any]] = asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
        try:
            await to_its_end(waiting)
            return [future.result() for future in futures]
        except BaseException:
            for reader, future in zip(self._readers, futures, strict=True):
                if future.exception() is None:
                    undo(reader, future.result())
            raise
