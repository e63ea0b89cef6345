from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pdd_llamacpp.config import LlamaCppConfig
from pdd_llamacpp.runner import LlamaCppRunner
from pdd_llamacpp.state import Bytes

from pdd_runtime.errors import EngineError
from pdd_runtime.inprocess import Chunk
from pdd_runtime.kv import BlockStore
from pdd_runtime.plugins.engine import ModelSpec

TOKENS = tuple(random.Random(3).choices(range(256), k=400))


class Computer:
    """A model, its blocks, and sequences in them."""

    def __init__(self, source: Path, blocks: int = 64, **config: Any) -> None:
        self.runner = LlamaCppRunner(LlamaCppConfig(**config), ModelSpec(source=str(source)))
        self.store = BlockStore(self.runner.layout, blocks)
        self.runner.open(self.store.buffer())

    def blocks(self, tokens: int) -> tuple[int, ...]:
        return tuple(self.store.allocate(-(-tokens // self.store.layout.block_size)))

    def run(self, *parts: tuple[int, int, int, tuple[int, ...]]) -> list[Any]:
        """(sequence, start, end, blocks) of chunks of one step; returns the logits behind each."""
        return list(
            self.runner.step(
                [Chunk(number, TOKENS[start:end], start, blocks, True) for number, start, end, blocks in parts]
            )
        )

    def kv(self, blocks: tuple[int, ...], tokens: int) -> Bytes:
        """`[tokens, layers, 2, bytes]` of a sequence."""
        rows = self.runner._blocks[list(blocks)].transpose(0, 3, 1, 2, 4)
        return rows.reshape(-1, *rows.shape[2:])[:tokens]


Compute = Callable[..., Computer]


def same(mine: Any, theirs: Any) -> bool:
    """Logits, or KV as float16, but for the order in which llama.cpp adds up: that depends on where cells stand and on
    what else is in the batch."""
    if mine.dtype == np.uint8:
        mine, theirs = (rows.copy().view(np.float16).astype(np.float32) for rows in (mine, theirs))
    return bool(np.allclose(mine, theirs, atol=0.05))


@pytest.fixture
def compute(tiny: Path) -> Compute:
    return lambda **config: Computer(tiny, **config)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_the_layout_is_the_model_s(compute: Compute, dtype: str) -> None:
    layout = compute(kv_dtype=dtype, block_size=5).runner.layout
    assert (layout.layers, layout.kv_heads, layout.head_dim, layout.dtype) == (2, 2, 16, dtype)
    assert (layout.block_size, layout.rope, layout.axes) == (5, "interleaved", "lkthd")


def test_only_the_chunk_s_own_tokens_are_written(compute: Compute) -> None:
    computer = compute(block_size=4)
    blocks = computer.blocks(10)
    computer.runner._blocks[:] = 7
    computer.run((1, 0, 6, blocks))
    kv = computer.kv(blocks, 12)
    assert all((row != 7).any() for row in kv[:6])
    assert (kv[6:] == 7).all()
    untouched = np.delete(computer.runner._blocks, blocks, axis=0)
    assert (untouched == 7).all()


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_a_sequence_goes_on_from_its_blocks_alone(compute: Compute, dtype: str) -> None:
    """As when its KV came from elsewhere, after a preemption, or behind a cached prefix: same logits, same KV."""
    computer = compute(kv_dtype=dtype, block_size=7)
    blocks, other = computer.blocks(120), computer.blocks(120)
    computer.run((1, 0, 100, blocks))
    computer.runner._blocks[list(other)] = computer.runner._blocks[list(blocks)]
    (expected,) = computer.run((1, 100, 110, blocks))
    (elsewhere,) = computer.run((2, 100, 110, other))
    assert np.array_equal(elsewhere, expected)
    assert np.array_equal(computer.kv(other, 110), computer.kv(blocks, 110))
    computer.runner.forget([1, 2, 3])
    again = computer.blocks(120)
    computer.runner._blocks[list(again)] = computer.runner._blocks[list(blocks)]
    assert np.array_equal(computer.run((1, 100, 110, again))[0], expected)


def test_chunks_of_all_kinds_share_a_batch(compute: Compute) -> None:
    computer = compute()
    alone = [computer.blocks(130) for _ in range(3)]
    together = [computer.blocks(130) for _ in range(3)]
    begun = (100, 50, 0)
    for number, end in enumerate(begun):
        for blocks in (alone[number], together[number]):
            if end:
                computer.run((1000 + blocks[0], 0, end, blocks))
    ends = (101, 60, 30)
    expected = [computer.run((1000 + alone[i][0], begun[i], ends[i], alone[i]))[0] for i in range(3)]
    got = computer.run(*((1000 + together[i][0], begun[i], ends[i], together[i]) for i in range(3)))
    assert all(same(mine, theirs) for mine, theirs in zip(got, expected, strict=True))
    for mine, theirs, end in zip(together, alone, ends, strict=True):
        assert same(computer.kv(mine, end), computer.kv(theirs, end))


def test_only_who_samples_gets_logits(compute: Compute) -> None:
    computer = compute()
    first, second = computer.blocks(8), computer.blocks(8)
    rows = computer.runner.step(
        [Chunk(1, TOKENS[:8], 0, first, samples=False), Chunk(2, TOKENS[:8], 0, second, samples=True)]
    )
    assert rows[0] is None
    assert rows[1] is not None
    assert rows[1].shape == (computer.runner.vocab,)


def test_more_sequences_than_the_cells_hold_take_turns(compute: Compute) -> None:
    """300 tokens of each of four sequences do not fit into 320 cells: they are copied in and out, in one step and
    from step to step, and each computes what it computes alone."""
    roomy, tight = compute(blocks=120), compute(blocks=120, cells=320, context_length=320)
    for computer in (roomy, tight):
        computer.tables = [computer.blocks(320) for _ in range(4)]
    for end in (128, 256, 299, 300, 301):
        start = {128: 0, 256: 128, 299: 256, 300: 299, 301: 300}[end]
        parts = [[(number, start, end, table) for number, table in enumerate(c.tables)] for c in (roomy, tight)]
        expected = [roomy.run(part)[0] for part in parts[0]]
        got = tight.run(*parts[1]) if end > 299 else [tight.run(part)[0] for part in parts[1]]
        assert all(same(mine, theirs) for mine, theirs in zip(got, expected, strict=True))
        assert sum(held.tokens for held in tight.runner._held.values()) <= 320
    for mine, theirs in zip(tight.tables, roomy.tables, strict=True):
        assert same(tight.kv(mine, 301), roomy.kv(theirs, 301))


def test_cells_are_found_wherever_they_are_free(compute: Compute) -> None:
    """Sequences that come and go leave holes; what is computed and copied into them comes out in order."""
    computer, fresh = compute(blocks=200, cells=512, context_length=400), compute(blocks=40)
    rng = random.Random(1)
    expected_blocks = fresh.blocks(200)
    (expected,) = fresh.run((1, 0, 128, expected_blocks))
    for number in range(2, 40):
        computer.store.reset_cache()
        tables = [computer.blocks(200) for _ in range(3)]
        lengths = [rng.randrange(1, 60), rng.randrange(1, 60), 128]
        for at, (table, length) in enumerate(zip(tables, lengths, strict=True)):
            (logits,) = computer.run((number * 10 + at, 0, length, table))
        assert same(logits, expected)
        assert same(computer.kv(tables[2], 128), fresh.kv(expected_blocks, 128))
        computer.runner.forget([number * 10 + 1, (number - 1) * 10 + 2])
        for table in tables:
            computer.store.release(table)


@pytest.mark.parametrize(("call", "kind"), [("decode", EngineError), ("read", MemoryError), ("write", EngineError)])
def test_what_fails_leaves_nothing_of_its_sequences(
    compute: Compute, monkeypatch: pytest.MonkeyPatch, call: str, kind: type[Exception]
) -> None:
    computer = compute(cells=256, context_length=256)
    blocks = computer.blocks(240)
    computer.run((1, 0, 128, blocks))
    computer.run((1, 128, 230, blocks))
    (expected,) = computer.run((1, 230, 240, blocks))
    computer.runner.forget([1])

    def failing(*_: object) -> None:
        raise kind("as if llama.cpp had failed")

    monkeypatch.setattr(computer.runner._context, call, failing)
    with pytest.raises(kind, match="as if"):
        computer.run((1, 230, 240, blocks))
    monkeypatch.undo()
    assert computer.runner._held == {}
    assert same(computer.run((2, 230, 240, blocks))[0], expected)


def test_too_few_cells_for_one_sequence_are_refused(compute: Compute) -> None:
    with pytest.raises(EngineError, match="cells: 100 are too few"):
        compute(cells=100)
    compute(cells=100, context_length=100)
    compute(cells=100, blocks=6)


def test_a_file_that_is_no_whole_model_is_refused_with_llama_cpp_s_words(tiny: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-5000])
    with pytest.raises(EngineError, match=r"llama\.cpp cannot load the model") as caught:
        Computer(cut)
    assert "not within the file bounds" in caught.value.why
    with pytest.raises(EngineError, match="is a directory"):
        Computer(tmp_path)
