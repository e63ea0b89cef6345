"""How KV comes to a worker and leaves it: by its agent, or by its engine alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

import msgspec

from pdd_runtime.errors import TransferError
from pdd_runtime.kv import BlockStore, CachedNames
from pdd_runtime.plugins.engine import Load
from pdd_runtime.plugins.messages import FetchEvent, FetchRequest
from pdd_runtime.plugins.transport import LinkTelemetry
from pdd_runtime.worker.agent import Agent
from pdd_runtime.worker.transports import Transports


class Plane(ABC):
    """What a worker's service needs to know of its KV."""

    names: BlockStore | CachedNames
    """Of the blocks that are cached here."""

    @abstractmethod
    def fetch(self, request: FetchRequest) -> AsyncGenerator[FetchEvent, None]:
        """Bring blocks here by a transport. Raises `TransferError` where that is not how KV comes here."""

    @abstractmethod
    def load(self, engine: Load) -> Load:
        """What the engine says of its load, with what is known of blocks and transfers here."""

    def telemetry(self) -> tuple[LinkTelemetry, ...]:
        """What was seen of the ways to other clusters."""
        return ()

    def refuse(self, reason: str) -> None:
        """Begin no more fetches."""
        return

    async def idle(self) -> None:
        """Return when no fetch is open, and nobody fetches from here."""
        return

    async def close(self) -> None:
        """End every transfer."""
        return


class PortablePlane(Plane):
    """Blocks in a store, moved by the KV agent."""

    def __init__(self, store: BlockStore, agent: Agent, transports: Transports) -> None:
        self.names = self._store = store
        self._agent, self._transports = agent, transports

    def fetch(self, request: FetchRequest) -> AsyncGenerator[FetchEvent, None]:
        return self._agent.fetch(request, self._transports.fetching(request.transport, request.source))

    def load(self, engine: Load) -> Load:
        stats = self._store.stats
        return msgspec.structs.replace(
            engine,
            blocks_used=stats.used,
            blocks_cached=stats.cached,
            blocks_total=stats.total,
            sessions=engine.sessions + self._agent.sessions,
        )

    def telemetry(self) -> tuple[LinkTelemetry, ...]:
        return self._transports.telemetry()

    def refuse(self, reason: str) -> None:
        self._agent.refuse(reason)

    async def idle(self) -> None:
        await self._agent.idle()

    async def close(self) -> None:
        await self._agent.close()


class NativePlane(Plane):
    """KV that the engine keeps and moves itself: here are names only."""

    def __init__(self, names: CachedNames, worker: str) -> None:
        self.names, self._worker = names, worker

    def fetch(self, request: FetchRequest) -> AsyncGenerator[FetchEvent, None]:
        raise TransferError(
            f"worker {self._worker} cannot fetch blocks over transport {request.transport}",
            where=f"request {request.id}",
            why="its engine has native KV: it receives from an engine of its kind",
            fix="leave the transport out of the edges between its pool and others of this engine",
        )

    def load(self, engine: Load) -> Load:
        return engine
