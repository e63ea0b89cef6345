from __future__ import annotations

import pytest

from pdd_runtime.errors import CapacityError
from pdd_runtime.inprocess.block_table import BlockTable
from pdd_runtime.kv import BlockStore, KvLayout, chain, seed

LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=4, dtype="float32", block_size=4)
ROOT = seed("model", LAYOUT.spec)
TOKENS = tuple(range(100, 120))


@pytest.fixture
def store() -> BlockStore:
    return BlockStore(LAYOUT, 12)


def fill(store: BlockStore, table: BlockTable, byte: int) -> None:
    for block in table.blocks:
        store.memory(block)[:] = bytes([byte]) * LAYOUT.block_bytes


def make(store: BlockStore, tokens: tuple[int, ...], byte: int = 1) -> BlockTable:
    """A sequence all of whose KV is computed and published, tail included."""
    table = BlockTable(store, ROOT)
    table.attach(tokens, len(tokens))
    table.reserve(len(tokens))
    fill(store, table, byte)
    table.advance(tokens, len(tokens))
    table.publish_tail(tokens)
    return table


def test_full_blocks_are_published_as_they_are_computed_and_the_tail_at_the_end(store: BlockStore) -> None:
    table = BlockTable(store, ROOT)
    table.reserve(10)
    assert len(table.blocks) == 3
    table.advance(TOKENS[:10], 6)
    assert store.cached(ROOT, TOKENS) == 4
    table.advance(TOKENS[:10], 10)
    assert (store.cached(ROOT, TOKENS), table.full_tokens) == (8, 8)
    table.publish_tail(TOKENS[:10])
    assert store.cached(ROOT, TOKENS) == 10
    table.release()
    table.release()
    assert store.stats.used == 0


def test_nothing_stands_behind_a_published_tail(store: BlockStore) -> None:
    make(store, TOKENS[:6], byte=255)
    tail = store.find(chain(ROOT, TOKENS[:6], 4)[-1].name)
    assert tail is not None
    rows = bytes(store.memory(tail))
    width = LAYOUT.block_bytes // 4 // 4
    assert all(rows[i * 4 * width :][: 4 * width] == b"\xff" * 2 * width + b"\0" * 2 * width for i in range(4))


def test_a_tail_to_be_written_behind_is_copied(store: BlockStore) -> None:
    first = make(store, TOKENS[:6])
    other = BlockTable(store, ROOT)
    other.attach(TOKENS, len(TOKENS) - 1)
    assert other.computed == 6
    assert other.blocks[0] == first.blocks[0]
    assert other.blocks[1] != first.blocks[1]
    half = len(store.memory(other.blocks[1])) // 4 // 2
    assert bytes(store.memory(other.blocks[1]))[:half] == bytes(store.memory(first.blocks[1]))[:half]


def test_what_is_wholly_cached_is_shared_where_nothing_is_to_be_computed(store: BlockStore) -> None:
    first = make(store, TOKENS[:6])
    again = BlockTable(store, ROOT)
    again.attach(TOKENS[:6], 6)
    assert (again.computed, again.blocks) == (6, first.blocks)
    again.publish_tail(TOKENS[:6])
    first.release()
    again.release()
    assert store.stats.used == 0


@pytest.mark.parametrize("length", [4, 5, 8, 10])
def test_the_last_token_is_left_to_compute_in_a_block_of_its_own(store: BlockStore, length: int) -> None:
    first = make(store, TOKENS[:length])
    again = BlockTable(store, ROOT)
    again.attach(TOKENS[:length], length - 1)
    assert again.computed == length - 1
    again.reserve(length)
    assert not set(again.blocks[(length - 1) // 4 :]) & set(first.blocks)


def test_of_two_equal_blocks_one_is_kept(store: BlockStore) -> None:
    tables = [BlockTable(store, ROOT) for _ in range(2)]
    for table in tables:
        table.reserve(8)
    for table in tables:
        table.advance(TOKENS[:8], 8)
    assert tables[0].blocks == tables[1].blocks
    assert store.stats.used == 2


def test_no_room_for_the_copy_means_a_shorter_prefix(store: BlockStore) -> None:
    make(store, TOKENS[:6]).release()
    rest = store.allocate(10)
    table = BlockTable(store, ROOT)
    table.attach(TOKENS, len(TOKENS) - 1)
    assert (table.computed, len(table.blocks)) == (4, 1)
    with pytest.raises(CapacityError):
        table.reserve(20)
    assert len(table.blocks) == 1
    table.release()
    store.release(rest)
    assert store.stats.used == 0
