"""Promises of the block store, by example. `test_store_properties` holds them for random sequences of calls."""

from __future__ import annotations

import pytest

from pdd_runtime.errors import CapacityError
from pdd_runtime.kv import BlockStore, KvLayout, Match, Stats, chain, seed

SIZE = 4
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=4, dtype="float32", block_size=SIZE)
ROOT = seed("model", LAYOUT.spec)


def put(store: BlockStore, tokens: list[int], root: bytes = ROOT) -> list[int]:
    """Commit the blocks of `tokens` and keep them referenced."""
    named = chain(root, tokens, SIZE)
    blocks = store.allocate(len(named))
    for block, number in zip(named, blocks, strict=True):
        store.commit(block, number)
    return blocks


def test_what_is_committed_is_found() -> None:
    store = BlockStore(LAYOUT, 8)
    blocks = put(store, list(range(10)))
    assert [store.find(block.name) for block in chain(ROOT, range(10), SIZE)] == blocks
    assert store.find(b"another name ...") is None
    assert list(store.names()) == [block.name for block in chain(ROOT, range(10), SIZE)]


def test_a_released_block_is_cached_when_committed_and_free_when_not() -> None:
    store = BlockStore(LAYOUT, 8)
    put_blocks = put(store, [1, 2, 3, 4])
    loose = store.allocate(2)
    assert store.stats == Stats(used=3, cached=0, free=5, total=8)
    store.release(put_blocks)
    store.release(loose)
    assert store.stats == Stats(used=0, cached=1, free=7, total=8)


def test_a_match_is_the_longest_prefix_and_holds_its_blocks() -> None:
    store = BlockStore(LAYOUT, 8)
    blocks = put(store, list(range(12)))
    store.release(blocks)
    match = store.match(ROOT, [*range(9), 99, 99, 99])
    assert match == Match(blocks[:2], 8, None, 0)
    assert store.stats.used == 2
    store.release(match.blocks)
    assert store.match(ROOT, [7, 7, 7, 7]) == Match([], 0, None, 0)


def test_the_longest_partial_tail_is_matched() -> None:
    store = BlockStore(LAYOUT, 16)
    tails = {n: put(store, list(range(4 + n)))[-1] for n in (1, 3)}
    for follows, tokens in (([4], 1), ([4, 5], 1), ([4, 5, 6], 3), ([4, 5, 6, 7], 3), ([4, 99], 1), ([99], 0), ([], 0)):
        match = store.match(ROOT, [0, 1, 2, 3, *follows])
        assert (match.full, match.partial_tokens, match.partial) == (4, tokens, tails.get(tokens))
        assert store.cached(ROOT, [0, 1, 2, 3, *follows]) == 4 + tokens


def test_a_full_block_is_never_matched_in_part() -> None:
    store = BlockStore(LAYOUT, 8)
    put(store, list(range(8)))
    assert store.match(ROOT, range(7))[1:] == (4, None, 0)


def test_two_salts_share_nothing() -> None:
    store = BlockStore(LAYOUT, 8)
    put(store, list(range(8)), seed("model", LAYOUT.spec, salt="one"))
    assert store.cached(seed("model", LAYOUT.spec, salt="other"), list(range(8))) == 0


def test_eviction_takes_the_oldest_leaf_first_and_never_a_parent_before_its_child() -> None:
    store = BlockStore(LAYOUT, 4)
    old, new = put(store, list(range(8))), put(store, list(range(100, 108)))
    store.release(old)
    store.release(new)
    names = [block.name for tokens in (range(8), range(100, 108)) for block in chain(ROOT, tokens, SIZE)]
    gone: list[bytes] = []
    store.watch(lambda name, added: gone.append(name))
    store.allocate(1)
    assert gone == [names[1]]
    store.find(names[0])
    store.allocate(3)
    assert gone == [names[1], names[3], names[2], names[0]]


