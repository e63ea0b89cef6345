"""The connector between a real worker's bridge and the stand-in's executor, all in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pdd_trtllm.launch import CONNECTOR
from pdd_trtllm.testing.arguments import KvCacheConfig, KvCacheConnectorConfig, LlmArgs
from pdd_trtllm.testing.executor import Executor
from pdd_trtllm.testing.serve import build
from pdd_trtllm.testing.task import Finish

from pdd_runtime.kv import BlockStore, KvLayout
from pdd_runtime.plugins.engine import Sampling
from pdd_runtime.server.bridge import Bridge
from pdd_runtime.server.connection import Announced, Geometry, Notice
from pdd_runtime.server.geometry import read_geometry
from tests.waiting import PATIENCE, until

PAGE = 8
GREEDY = Sampling(temperature=0)


class Request:
    """One transfer, and the engine's request for it."""

    def __init__(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        self.tokens, self.blocks = tuple(tokens), list(blocks)
        self.notices: list[Notice] = []
        self.made: list[int] = []
        self.finish: Finish | None = None
        self.number = 0

    def said(self, kind: str) -> int | None:
        """The last count of such a notice."""
        return next((notice.tokens for notice in reversed(self.notices) if notice.kind == kind), None)

    @property
    def planned(self) -> Notice:
        return next(notice for notice in self.notices if notice.kind == "planned")

    @property
    def all(self) -> tuple[int, ...]:
        return (*self.tokens, *self.made)


class Rig:
    """`store`: what worker and connector share."""

    def __init__(self, bridge: Bridge, store: BlockStore, executor: Executor) -> None:
        self.bridge, self.store, self.executor = bridge, store, executor
        self._requests = 0

    @asynccontextmanager
    async def request(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        *,
        offered: int = 0,
        blocks: Sequence[int] | None = None,
        room: int | None = None,
        wanted: bool = True,
    ) -> AsyncGenerator[Request, None]:
        """Inside it is announced, and sent. `blocks`: what is offered lies there; by default new ones, with room for
        `room` tokens, or all that come."""
        size = self.store.layout.block_size
        count = -(-(len(tokens) + max_tokens if room is None else room) // size)
        taken = list(blocks or ())
        taken += self.store.allocate(max(0, count - len(taken))) if wanted else []
        found = Request(tokens, taken)
        self._requests += 1
        first = offered // size if wanted else len(taken)
        announced = Announced(f"t-{self._requests}", found.tokens, offered, first, tuple(taken))
        async with self.bridge.announce(announced, found.notices.append):
            found.number = self.submit(found, max_tokens)
            yield found

    def submit(self, found: Request, max_tokens: int) -> int:
        loop = asyncio.get_running_loop()

        def take(tokens: list[int], finish: Finish | None) -> None:
            found.made += tokens
            found.finish = found.finish or finish

        return self.executor.submit(
            list(found.tokens),
            max_tokens,
            GREEDY,
            True,
            lambda tokens, finish: loop.call_soon_threadsafe(take, tokens, finish) and None,
        )

    async def run(
        self, tokens: Sequence[int], max_tokens: int, *, offered: int = 0, blocks: Sequence[int] = ()
    ) -> Request:
        """A request to its end, and all of its KV published."""
        async with self.request(tokens, max_tokens, offered=offered, blocks=blocks) as request:
            await until(lambda: request.finish)
            await until(lambda: request.said("finished") is not None)
        return request

    async def alone(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """The same for the engine alone: no worker knows of it."""
        request = Request(tokens, ())
        self.submit(request, max_tokens)
        await until(lambda: request.finish)
        return request.made

    def rows(self, blocks: Sequence[int], tokens: int) -> NDArray[np.unsignedinteger]:
        """What lies in blocks: `[tokens, layers, 2, heads, head_dim]`."""
        layout = self.store.layout
        parts = [layout.elements(self.store.memory(block)) for block in blocks]
        rows = np.concatenate(parts, axis=2).transpose(2, 0, 1, 3, 4, 5)
        return rows.reshape(len(rows), layout.layers, 2, layout.kv_heads, layout.head_dim)[:tokens]


@asynccontextmanager
async def bridged(store: BlockStore, socket: Path) -> AsyncGenerator[Bridge, None]:
    layout = store.layout
    geometry = Geometry(layout.layers, layout.kv_heads, layout.head_dim, layout.dtype, layout.block_size)
    bridge = Bridge(store, socket, expects=geometry, ranks=layout.tp_size, scheduler=True)
    await bridge.start()
    try:
        yield bridge
    finally:
        await bridge.close()


def layout(model: Path, *, tp: int) -> KvLayout:
    return read_geometry(model, dtype="float32", block_size=PAGE, tp=tp)


def arguments(model: Path, *, overlap: bool, tp: int, pages: int = 64) -> LlmArgs:
    return LlmArgs(
        model=str(model),
        tensor_parallel_size=tp,
        max_batch_size=4,
        max_num_tokens=3 * PAGE,
        enable_chunked_prefill=True,
        disable_overlap_scheduler=not overlap,
        kv_cache_config=KvCacheConfig(enable_partial_reuse=False, tokens_per_block=PAGE, max_tokens=pages * PAGE),
        kv_connector_config=KvCacheConnectorConfig(**CONNECTOR),
    )


@asynccontextmanager
async def rigged(
    model: Path, socket: Path, *, overlap: bool = True, tp: int = 1, pages: int = 64
) -> AsyncGenerator[Rig, None]:
    """PDD_SOCKET must say `socket`."""
    store = BlockStore(layout(model, tp=tp), 256, shared=True)
    async with bridged(store, socket) as bridge:
        executor, _ = await asyncio.to_thread(build, arguments(model, overlap=overlap, tp=tp, pages=pages))
        try:
            async with asyncio.timeout(PATIENCE):
                await bridge.ready()
            yield Rig(bridge, store, executor)
        finally:
            await asyncio.to_thread(executor.stop)
