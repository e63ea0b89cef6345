"""The cache of a simulated worker is that of a real one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from pdd_runtime.kv import BlockStore, KvLayout, chain, seed
from pdd_runtime.planner.session import Spans
from pdd_runtime.planner.simulate.cache import SimCache

BLOCK = 4
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=4, dtype="float32", block_size=BLOCK)
ROOT = seed("model", LAYOUT.spec)


def tokens(spans: Spans) -> list[int]:
    """Real ones: equal where chains are."""
    return [number * 1000 + place for number, length in spans for place in range(length)]


def ask(store: BlockStore, spans: Spans) -> int:
    """As an engine does it: reuse, compute the rest, let go. Returns what was cached."""
    asked = tokens(spans)
    match = store.match(ROOT, asked)
    blocks = chain(ROOT, asked, BLOCK)
    numbers = [*match.blocks, *store.allocate(len(blocks) - len(match.blocks))]
    if match.partial is not None:
        store.release([match.partial])
    for block, number in zip(blocks, numbers, strict=True):
        store.commit(block, number)
    store.release(numbers)
    return match.full + match.partial_tokens


def conversations(draw: random.Random, requests: int, unit: int) -> Iterator[Spans]:
    """Some that go on, some that part from others at any place, behind a shared beginning or not. All lengths are
    multiples of `unit`."""
    known: list[Spans] = []
    for number in range(requests):
        length = unit * draw.randrange(1, 40 // unit)
        if known and draw.random() < 0.7:
            before = draw.choice(known[-12:])
            depth = draw.randrange(len(before))
            last, there = before[depth]
            if draw.random() < 0.5:
                # Parts from it somewhere.
                spans: Spans = (*before[:depth], (last, unit * draw.randrange(1, there // unit + 1)), (number, length))
            else:
                spans = (*before, (number, length))
        else:
            spans = ((number, length),)
        if sum(length for _, length in spans) <= 120:
            known.append(spans)
            yield spans


@pytest.mark.parametrize("number", range(8))
def test_it_hits_and_evicts_as_the_block_store_of_a_worker_does(number: int) -> None:
    store, cache = BlockStore(LAYOUT, 100), SimCache(100 * BLOCK, BLOCK)
    hits = 0
    for spans in conversations(random.Random(number), 400, BLOCK):
        found = cache.hit(spans)
        cache.take(spans)
        assert ask(store, spans) == found
        assert cache.used == store.stats.cached * BLOCK
        hits += found
    assert hits > 2000
    assert cache.evicted > 1000


@pytest.mark.parametrize("number", range(4))
def test_where_sequences_end_and_part_inside_blocks_it_is_less_than_a_block_off(number: int) -> None:
    store, cache = BlockStore(LAYOUT, 20_000), SimCache(20_000 * BLOCK, BLOCK)
    for spans in conversations(random.Random(number), 400, 1):
        found = cache.hit(spans)
        cache.take(spans)
        assert abs(ask(store, spans) - found) < BLOCK


def test_who_goes_on_behind_an_end_finds_all_of_it() -> None:
    cache = SimCache(1000, 16)
    cache.take(((1, 100),))
    assert cache.used == 112
    assert cache.hit(((1, 100), (2, 5))) == cache.hit(((1, 120),)) == 100
    assert cache.hit(((1, 50), (2, 5))) == 48


def test_what_is_pinned_stays_until_it_is_released() -> None:
    cache = SimCache(320, 16)
    held = ((1, 100), (2, 50))
    cache.take(held, pinned=True)
    cache.take(((3, 320),))
    assert cache.hit(held) == 150
    assert cache.hit(((3, 320),)) == 320 - cache.pinned
    assert cache.used == 320
    cache.release(held)
    cache.take(((4, 320),))
    assert cache.hit(held) == cache.pinned == 0
    with pytest.raises(KeyError):
        cache.release(held)


def test_what_many_hold_is_pinned_once() -> None:
    cache = SimCache(1000, 16)
    cache.take(((1, 320), (2, 32)), pinned=True)
    cache.take(((1, 320), (3, 32)), pinned=True)
    cache.take(((1, 160),), pinned=True)
    assert cache.pinned == cache.used == 384
    cache.release(((1, 320), (2, 32)))
    assert cache.pinned == 352
    cache.release(((1, 320), (3, 32)))
    assert cache.pinned == 160


def test_a_beginning_that_others_follow_is_evicted_last() -> None:
    cache = SimCache(160, 16)
    cache.take(((1, 80), (2, 32)))
    cache.take(((3, 64),))
    assert [cache.hit(((1, 80), (2, 32))), cache.hit(((3, 64),))] == [96, 64]
    cache.take(((1, 32),))
    cache.take(((4, 80),))
    assert cache.hit(((1, 80),)) == 32
    assert cache.hit(((3, 64),)) == 48


def test_all_is_lost_with_its_worker() -> None:
    cache = SimCache(160, 16)
    cache.take(((1, 80),), pinned=True)
    cache.clear()
    assert (cache.hit(((1, 80),)), cache.used, cache.pinned) == (0, 0, 0)


def test_a_cache_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="no such cache"):
        SimCache(100, 0)