def test_what_is_referenced_or_before_something_referenced_stays() -> None:
    store = BlockStore(LAYOUT, 4)
    blocks = put(store, list(range(12)))
    store.release([blocks[0], blocks[2]])
    with pytest.raises(CapacityError, match="no room for 3 blocks"):
        store.allocate(3)
    assert store.cached(ROOT, range(12)) == 12, "a refused allocation must evict nothing"
    store.allocate(2)
    assert store.cached(ROOT, range(12)) == 8
    store.reset_cache()
    assert store.cached(ROOT, range(12)) == 8


def test_an_allocation_without_room_takes_nothing() -> None:
    store = BlockStore(LAYOUT, 4)
    put(store, [1, 2, 3, 4])
    before = store.stats
    with pytest.raises(CapacityError, match="of 4 blocks 1 are in use, 0 cached and 3 free"):
        store.allocate(4)
    assert store.stats == before


def test_a_second_block_of_a_name_stays_its_owners_and_keeps_the_first() -> None:
    store = BlockStore(LAYOUT, 4)
    first, second = put(store, [1, 2, 3, 4]), put(store, [1, 2, 3, 4])
    name = chain(ROOT, [1, 2, 3, 4], SIZE)[0].name
    assert store.find(name) == first[0] != second[0]
    store.release(first)
    with pytest.raises(CapacityError):
        store.allocate(3)
    behind = chain(ROOT, [1, 2, 3, 4, 5], SIZE)[1]
    (tail,) = store.allocate(1)
    assert store.commit(behind, tail) == tail, "whoever holds a chain can commit behind it"
    store.release([*second, tail])
    assert store.stats == Stats(used=0, cached=2, free=2, total=4)


def test_a_second_partial_block_may_grow_and_get_its_next_name() -> None:
    store = BlockStore(LAYOUT, 4)
    first, second = put(store, [1, 2]), put(store, [1, 2])
    full = chain(ROOT, [1, 2, 3, 4], SIZE)[0]
    assert store.commit(full, second[0]) == second[0]
    store.release(first + second)
    assert store.stats == Stats(used=0, cached=2, free=2, total=4)
    store.allocate(4)
    assert store.stats.used == 4


def test_wrong_commits_are_refused() -> None:
    store = BlockStore(LAYOUT, 4)
    first, behind = chain(ROOT, range(8), SIZE)
    (number,) = store.allocate(1)
    with pytest.raises(ValueError, match="before the block it follows"):
        store.commit(behind, number)
    with pytest.raises(ValueError, match="no block of 4"):
        store.commit(first._replace(tokens=5), number)
    with pytest.raises(ValueError, match="without a reference"):
        store.commit(first, (number + 1) % 4)
    assert store.commit(first, number) == store.commit(first, number) == number
    with pytest.raises(ValueError, match="has a name already"):
        store.commit(first._replace(name=b"x" * 16), number)


def test_a_free_block_cannot_be_retained() -> None:
    store = BlockStore(LAYOUT, 4)
    (number,) = store.allocate(1)
    store.release([number])
    with pytest.raises(ValueError, match="is free"):
        store.retain([number])


def test_watchers_hear_of_commits_and_evictions_until_they_leave() -> None:
    store = BlockStore(LAYOUT, 4)
    heard: list[tuple[bytes, bool]] = []
    leave = store.watch(lambda name, added: heard.append((name, added)))
    name = chain(ROOT, [1, 2, 3, 4], SIZE)[0].name
    store.release(put(store, [1, 2, 3, 4]))
    put(store, [1, 2, 3, 4])
    assert heard == [(name, True)]
    store.release(put(store, [5, 6, 7, 8]))
    store.reset_cache()
    assert [added for _, added in heard] == [True, True, False]
    leave()
    leave()
    put(store, [9])
    assert len(heard) == 3


def test_a_watcher_may_use_the_store() -> None:
    store = BlockStore(LAYOUT, 4)

    def hold(name: bytes, added: bool) -> None:
        number = store.find(name)
        if number is not None:
            store.retain([number])

    store.watch(hold)
    store.release(put(store, [1, 2, 3, 4]))
    assert store.stats.used == 1
