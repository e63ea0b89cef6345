from __future__ import annotations

import pytest

from pdd_runtime.errors import CapacityError
from pdd_runtime.kv import BlockStore, KvLayout, chain, seed
from pdd_runtime.server.blocks import Blocks

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=1, dtype="float32", block_size=4)
ROOT = seed("model", LAYOUT.spec)


@pytest.fixture
def store() -> BlockStore:
    return BlockStore(LAYOUT, 8)


def publish(store: BlockStore, tokens: list[int]) -> None:
    blocks = Blocks(store, ROOT, tokens)
    blocks.open_for(len(tokens))
    for i, number in enumerate(blocks.numbers):
        store.memory(number)[:] = bytes([i + 1]) * LAYOUT.block_bytes
    blocks.commit_tail(len(tokens))
    blocks.release()


def test_blocks_are_committed_as_they_are_written_and_the_tail_at_the_end(store: BlockStore) -> None:
    tokens = list(range(10))
    blocks = Blocks(store, ROOT, tokens)
    blocks.open_for(10)
    assert (blocks.cached, blocks.first, len(blocks.numbers)) == (0, 0, 3)
    for written, found in [(3, 0), (4, 4), (9, 8), (10, 8)]:
        blocks.commit(written)
        assert (store.cached(ROOT, tokens), blocks.committed) == (found, found)
    blocks.commit_tail(10)
    assert (store.cached(ROOT, tokens), blocks.committed) == (10, 10)
    blocks.release()
    blocks.release()
    assert store.stats.used == 0


def test_a_partial_block_that_is_written_behind_is_a_copy(store: BlockStore) -> None:
    publish(store, [1, 2, 3, 4, 5, 6])
    tail = store.find(chain(ROOT, [1, 2, 3, 4, 5, 6], 4)[-1].name)
    assert tail is not None
    blocks = Blocks(store, ROOT, [1, 2, 3, 4, 5, 6, 7])
    blocks.open_for(8)
    assert (blocks.cached, blocks.first) == (6, 1)
    assert blocks.numbers[1] != tail
    assert bytes(store.memory(blocks.numbers[1])) == bytes(store.memory(tail))
    blocks.tokens.append(8)
    blocks.commit(8)
    assert store.cached(ROOT, [1, 2, 3, 4, 5, 6, 7, 8]) == 8
    assert store.cached(ROOT, [1, 2, 3, 4, 5, 6]) == 6
    blocks.release()
    assert store.stats.used == 0


def test_what_is_only_offered_stays_where_it_is(store: BlockStore) -> None:
    publish(store, [1, 2, 3, 4, 5, 6])
    before = store.stats
    blocks = Blocks(store, ROOT, [1, 2, 3, 4, 5, 6, 7])
    blocks.offer_only()
    assert (blocks.cached, blocks.first, len(blocks.numbers)) == (6, 2, 2)
    assert blocks.grow(20) == ()
    blocks.tokens += [8, 9]
    blocks.commit_tail(9)
    assert blocks.committed == 6
    blocks.release()
    assert store.stats == before


def test_only_what_is_known_gets_a_name(store: BlockStore) -> None:
    blocks = Blocks(store, ROOT, [1, 2])
    blocks.open_for(3)
    blocks.commit(4)
    assert blocks.committed == 0
    blocks.tokens += [3, 4]
    blocks.commit(4)
    assert blocks.committed == 4
    assert len(blocks.grow(9)) == 2
    blocks.tokens += [5, 6]
    blocks.commit_tail(5)
    assert store.cached(ROOT, [1, 2, 3, 4, 5]) == 5
    blocks.release()
    assert store.stats.used == 0


def test_a_full_store_ends_publishing_and_nothing_else(store: BlockStore) -> None:
    blocks = Blocks(store, ROOT, [1, 2])
    blocks.open_for(2)
    taken = store.allocate(7)
    assert blocks.grow(9) == ()
    assert not blocks.open
    with pytest.raises(CapacityError):
        Blocks(store, ROOT, [9] * 5).open_for(5)
    blocks.tokens += [3, 4, 5, 6, 7, 8]
    blocks.commit_tail(8)
    assert store.cached(ROOT, [1, 2, 3, 4, 5, 6, 7, 8]) == 4
    blocks.release()
    store.release(taken)
    assert store.stats.used == 0
