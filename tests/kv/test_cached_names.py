from __future__ import annotations

import random

from pdd_runtime.kv import CachedNames, KvLayout, chain, seed

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=4, dtype="float32", block_size=4)
ROOT = seed("model", LAYOUT.spec)
TOKENS = tuple(range(18))
NAMES = [block.name for block in chain(ROOT, TOKENS, 4)]


def test_leading_full_blocks_count_as_cached() -> None:
    names = CachedNames(LAYOUT)
    assert names.cached(ROOT, TOKENS) == 0
    for name in (NAMES[0], NAMES[1], NAMES[3]):
        names.add(name)
    assert names.cached(ROOT, TOKENS) == 8
    names.add(NAMES[2])
    names.add(NAMES[4])  # that of two tokens: no full block
    assert names.cached(ROOT, TOKENS) == 16
    assert names.cached(ROOT, TOKENS[:16]) == 16
    assert names.cached(ROOT, TOKENS[:15]) == 12
    assert names.cached(seed("model", LAYOUT.spec, salt="tenant"), TOKENS) == 0


def test_a_watcher_that_begins_with_all_names_knows_them_at_every_later_moment() -> None:
    dice, names = random.Random(1), CachedNames(LAYOUT)
    names.add(b"early")
    known = set(names.names())
    told = 0

    def tell(name: bytes, added: bool) -> None:
        nonlocal told
        told += 1
        assert (name in known) is not added, "told twice of one change"
        (known.add if added else known.remove)(name)

    stop = names.watch(tell)
    for _ in range(500):
        name = bytes([dice.randrange(8)])
        dice.choice([names.add, names.add, names.remove])(name)
        assert known == set(names.names())
        assert len(names) == len(known)
        assert (name in names) is (name in known)
        if dice.random() < 0.02:
            names.clear()
            assert known == set()
    stop()
    stop()
    before = told
    names.add(b"after")
    assert told == before
