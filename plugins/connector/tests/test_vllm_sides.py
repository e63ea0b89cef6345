"""Both sides of the vLLM connector, step by step, with a real worker's bridge and blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest_asyncio
from pdd_connector import AgentClient
from pdd_connector import Geometry as Theirs
from pdd_connector.vllm.layout import page_layouts
from pdd_connector.vllm.pages import CacheLayout, HostCopier
from pdd_connector.vllm.scheduler import SchedulerSide
from pdd_connector.vllm.worker import WorkerSide

from pdd_runtime.kv import BlockStore, KvLayout
from pdd_runtime.server.bridge import Bridge
from pdd_runtime.server.connection import Announced, Geometry, Notice
from tests.waiting import until

from .vllm_engine import Engine, New, Output, Request, value

SIZE = 4
LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=2, dtype="float32", block_size=SIZE)
PAGES = 16


class Rig(NamedTuple):
    bridge: Bridge
    store: BlockStore
    client: AgentClient
    """The worker side's."""
    engine: Engine

    @asynccontextmanager
    async def announced(
        self, request: Request, blocks: tuple[int, ...], *, offered: int = 0, first: int = 0
    ) -> AsyncGenerator[list[Notice], None]:
        notices: list[Notice] = []
        id = (request.kv_transfer_params or {})["pdd"]
        async with self.bridge.announce(Announced(id, tuple(request.tokens), offered, first, blocks), notices.append):
            yield notices

    def blocks(self, id: str) -> tuple[int, ...]:
        """Those that the worker side has heard of."""
        transfer = self.client.request(id)
        return () if transfer is None else transfer.blocks

    def rows(self, block: int) -> np.ndarray:  # type: ignore[type-arg]
        """`[tokens]`: what every element of a token is; fails where they differ."""
        elements = LAYOUT.elements(self.store.memory(block))
        first = elements[0, 0, :, 0, 0, 0]
        assert (elements == first[None, None, :, None, None, None]).all()
        return first

    def holds(self, request: Request, blocks: tuple[int, ...], tokens: int) -> None:
        """The blocks have the KV of exactly the first `tokens` tokens."""
        found = np.concatenate([self.rows(block) for block in blocks])
        expected = [value(request, position) for position in range(tokens)]
        assert found.tolist() == expected + [0] * (len(blocks) * SIZE - tokens)


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncGenerator[Rig, None]:
    store = BlockStore(LAYOUT, 32, shared=True)
    bridge = Bridge(store, tmp_path / "s", expects=Geometry(2, 2, 2, "float32", SIZE), ranks=1)
    await bridge.start()
    path, theirs = str(bridge.path), Theirs(2, 2, 2, "float32", SIZE, 64)
    scheduler = await asyncio.to_thread(lambda: AgentClient(path, engine="toy", role="scheduler"))
    worker = await asyncio.to_thread(lambda: AgentClient(path, engine="toy", role="worker", geometry=theirs))
    caches = np.zeros((PAGES, 2, 2, SIZE, 2, 2), np.uint32)
    page = caches[0].size
    offsets = np.arange(page // 2).reshape(2, SIZE, 2, 2)
    layout = CacheLayout(PAGES, 2, 0, page, page // 2, *page_layouts(offsets), (SIZE, 2, 2))
    copier = HostCopier(caches.reshape(-1), layout)
    yield Rig(bridge, store, worker, Engine(SchedulerSide(scheduler), WorkerSide(worker, copier), caches, SIZE))
    for client in (scheduler, worker):
        await asyncio.to_thread(client.close)
    await bridge.close()


def request(tokens: int, id: str = "kv-1") -> Request:
    return Request(f"cmpl-{id}-0-abc", list(range(1, tokens + 1)), {"pdd": id})


async def test_a_chunked_prefill_publishes_page_by_page_and_its_tail(rig: Rig) -> None:
    one, blocks = request(10), (7, 3, 5)
    async with rig.announced(one, blocks) as notices:
        for chunk, pages in ((5, (1, 2)), (2, ()), (3, (4,))):
            rig.engine.step(one, chunk, pages)
        await until(lambda: len(notices) == 3)
        assert notices == [Notice("planned", 0, 0), Notice("written", 4), Notice("written", 10)]
        rig.holds(one, blocks, 10)
        one.tokens.append(11)
        rig.engine.finish(one)
        rig.engine.step()
        await until(lambda: notices[3:] == [Notice("finished", 10)])


async def test_pages_of_the_engines_own_cache_are_published_too(rig: Rig) -> None:
    earlier = request(8, "kv-0")
    async with rig.announced(earlier, (0, 1)):
        rig.engine.step(earlier, 8, (1, 2))
    one, blocks = request(10), (7, 3, 5)
    one.pages, one.hit = [1, 2], 8
    async with rig.announced(one, blocks) as notices:
        rig.engine.step(one, 2, (4,))
        await until(lambda: len(notices) == 2)
        assert notices == [Notice("planned", 0, 8), Notice("written", 10)]
        rig.holds(one, blocks, 10)


async def test_what_is_offered_is_loaded_with_its_partial_tail(rig: Rig) -> None:
    source, one, blocks = request(9, "kv-0"), request(10), (7, 3, 5)
    async with rig.announced(source, blocks):
        rig.engine.step(source, 9, (1, 2, 3))
    async with rig.announced(one, blocks, offered=9, first=2) as notices:
        assert rig.engine.step(one, 1, (4, 5, 6)) == 9
        await until(lambda: len(notices) == 3)
        assert notices == [Notice("planned", 9, 0), Notice("loaded", 9), Notice("written", 10)]
        assert [int(rig.engine.row(one, position)[0, 0, 0, 0]) for position in range(10)] == [
            value(one, position) for position in range(10)
        ]
        assert not rig.engine.caches[6][:, :, 2:].any()
        rig.holds(one, blocks, 10)


async def test_the_last_token_is_never_loaded(rig: Rig) -> None:
    one = request(8)
    async with rig.announced(one, (1, 2), offered=8, first=2):
        assert rig.engine.step(one, 1, (1, 2)) == 7


async def test_decoded_pages_follow_as_they_fill_and_the_tail_at_the_end(rig: Rig) -> None:
    one, blocks = request(3), (7, 3)
    async with rig.announced(one, blocks) as notices:
        rig.engine.step(one, 3, (1,))
        for token in range(4, 7):
            one.tokens.append(token)
            rig.engine.step(one, 1, (2,) if token == 5 else ())
        one.tokens.append(7)
        rig.engine.finish(one)
        other = Request("another", list(range(50, 58)))
        rig.engine.step(other, 8, (1, 2))  # takes the same pages in the very next step
        await until(lambda: any(notice.kind == "finished" for notice in notices))
        assert [notice for notice in notices if notice.kind != "planned"] == [
            *(Notice("written", n) for n in (3, 4, 6)),
            Notice("finished", 6),
        ]
        rig.holds(one, blocks, 6)


async def test_blocks_that_come_late_are_filled_from_the_pages(rig: Rig) -> None:
    one = request(3)
    async with rig.announced(one, (7,)) as notices:
        rig.engine.step(one, 3, (1,))
        one.tokens += range(4, 11)
        rig.engine.step(one, 7, (2, 3))
        await until(lambda: notices[-1:] == [Notice("written", 4)])
        rig.bridge.add("kv-1", (3, 5), ())
        await until(lambda: len(rig.blocks("kv-1")) == 3)
        one.tokens.append(11)
        rig.engine.step(one, 1)
        await until(lambda: notices[-1:] == [Notice("written", 8)])
        one.tokens.append(12)
        rig.engine.finish(one)
        rig.engine.step()
        await until(lambda: notices[-1:] == [Notice("finished", 11)])
        rig.holds(one, (7, 3, 5), 11)


async def test_drafts_that_may_be_refused_are_not_published(rig: Rig) -> None:
    one = request(3)
    async with rig.announced(one, (7, 3)) as notices:
        rig.engine.step(one, 3, (1,))
        one.tokens.append(4)
        rig.engine.step(one, 5, (2,), drafts=4)
        one.tokens.append(5)
        rig.engine.step(one, 1)
        one.tokens.append(6)
        rig.engine.finish(one)
        rig.engine.step()
        await until(lambda: notices[-1:] == [Notice("finished", 5)])
        rig.holds(one, (7, 3), 5)


async def test_a_transfer_that_is_over_when_its_load_comes_is_computed_instead(rig: Rig) -> None:
    """And what another request has computed with its pages in the same step is published by nobody."""
    one, other = request(10), request(10, "kv-2")
    scheduler, worker = rig.engine.scheduler, rig.engine.worker
    async with rig.announced(one, (7, 3, 5), offered=9, first=2):
        scheduler.allocated(one, scheduler.matched(one, 0))
    async with rig.announced(other, (8, 9, 10)) as notices:
        scheduler.allocated(other, 0)
        output = Output([New(one.request_id, ([4, 5, 6],), 9), New(other.request_id, ([4, 5, 7],), 8)])
        output.num_scheduled_tokens = {one.request_id: 1, other.request_id: 2}
        step = scheduler.step(output)
        worker.begin(step)
        worker.load(step)
        worker.save(step)
        assert worker.failed() == {4, 5, 6, 7}
        assert worker.failed() == set()
        other.pages = [4, 5, 7]
        rig.engine.again(other, 8, 10)
        await until(lambda: len(notices) == 2)
        assert notices == [Notice("planned", 0, 8), Notice("written", 10)]
        rig.holds(other, (8, 9, 10), 10)


async def test_a_preempted_request_is_published_from_its_new_pages(rig: Rig) -> None:
    one, blocks = request(6), (7, 3)
    async with rig.announced(one, blocks) as notices:
        rig.engine.step(one, 5, (1, 2))
        one.num_computed_tokens, one.pages = 0, []
        rig.engine.caches[:] = 0
        rig.engine.step(one, 6, (8, 9))
        await until(lambda: notices[-1:] == [Notice("written", 6)])
        rig.holds(one, blocks, 6)
        assert [notice.kind for notice in notices].count("planned") == 1


async def test_a_request_that_never_ran_is_told_to_be_over(rig: Rig) -> None:
    one = request(6)
    async with rig.announced(one, (7, 3)) as notices:
        rig.engine.finish(one)
        rig.engine.step()
        await until(lambda: notices == [Notice("finished", 0)])


async def test_requests_of_others_pass_untouched(rig: Rig) -> None:
    for params in (None, {}, {"do_remote_decode": True}, {"pdd": 5}, {"pdd": "unknown"}):
        other = Request(f"other-{params}", [1, 2, 3], params)
        assert rig.engine.step(other, 3, (1,)) == 0
        rig.engine.finish(other)
        rig.engine.step()


async def test_without_a_worker_nothing_is_offered_and_nothing_fails(rig: Rig) -> None:
    one = request(6)
    async with rig.announced(one, (7, 3), offered=4, first=1):
        pass
    await rig.bridge.close()
    assert rig.engine.step(one, 6, (1, 2)) == 0
    rig.engine.finish(one)
    rig.engine.step()
    assert rig.engine.worker.failed() == set()
