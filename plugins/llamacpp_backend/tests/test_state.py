from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdd_llamacpp.state import Bytes, StateFormat

from pdd_runtime.errors import EngineError

LAYERS, ROW = 3, 10
FORM = StateFormat(LAYERS, 1, ROW)


def memory(blocks: int, size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (blocks, LAYERS, 2, size, ROW), np.uint8)


def token(blocks: Bytes, numbers: list[int], at: int) -> Bytes:
    """`[layers, 2, row]` of one token."""
    size = blocks.shape[3]
    return blocks[numbers[at // size], :, :, at % size]


@given(size=st.integers(1, 20), start=st.integers(0, 60), count=st.integers(1, 60), shuffled=st.booleans())
def test_what_is_packed_and_unpacked_lies_where_it_lay_and_nothing_else_is_touched(
    size: int, start: int, count: int, shuffled: bool
) -> None:
    end = start + count
    needed = -(-end // size)
    source, target = memory(needed + 2, size), memory(needed + 2, size, seed=1)
    rng = np.random.default_rng(2)
    here, there = (rng.permutation(needed + 2)[:needed].tolist() for _ in range(2))
    state = FORM.pack(source, here, start, end)
    if shuffled:
        state = shuffle(state, count, rng)
    before = target.copy()
    FORM.unpack(state, target, there, start, end)
    for at in range(start, end):
        assert np.array_equal(token(target, there, at), token(source, here, at))
        token(before, there, at)[:] = token(target, there, at)
    assert np.array_equal(target, before)


def shuffle(state: Bytes, cells: int, rng: np.random.Generator) -> Bytes:
    """The same state with its cells in another order."""
    order = rng.permutation(cells)
    state = state.copy()
    table = state[16 : 16 + 12 * cells].reshape(cells, 12)
    table[:] = table[order]
    rows = state[16 + 12 * cells + 16 :].reshape(2 * LAYERS, -1)[:, 12:].reshape(2 * LAYERS, cells, ROW)
    rows[:] = rows[:, order]
    return state


def test_the_form_is_read_from_a_state_of_one_token() -> None:
    assert StateFormat.of(FORM.pack(memory(1, 4), [0], 0, 1)) == FORM


@pytest.mark.parametrize(
    ("at", "what"),
    [
        (0, "instead of"),  # the magic number
        (8, "instead of"),  # streams
        (12, "instead of"),  # cells
        (16, "positions"),
        (16 + 24, "instead of"),  # V transposed
        (16 + 24 + 4, "instead of"),  # layers
        (16 + 24 + 16, "not alike"),  # type of the first K
        (16 + 24 + 16 + 12 + 2 * ROW + 4, "not alike"),  # row of the second K
    ],
)
def test_a_state_of_another_form_is_refused(at: int, what: str) -> None:
    state = FORM.pack(memory(1, 4), [0], 0, 2)
    state[at] ^= 1
    target = memory(1, 4, seed=1)
    before = target.copy()
    with pytest.raises(EngineError) as caught:
        FORM.unpack(state, target, [0], 0, 2)
    assert what in caught.value.why
    assert np.array_equal(target, before)


def test_a_state_that_is_cut_is_refused() -> None:
    state = FORM.pack(memory(1, 4), [0], 0, 2)
    with pytest.raises(EngineError, match="cannot be read"):
        FORM.unpack(state[:-1], memory(1, 4), [0], 0, 2)
