"""The data plane through shared memory: portable KV, copied by the package `pdd_connector` inside the server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from pdd_runtime.errors import EngineError
from pdd_runtime.kv import BlockStore, Stats
from pdd_runtime.plugins.engine import DecodeRequest, EngineHost, PrefillRequest
from pdd_runtime.server.blocks import Blocks
from pdd_runtime.server.bridge import Bridge
from pdd_runtime.server.config import ServerConfig
from pdd_runtime.server.connection import Geometry
from pdd_runtime.server.geometry import Model
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.plane import DataPlane, Look, Readings
from pdd_runtime.server.request import Generate, ServerRequest
from pdd_runtime.server.shared_request import Served


class SharedPlane(DataPlane):
    """The store is the truth about what is cached here: a server's own cache only saves copies."""

    def __init__(self, name: str, config: ServerConfig, *, scheduler: bool = False, tails: bool = False) -> None:
        """`scheduler`: whether its connector has a part in the server's scheduler that dials by itself. `tails`: as
        `Served` has it."""
        self.name, self._config, self._scheduler, self._tails = name, config, scheduler, tails
        self._store: BlockStore
        self._bridge: Bridge

    @property
    def told(self) -> str:
        return f"{self._bridge.engine}, {self._bridge.capacity} tokens in its own cache"

    @property
    def connected(self) -> bool:
        return self._bridge.connected

    async def open(self, host: EngineHost, model: Model, place: Path) -> None:
        layout = model.layout
        blocks = max(1, self._config.kv_memory // layout.block_bytes)
        self._store = host.open_store(layout, blocks, shared=True)
        self.socket = self._config.socket or place / "agent"
        geometry = Geometry(layout.layers, layout.kv_heads, layout.head_dim, layout.dtype, layout.block_size)
        self._bridge = Bridge(
            self._store, self.socket, expects=geometry, ranks=self._config.tp, scheduler=self._scheduler
        )
        self.broken = self._bridge.broken
        await self._bridge.start()

    async def meet(self, http: HttpClient, look: Look, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._bridge.ready()
        except TimeoutError:
            raise EngineError(
                f"{self.name} makes tokens, but no connector has come from it",
                where=str(self.socket),
                fix="install pdd-connector into the server's environment, and start the server with the flags that "
                "`pdd-runtime render engine` prints",
            ) from None

    async def close(self) -> None:
        await self._bridge.close()

    def request(
        self, request: PrefillRequest | DecodeRequest, root: bytes, most: int, generate: Generate
    ) -> ServerRequest:
        if not self.connected:
            raise EngineError(
                f"{self.name} has lost its connector", where=f"request {request.id}", fix="see the server's log"
            )
        return Served(
            request.id,
            Blocks(self._store, root, request.tokens),
            self._bridge,
            generate,
            salt=request.salt,
            stop_token_ids=request.sampling.stop_token_ids,
            sealable=isinstance(request, DecodeRequest),
            tails=self._tails,
            kv_wait=self._config.kv_wait,
        )

    def cached(self, root: bytes, tokens: Sequence[int]) -> int:
        return self._store.cached(root, tokens)

    def blocks(self, readings: Readings) -> Stats:
        return self._store.stats
