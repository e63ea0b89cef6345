"""Worker and connector over a real socket and real shared memory: both of its ends are ours, in one process here."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
from pdd_connector import AgentClient, Refused, page_key, page_keys
from pdd_connector import Geometry as Theirs

from pdd_runtime.errors import EngineError
from pdd_runtime.kv import BlockStore, KvLayout
from pdd_runtime.server.bridge import Bridge
from pdd_runtime.server.connection import Announced, Geometry, Notice
from tests.waiting import PATIENCE, until

LAYOUT = KvLayout(layers=2, kv_heads=4, head_dim=8, dtype="float32", block_size=4, tp_size=2)
GEOMETRY = Geometry(2, 4, 8, "float32", 4)
THEIRS = Theirs(2, 4, 8, "float32", 4, capacity=100)


@pytest.fixture
def store() -> BlockStore:
    return BlockStore(LAYOUT, 8, shared=True)


@pytest_asyncio.fixture
async def bridge(store: BlockStore, tmp_path: Path) -> AsyncGenerator[Bridge, None]:
    bridge = Bridge(store, tmp_path / "s", expects=GEOMETRY, ranks=2)
    await bridge.start()
    yield bridge
    await bridge.close()


async def dial(bridge: Bridge, rank: int = 0, theirs: Theirs = THEIRS, page: int | None = None) -> AgentClient:
    def connect() -> AgentClient:
        return AgentClient(
            str(bridge.path), engine="toy 1", role="worker", rank=rank, ranks=2, geometry=theirs, page=page
        )

    return await asyncio.to_thread(connect)


@pytest_asyncio.fixture
async def ranks(bridge: Bridge) -> AsyncGenerator[list[AgentClient], None]:
    clients = [await dial(bridge, 0), await dial(bridge, 1, page=2)]
    async with asyncio.timeout(PATIENCE):
        await bridge.ready()
    yield clients
    for client in clients:
        await asyncio.to_thread(client.close)


def transfer(id: str = "t-1", offered: int = 4, first: int = 1, blocks: tuple[int, ...] = (3, 5)) -> Announced:
    return Announced(id, (7, 8, 9, 10, 11), offered, first, blocks)


async def test_each_rank_writes_its_shard_of_the_workers_blocks(
    bridge: Bridge, store: BlockStore, ranks: list[AgentClient]
) -> None:
    notices: list[Notice] = []
    async with bridge.announce(transfer(), notices.append):
        for rank, client in enumerate(ranks):
            with client.using("t-1") as seen:
                assert seen is not None
                assert (seen.tokens, seen.offered, seen.first, seen.blocks) == (5, 4, 1, (3, 5))
                assert client.shard(3).shape == (2, 2, 4, 2, 8)
                client.shard(3)[:] = 0x100 + rank
            client.written("t-1", 5 - rank)
        await until(lambda: bool(notices))
    elements = LAYOUT.elements(store.memory(3))
    assert (elements[:, :, :, 0] == 0x100).all()
    assert (elements[:, :, :, 1] == 0x101).all()
    assert notices == [Notice("written", 4)]
    assert ranks[0].request("t-1") is None


async def test_a_request_is_found_by_its_tokens_where_they_were_asked_for(
    bridge: Bridge, ranks: list[AgentClient]
) -> None:
    async with bridge.announce(transfer(), lambda notice: None):
        key = page_key(b"", (7, 8, 9, 10, 11))
        assert ranks[0].by_key(key) is None
        found = ranks[1].by_key(key)
        assert found is not None
        assert found.keys == page_keys((7, 8, 9, 10), 2)
        bridge.add("t-1", (6,), (12, 13, 14))
        await until(lambda: (now := ranks[1].request("t-1")) is not None and now.blocks == (3, 5, 6))
        grown = ranks[1].request("t-1")
        assert grown is not None
        assert grown.keys == page_keys((7, 8, 9, 10, 11, 12, 13, 14), 2)
        assert grown.key == key
    assert ranks[1].by_key(key) is None


async def test_blocks_are_not_given_back_while_a_connector_copies(bridge: Bridge, ranks: list[AgentClient]) -> None:
    copying, over = threading.Event(), threading.Event()

    def copy() -> None:
        with ranks[0].using("t-1"):
            copying.set()
            over.wait(PATIENCE)

    thread = threading.Thread(target=copy)

    async def session() -> None:
        async with bridge.announce(transfer(), lambda notice: None):
            thread.start()
            await asyncio.to_thread(copying.wait)

    task = asyncio.create_task(session())
    await until(lambda: ranks[1].request("t-1") is None and copying.is_set())
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    with ranks[0].using("t-1") as late:
        assert late is None
    over.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    thread.join()


async def test_planned_loaded_and_finished_are_told(bridge: Bridge, ranks: list[AgentClient]) -> None:
    notices: list[Notice] = []
    scheduler = await asyncio.to_thread(
        lambda: AgentClient(str(bridge.path), engine="toy 1", role="scheduler", ranks=2)
    )
    async with bridge.announce(transfer(), notices.append):
        scheduler.planned("t-1", 2, 3)
        await until(lambda: len(notices) == 1)
        for client in ranks:
            client.loaded("t-1", 3)
            client.finished("t-1", 5)
        await until(lambda: len(notices) == 3)
    assert notices == [Notice("planned", 3, 2), Notice("loaded", 3), Notice("finished", 5)]
    await asyncio.to_thread(scheduler.close)


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (Theirs(3, 4, 8, "float32", 4), "layers: the engine has 3"),
        (Theirs(2, 4, 8, "bfloat16", 4), "dtype: the engine has bfloat16"),
        (Theirs(2, 4, 8, "float32", 16), "block_size: the engine has 16"),
    ],
)
async def test_another_geometry_is_refused_on_both_sides(bridge: Bridge, theirs: Theirs, why: str) -> None:
    with pytest.raises(Refused, match=why):
        await dial(bridge, theirs=theirs)
    with pytest.raises(EngineError, match=why):
        await bridge.ready()


async def test_pages_of_any_size_fit(bridge: Bridge) -> None:
    client = await dial(bridge, theirs=Theirs(2, 4, 8, "float32"))
    assert client.block_size == 4
    await asyncio.to_thread(client.close)


async def test_a_connector_outlives_its_worker_and_finds_the_next(
    bridge: Bridge, store: BlockStore, ranks: list[AgentClient]
) -> None:
    async with bridge.announce(transfer(), lambda notice: None):
        await bridge.close()
        await until(lambda: ranks[0].closed and ranks[1].closed)
        assert ranks[0].request("t-1") is None
        ranks[0].written("t-1", 3)
    other = BlockStore(LAYOUT, 8, shared=True)
    following = Bridge(other, bridge.path, expects=GEOMETRY, ranks=2)
    await following.start()
    async with asyncio.timeout(PATIENCE):
        await following.ready()
    async with following.announce(transfer("t-2"), lambda notice: None):
        with ranks[0].using("t-2") as seen:
            assert seen is not None
            ranks[0].shard(3)[:] = 5
    assert (LAYOUT.elements(other.memory(3))[:, :, :, 0] == 5).all()
    assert not LAYOUT.elements(store.memory(3)).any()
    await following.close()


@pytest.mark.parametrize("sent", [b"\xff\xff\xff\xff", b"\x02\0\0\0{}", b"\x03\0\0\0nop", b"\x05\0\0\0"])
async def test_what_is_no_greeting_ends_its_connection_alone(
    bridge: Bridge, ranks: list[AgentClient], sent: bytes
) -> None:
    stranger = socket.socket(socket.AF_UNIX)
    stranger.settimeout(PATIENCE)
    await asyncio.to_thread(stranger.connect, str(bridge.path))
    stranger.sendall(sent)
    stranger.shutdown(socket.SHUT_WR)
    assert await asyncio.to_thread(stranger.recv, 1) == b""
    stranger.close()
    async with bridge.announce(transfer(), lambda notice: None):
        assert ranks[0].request("t-1") is not None


async def test_nobody_else_may_open_the_socket(bridge: Bridge) -> None:
    assert bridge.path.stat().st_mode & 0o077 == 0
