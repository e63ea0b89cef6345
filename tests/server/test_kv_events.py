"""A reader over real sockets. What is sent to it has the form that vLLM 0.32 and SGLang 0.5.23 send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pdd_runtime.kv import CachedNames, KvLayout, chain, seed
from pdd_runtime.server.cached_pages import CachedPages
from pdd_runtime.server.kv_events import KvEvents
from tests.waiting import PATIENCE, until

from .publisher import Publisher

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float32", block_size=4)
TOKENS = list(range(100, 112))
"""Three blocks."""


def root(salt: str) -> bytes:
    return seed("model", LAYOUT.spec, salt=salt)


def blocks(salt: str = "", tokens: list[int] = TOKENS) -> list[bytes]:
    return [block.name for block in chain(root(salt), tokens, LAYOUT.block_size)]


def stored(first: int, last: int, **more: Any) -> dict[str, Any]:
    """Blocks of `TOKENS` from `first` on, before `last`, as vLLM says it."""
    event = {
        "type": "BlockStored",
        "block_hashes": [b"hash%d" % number for number in range(first, last)],
        "parent_block_hash": b"hash%d" % (first - 1) if first else None,
        "token_ids": TOKENS[first * 4 : last * 4],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * (last - first),
        "group_idx": 0,
    }
    return event | more


def removed(*numbers: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [b"hash%d" % number for number in numbers], "medium": "GPU"} | more


CLEARED = {"type": "AllBlocksCleared"}


@pytest.fixture
def names() -> CachedNames:
    return CachedNames(LAYOUT)


@asynccontextmanager
async def reading(publisher: Publisher, names: CachedNames) -> AsyncGenerator[None, None]:
    reader = KvEvents(publisher.endpoint, publisher.replay, CachedPages(names, root))
    task = asyncio.create_task(reader.run())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait({task})


@pytest_asyncio.fixture
async def publisher(tmp_path: Path) -> AsyncGenerator[Publisher, None]:
    async with Publisher(tmp_path) as publisher:
        yield publisher


@pytest_asyncio.fixture
async def heard(publisher: Publisher, names: CachedNames) -> AsyncGenerator[Publisher, None]:
    """A publisher whose reader gets all."""
    async with reading(publisher, names):
        async with asyncio.timeout(PATIENCE):
            await publisher.subscribed()
            # A reader begins with a replay, and would find there what is to be lost.
            await publisher.replayed()
        yield publisher


async def until_names(names: CachedNames, *expected: bytes) -> None:
    await until(lambda: set(names.names()) == set(expected))


async def test_pages_come_and_go_under_our_names(heard: Publisher, names: CachedNames) -> None:
    await heard.publish(stored(0, 2))
    await until_names(names, *blocks()[:2])
    await heard.publish(stored(2, 3), removed(0))
    await until_names(names, *blocks()[1:])
    assert names.cached(root(""), TOKENS) == 0, "a hole ends what can be found"
    await heard.publish(CLEARED)
    await until_names(names)


async def test_what_was_published_before_anybody_read_is_replayed(publisher: Publisher, names: CachedNames) -> None:
    await publisher.publish(stored(0, 2))
    await publisher.publish(removed(1))
    async with reading(publisher, names):
        await until_names(names, *blocks()[:1])


async def test_a_gap_is_replayed(heard: Publisher, names: CachedNames) -> None:
    await heard.publish(stored(0, 1))
    await heard.publish(stored(1, 2), lost=True)
    await heard.publish(stored(2, 3))
    await until_names(names, *blocks())
    assert heard.replays[-1] == 1


async def test_a_gap_that_cannot_be_replayed_leaves_only_what_is_known(heard: Publisher, names: CachedNames) -> None:
    await heard.publish(stored(0, 1))
    await heard.publish(removed(0), lost=True, kept=False)
    # Of its parent nobody knows whether it still is there.
    await heard.publish(stored(1, 2))
    await until_names(names)
    await heard.publish(CLEARED, stored(0, 2))
    await until_names(names, *blocks()[:2])


async def test_a_server_that_starts_again_begins_anew(tmp_path: Path, names: CachedNames) -> None:
    async with Publisher(tmp_path) as first, reading(first, names):
        async with asyncio.timeout(PATIENCE):
            await first.subscribed()
        await first.publish(stored(0, 1))
        await first.publish(stored(1, 3))
        await until_names(names, *blocks())
        await first.__aexit__(None, None, None)
        async with Publisher(tmp_path) as second:
            async with asyncio.timeout(PATIENCE):
                await second.subscribed()
            await second.publish(stored(0, 1))
            await until_names(names, *blocks()[:1])


async def test_tenants_are_told_apart_and_what_is_in_no_name_of_ours_is_left_out(
    heard: Publisher, names: CachedNames
) -> None:
    await heard.publish(
        stored(0, 1, extra_keys=[["acme"]]),
        stored(1, 2, extra_keys=[None]),
        stored(0, 1, block_hashes=["sglang"], cache_salt="zenith"),
        stored(0, 1, block_hashes=["adapter"], lora_name="adapter", extra_keys=[["adapter"]]),
        stored(0, 1, block_hashes=["picture"], extra_keys=[[["picture", 0]]]),
        stored(0, 1, block_hashes=["both"], extra_keys=[["acme", ["picture", 0]]]),
        stored(0, 1, block_hashes=["disk"], medium="STORAGE"),
        stored(0, 1, block_hashes=["window"], group_idx=1),
    )
    await until_names(names, *blocks("acme")[:2], blocks("zenith")[0])


async def test_a_page_that_leaves_another_medium_stays_where_it_is(heard: Publisher, names: CachedNames) -> None:
    await heard.publish(stored(0, 2))
    await heard.publish(removed(0, medium="CPU"), removed(0, group_idx=1), removed(1))
    await until_names(names, blocks()[0])


async def test_pages_of_one_token_make_blocks(heard: Publisher, names: CachedNames) -> None:
    """As SGLang says it, where its radix tree has no pages: hashes are numbers, an event a token."""
    events = [
        {
            "type": "BlockStored",
            "block_hashes": [-7 - number],
            "parent_block_hash": -6 - number if number else None,
            "token_ids": [token],
            "block_size": 1,
            "lora_id": None,
            "medium": "GPU",
        }
        for number, token in enumerate(TOKENS[:10])
    ]
    await heard.publish(*events)
    await until_names(names, *blocks()[:2])
    await heard.publish({"type": "BlockRemoved", "block_hashes": [-16, -15, -14], "medium": "GPU"})
    await until_names(names, blocks()[0])


@pytest.mark.parametrize(
    "payload", [b"\xc1", b"\x93\x00\x91\x05\x00", b"\x00", b"\x92\x00\x91\x81\xa4type\xabBlockStored"]
)
async def test_what_cannot_be_read_clears_what_was_known(heard: Publisher, names: CachedNames, payload: bytes) -> None:
    await heard.publish(stored(0, 2))
    await until_names(names, *blocks()[:2])
    await heard.raw(payload)
    await until_names(names)
    await heard.publish(stored(0, 1))
    await until_names(names, blocks()[0])


def test_pages_that_divide_no_block_are_left_out(names: CachedNames) -> None:
    pages = CachedPages(names, root)
    pages.stored(["a"], None, TOKENS[:3], 3)
    pages.stored(["b"], None, TOKENS[:8], 8)
    assert not len(names)


def test_tokens_that_do_not_fill_their_pages_are_refused(names: CachedNames) -> None:
    with pytest.raises(ValueError, match="7 tokens in 2 pages of 4"):
        CachedPages(names, root).stored(["a", "b"], None, TOKENS[:7], 4)
