"""What nobody will ask for again takes room in a cache, and goes when it is oldest."""

from __future__ import annotations

import random

from pdd_runtime.planner.simulate.cache import PIECES, SimCache


def test_it_goes_in_its_turn() -> None:
    cache = SimCache(capacity=1000, block=10)
    cache.take(((1, 100),))
    cache.fill(495)
    cache.take(((2, 100),))
    cache.fill(400)
    assert (cache.used, cache.hit(((1, 100),)), cache.hit(((2, 100),))) == (1000, 0, 100)
    cache.fill(450)
    assert (cache.used, cache.hit(((2, 100),))) == (1000, 100)
    cache.fill(100)
    assert (cache.used, cache.hit(((2, 100),))) == (1000, 50)


def test_it_takes_as_much_from_others_as_named_content_would() -> None:
    """Up to the pieces in which it is kept."""
    rng = random.Random(3)
    caches = [SimCache(capacity=20_000, block=10) for _ in range(2)]
    hits = [0, 0]
    for number in range(4000):
        asked, fresh = ((rng.randrange(30), 300),), rng.randrange(1, 200)
        for place, cache in enumerate(caches):
            hits[place] += cache.hit(asked)
            cache.take(asked)
        caches[0].fill(fresh)
        caches[1].take(((1000 + number, fresh),))
    assert abs(hits[0] - hits[1]) < 0.02 * hits[1]
    assert all(cache.used <= 20_000 for cache in caches)


def test_it_is_kept_in_few_pieces() -> None:
    cache = SimCache(capacity=100_000, block=10)
    for _ in range(50_000):
        cache.fill(10)
    assert cache.used == 100_000
    assert len(cache._filled) <= PIECES + 2


def test_a_dead_worker_has_none() -> None:
    cache = SimCache(capacity=1000, block=10)
    cache.fill(500)
    cache.clear()
    cache.fill(900)
    cache.take(((1, 100),))
    assert (cache.used, cache.hit(((1, 100),))) == (1000, 100)
