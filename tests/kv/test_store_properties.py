"""Random sequences of what engines and agents do with a store."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdd_runtime.errors import CapacityError
from pdd_runtime.kv import Block, BlockStore, KvLayout, chain, seed

SIZE, BLOCKS = 3, 12
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=4, dtype="float32", block_size=SIZE)
ROOTS = [seed("model", LAYOUT.spec, salt=salt) for salt in ("one", "other")]
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=10)


def content(name: bytes) -> bytes:
    return (name * LAYOUT.block_bytes)[: LAYOUT.block_bytes]


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = BlockStore(LAYOUT, BLOCKS)
        self.held: list[list[int]] = []
        """What each owner references."""
        self.committed: dict[bytes, Block] = {}
        self.numbers: dict[bytes, int] = {}
        self.named = {block.name: block for root in ROOTS for block in self.every_block(root)}
        self.store.watch(self.heard)

    @staticmethod
    def every_block(root: bytes) -> list[Block]:
        tokens = [[int(bit) for bit in f"{value:0{n}b}"] for n in range(1, 11) for value in range(2**n)]
        return list({block.name: block for some in tokens for block in chain(root, some, SIZE)}.values())

    def references(self) -> Counter[int]:
        return Counter(number for blocks in self.held for number in blocks)

    def heard(self, name: bytes, added: bool) -> None:
        if added:
            assert name not in self.committed
            self.committed[name] = self.named[name]
            number = self.store.find(name)
            assert number is not None
            self.numbers[name] = number
            return
        del self.committed[name]
        assert self.references()[self.numbers.pop(name)] == 0, "evicted while referenced"
        assert all(block.parent != name for block in self.committed.values()), "evicted before its child"

    def cached(self, root: bytes, tokens: list[int]) -> int:
        """How much of `tokens` is committed, worked out the plain way."""
        return max(
            (
                n
                for n in range(len(tokens) + 1)
                if all(block.name in self.committed for block in chain(root, tokens[:n], SIZE))
            ),
            default=0,
        )

    @rule(root=st.sampled_from(ROOTS), tokens=TOKENS)
    def run(self, root: bytes, tokens: list[int]) -> None:
        """An engine runs a sequence: it takes what is cached, makes the rest and commits it."""
        expected = self.cached(root, tokens)
        assert self.store.cached(root, tokens) == expected
        match = self.store.match(root, tokens)
        assert match.full + match.partial_tokens == expected
        named = chain(root, tokens[:expected], SIZE)
        found = match.blocks + ([] if match.partial is None else [match.partial])
        self.held.append(list(found))
        for block, number in zip(named, found, strict=True):
            assert bytes(self.store.memory(number)) == content(block.name), "a wrong block was matched"
        todo = chain(root, tokens, SIZE)[len(match.blocks) :]
        try:
            fresh = self.store.allocate(len(todo))
        except CapacityError:
            return
        self.held[-1] += fresh
        for block, number in zip(todo, fresh, strict=True):
            self.store.memory(number)[:] = content(block.name)
            under = self.store.commit(block, number)
            assert self.numbers[block.name] == under
            assert bytes(self.store.memory(under)) == content(block.name)

    @rule(n=st.integers(0, BLOCKS))
    def allocate(self, n: int) -> None:
        before, names = self.store.stats, set(self.committed)
        try:
            self.held.append(self.store.allocate(n))
        except CapacityError:
            assert self.store.stats == before
            assert set(self.committed) == names
            return
        for number in self.held[-1]:
            self.store.memory(number)[:] = b"\xff" * LAYOUT.block_bytes

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.store.release(data.draw(st.permutations(blocks)))

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """An agent pins one block by name, whoever else holds it."""
        number = self.store.find(data.draw(st.sampled_from(sorted(self.committed))))
        assert number is not None
        self.store.retain([number])
        self.held.append([number])

    @rule()
    def reset(self) -> None:
        self.store.reset_cache()

    @invariant()
    def blocks_add_up(self) -> None:
        stats = self.store.stats
        assert stats.used + stats.cached + stats.free == stats.total == BLOCKS
        assert stats.used >= len(self.references())
        assert set(self.store.names()) == set(self.committed)
        assert len(set(self.numbers.values())) == len(self.numbers)

    @invariant()
    def committed_blocks_keep_their_bytes_and_their_parents(self) -> None:
        for name, block in self.committed.items():
            assert bytes(self.store.memory(self.numbers[name])) == content(name)
            assert block.start == 0 or block.parent in self.committed

    def teardown(self) -> None:
        for blocks in self.held:
            self.store.release(blocks)
        self.held.clear()
        assert self.store.stats.used == 0
        self.store.reset_cache()
        assert self.store.stats.free == BLOCKS
        assert not self.committed


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(uses=st.lists(st.integers(0, 5), max_size=30), n=st.integers(1, 6))
def test_the_blocks_used_longest_ago_go_first(uses: list[int], n: int) -> None:
    store = BlockStore(LAYOUT, 6)
    named = [chain(ROOTS[0], [token] * SIZE, SIZE)[0] for token in range(6)]
    numbers = store.allocate(6)
    for block, number in zip(named, numbers, strict=True):
        store.commit(block, number)
    store.release(numbers)
    order = list(range(6))
    for use in uses:
        if use % 2:
            store.find(named[use].name)
        else:
            store.release(store.match(ROOTS[0], [use] * SIZE).blocks)
        order.append(order.pop(order.index(use)))
    gone: list[bytes] = []
    store.watch(lambda name, added: gone.append(name))
    store.allocate(n)
    assert gone == [named[token].name for token in order[:n]]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20))
def test_releasing_more_than_was_taken_is_always_an_error(extra: list[int]) -> None:
    store = BlockStore(LAYOUT, 4)
    blocks = store.allocate(4)
    store.release(blocks)
    with pytest.raises(ValueError, match="released more often"):
        store.release(extra)
    assert store.stats.free == 4
