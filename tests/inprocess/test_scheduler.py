from __future__ import annotations

import random

import pytest

from pdd_runtime.errors import EngineError
from pdd_runtime.inprocess.block_table import BlockTable
from pdd_runtime.inprocess.sampler import Sampler
from pdd_runtime.inprocess.scheduler import Planned, Scheduler
from pdd_runtime.inprocess.sequence import Sequence
from pdd_runtime.kv import BlockStore, KvLayout, seed
from pdd_runtime.plugins.engine import Sampling, Token

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=2, dtype="float32", block_size=4)
ROOT = seed("model", LAYOUT.spec)


class Bed:
    """A scheduler whose passes give a made-up token each."""

    def __init__(self, blocks: int = 1000, batch_limit: int = 4, token_budget: int = 32) -> None:
        self.store = BlockStore(LAYOUT, blocks)
        self.scheduler = Scheduler(self.store, batch_limit, token_budget)
        self.sequences = 0

    def add(self, prompt: int, output: int, *, hold: bool = False) -> Sequence:
        self.sequences += 1
        tokens = tuple(random.Random(self.sequences).choices(range(1000), k=prompt))
        table = BlockTable(self.store, ROOT)
        sampler = Sampler(Sampling(), tokens, prompt)
        sequence = Sequence(f"s{self.sequences}", tokens, prompt + output, sampler, table, hold=hold)
        self.scheduler.add(sequence)
        return sequence

    def finish(self, planned: Planned) -> None:
        self.scheduler.finish(planned, [Token(chunk.end, 7) if chunk.samples else None for _, chunk in planned])

    def step(self) -> dict[Sequence, int]:
        planned = self.scheduler.plan()
        self.finish(planned)
        return {sequence: len(chunk.tokens) for sequence, chunk in planned}


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    bed = Bed()
    decoding = [bed.add(3, 50) for _ in range(3)]
    bed.step()
    long = bed.add(1000, 1)
    for _ in range(10):
        assert bed.step() == dict.fromkeys(decoding, 1) | {long: 29}


def test_a_long_prompt_goes_on_while_short_ones_keep_coming() -> None:
    bed = Bed()
    long = bed.add(400, 1)
    while not long.over:
        bed.add(40, 1)
        assert bed.step()[long] >= min(16, 400 % 16 or 16)


def test_a_short_extend_does_not_wait_behind_a_long_prompt() -> None:
    bed = Bed()
    bed.add(1000, 1)
    bed.step()
    short = bed.add(16, 1)
    bed.step()
    assert short.over


def test_of_equal_prompts_the_older_ends_first() -> None:
    bed = Bed()
    old, young = bed.add(320, 1), bed.add(320, 1)
    for _ in range(10):
        bed.step()
    assert old.over
    assert not young.over


def test_a_pass_stays_within_batch_limit_and_budget() -> None:
    bed = Bed(batch_limit=3, token_budget=10)
    for i in range(12):
        bed.add(1 + 7 * i % 23, 5)
    for _ in range(200):
        counts = bed.step()
        assert len(counts) <= 3
        assert sum(counts.values()) <= 10
    assert not bed.scheduler.running
    assert not bed.scheduler.waiting
    assert bed.store.stats.used == 0


def test_without_blocks_the_youngest_waits_and_ends_nevertheless() -> None:
    bed = Bed(blocks=12)
    old, young = bed.add(15, 20), bed.add(14, 20)
    bed.step()
    assert len(bed.scheduler.running) == 2
    while not old.over:
        bed.step()
        assert old in bed.scheduler.running or old.over
    assert len(young.tokens) < young.end
    while not young.over:
        assert bed.step()
    assert bed.store.stats.used == 0


def test_blocks_that_others_hold_are_waited_for() -> None:
    bed = Bed(blocks=8)
    held = bed.store.allocate(5)
    waiting = bed.add(20, 1)
    for _ in range(3):
        while bed.step():
            pass
        assert not waiting.over
    bed.store.release(held)
    while bed.step():
        pass
    assert waiting.over
    assert bed.store.stats.used == 0


def test_a_sequence_removed_during_its_pass_is_freed_after_it() -> None:
    bed = Bed()
    sequence = bed.add(20, 5)
    planned = bed.scheduler.plan()
    bed.scheduler.remove(sequence)
    assert bed.store.stats.used == 5
    assert not sequence.freed.is_set()
    bed.finish(planned)
    assert bed.store.stats.used == 0
    assert sequence.freed.is_set()


def test_a_held_sequence_leaves_the_batch_and_keeps_its_blocks() -> None:
    bed = Bed(batch_limit=1)
    held, following = bed.add(10, 2, hold=True), bed.add(3, 1)
    while not following.over:
        bed.step()
    assert bed.store.stats.used == 3
    bed.scheduler.remove(held)
    assert bed.store.stats.used == 0


@pytest.mark.parametrize("seal_at", [5, 10, 11, 13])
def test_a_seal_during_a_pass_adds_no_token_past_it(seal_at: int) -> None:
    bed = Bed()
    sequence = bed.add(10, 50)
    bed.step()
    planned = bed.scheduler.plan()
    bed.scheduler.seal(sequence, seal_at)
    bed.finish(planned)
    while not sequence.over:
        bed.step()
    assert len(sequence.tokens) == max(11, seal_at)


def test_random_loads_end_with_every_block_given_back() -> None:
    for run in range(30):
        rng = random.Random(run)
        bed = Bed(blocks=rng.randint(16, 40), batch_limit=rng.randint(1, 5), token_budget=rng.randint(5, 40))
        alive = [bed.add(rng.randint(1, 40), rng.randint(0, 20), hold=rng.random() < 0.2) for _ in range(20)]
        for _ in range(2000):
            planned = bed.scheduler.plan()
            for sequence in [s for s in alive if rng.random() < 0.03 or (s.over and rng.random() < 0.3)]:
                alive.remove(sequence)
                bed.scheduler.remove(sequence)
            if alive and rng.random() < 0.1:
                bed.scheduler.seal(rng.choice(alive), rng.randint(1, 60))
            bed.finish(planned)
        assert not alive, "a sequence never ended"
        assert bed.store.stats.used == 0


def test_a_token_that_cannot_be_chosen_fails_its_own_sequence_only() -> None:
    bed = Bed()
    bad, good = bed.add(8, 5), bed.add(8, 5)
    planned = bed.scheduler.plan()
    bed.scheduler.finish(planned, [EngineError("no token fits"), Token(8, 7)])
    assert bad.over
    assert not good.over
    while not good.over:
        bed.step()
    assert bed.store.stats.used == 0
