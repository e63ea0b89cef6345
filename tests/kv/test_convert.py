"""Promises of the conversion between layouts, against where `KvLayout` says that each element lies."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pdd_runtime.errors import LayoutError
from pdd_runtime.kv import Conversion, KvLayout, Run, convert, obstacle
from pdd_runtime.kv.cast import cast
from pdd_runtime.kv.layout import DTYPE_BYTES

HEADS, DIM = 4, 6
BASE = KvLayout(layers=2, kv_heads=HEADS, head_dim=DIM, dtype="float32", block_size=4)
LAYOUTS = tuple(
    msgspec.structs.replace(BASE, **changed)
    for changed in (
        {},
        {"block_size": 16},
        {"block_size": 1},
        {"block_size": 6, "dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"dtype": "float16", "tp_size": 2},
        {"axes": "lkhtd"},
        {"axes": "kldht", "block_size": 3},
        {"tp_size": 2, "rope": "interleaved"},
        {"tp_size": 4, "axes": "lthkd", "block_size": 8},
        {"rope": "interleaved", "dtype": "bfloat16", "block_size": 5},
        {"rope": "interleaved", "axes": "tlkhd", "tp_size": 4, "block_size": 32, "dtype": "float16"},
    )
)
PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))


def place(layout: KvLayout, layer: int, kv: int, token: int, head: int, element: int) -> int:
    """The byte at which an element begins, `element` counted as with `rope: half`, and K's RoPE pairs with it."""
    if layout.rope == "interleaved" and kv == 0:
        first = element < layout.head_dim // 2
        element = 2 * element if first else 2 * (element - layout.head_dim // 2) + 1
    width = layout.kv_heads // layout.tp_size
    at = {"l": layer, "k": kv, "t": token, "h": head % width, "d": element}
    sizes = {"l": layout.layers, "k": 2, "t": layout.block_size, "h": width, "d": layout.head_dim}
    offset = head // width
    for axis in layout.axes:
        offset = offset * sizes[axis] + at[axis]
    return offset * DTYPE_BYTES[layout.dtype]


Values = NDArray[np.float32]
"""`[tokens, layers, 2, heads, head_dim]`, as with `rope: half`."""


def values(tokens: int, seed: int = 0) -> Values:
    """Numbers that every dtype holds exactly."""
    dice = np.random.default_rng(seed)
    return (dice.integers(-255, 256, (tokens, BASE.layers, 2, HEADS, DIM)) / 16).astype(np.float32)


def written(layout: KvLayout, content: Values) -> list[memoryview]:
    """The blocks of a run, one element after another."""
    size = DTYPE_BYTES[layout.dtype]
    bits = np.empty(content.shape, f"<u{size}")
    cast(content.view(np.uint32), "float32", bits, layout.dtype)
    blocks = [memoryview(bytearray(layout.block_bytes)) for _ in range(0, len(content), layout.block_size)]
    for (token, *where), element in np.ndenumerate(bits):
        block, at = divmod(token, layout.block_size)
        offset = place(layout, where[0], where[1], at, where[2], where[3])
        blocks[block][offset : offset + size] = element.tobytes()
    return blocks


def converted(
    source: KvLayout,
    target: KvLayout,
    blocks: Sequence[memoryview],
    end: int,
    *,
    start: int = 0,
    order: Sequence[int] | None = None,
) -> list[memoryview]:
    """Tokens `start` to `end`; `order`: in which the source's blocks come, by default the one of the sequence."""
    count = -(-(end - start) // target.block_size)
    out = [memoryview(bytearray(b"\xa5" * target.block_bytes)) for _ in range(count)]
    run = Run(Conversion(source, target), start, end)
    needed = range(start // source.block_size, -(-end // source.block_size))
    whole: list[int] = []
    for number in order or needed:
        whole += run.add(number * source.block_size, blocks[number], out.__getitem__)
    assert sorted(whole) == list(range(count))
    return out


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_pair_of_layouts_converts_to_what_the_target_would_have_written(
    source: KvLayout, target: KvLayout
) -> None:
    content = values(tokens=23)
    assert converted(source, target, written(source, content), 23) == written(target, content)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_there_and_back_is_as_it_was(source: KvLayout, target: KvLayout) -> None:
    blocks = written(source, values(tokens=17))
    assert converted(target, source, converted(source, target, blocks, 17), 17) == blocks


@given(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.integers(1, 40))
def test_by_way_of_a_third_layout_is_as_direct(first: KvLayout, second: KvLayout, third: KvLayout, end: int) -> None:
    blocks = written(first, values(end))
    by_way = converted(second, third, converted(first, second, blocks, end), end)
    assert by_way == converted(first, third, blocks, end)


@given(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.integers(1, 50), st.integers(0, 10), st.randoms())
def test_any_part_of_a_run_in_any_order_is_right(
    source: KvLayout, target: KvLayout, end: int, skipped: int, dice: random.Random
) -> None:
    start = min(skipped, (end - 1) // target.block_size) * target.block_size
    content = values(end, seed=end)
    order = list(range(start // source.block_size, -(-end // source.block_size)))
    dice.shuffle(order)
    twice = [*order, dice.choice(order)]
    got = converted(source, target, written(source, content), end, start=start, order=twice)
    assert got == written(target, content)[start // target.block_size :]


@given(st.data())
def test_any_two_layouts_of_one_model_convert(data: st.DataObject) -> None:
    def draw() -> KvLayout:
        return msgspec.structs.replace(
            BASE,
            dtype=data.draw(st.sampled_from(list(DTYPE_BYTES))),
            block_size=data.draw(st.integers(1, 20)),
            rope=data.draw(st.sampled_from(["half", "interleaved"])),
            axes="".join(data.draw(st.permutations("lkthd"))),
            tp_size=data.draw(st.sampled_from([1, 2, 4])),
        )

    source, target, content = draw(), draw(), values(data.draw(st.integers(1, 30)))
    assert converted(source, target, written(source, content), len(content)) == written(target, content)


@given(st.integers(0, 2**32), st.sampled_from([layout for layout in LAYOUTS if layout.dtype != "float16"]))
def test_any_bits_survive_a_round_trip_through_a_dtype_that_holds_them(seed: int, wide: KvLayout) -> None:
    narrow = msgspec.structs.replace(BASE, dtype=wide.dtype, block_size=7)
    blocks = [memoryview(np.random.default_rng(seed).bytes(narrow.block_bytes)) for _ in range(3)]
    back = converted(wide, narrow, converted(narrow, wide, blocks, 21), 21)
    assert back == blocks


def test_large_blocks_are_cast_a_few_layers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "AT_ONCE", 1)
    content, other = values(23), msgspec.structs.replace(BASE, dtype="bfloat16", rope="interleaved", tp_size=2)
    assert converted(BASE, other, written(BASE, content), 23) == written(other, content)


def test_v_is_not_paired() -> None:
    other = msgspec.structs.replace(BASE, rope="interleaved")
    blocks = written(BASE, values(4))
    (got,) = converted(BASE, other, blocks, 4)
    v = [place(BASE, layer, 1, 0, 0, 0) for layer in range(2)]
    length = BASE.token_bytes * BASE.block_size // 4
    assert all(got[at : at + length] == blocks[0][at : at + length] for at in v)
    assert got != blocks[0]


# State


def test_state_is_that_of_the_source_block_that_ends_where_the_target_does() -> None:
    source = msgspec.structs.replace(BASE, state_bytes=3)
    target = msgspec.structs.replace(source, block_size=12, tp_size=2)
    blocks = written(source, values(30))
    for number, block in enumerate(blocks):
        source.state(block)[:] = bytes([number] * 3)
    got = converted(source, target, blocks, 30, order=[7, 3, 0, 1, 2, 6, 5, 4])
    assert [bytes(target.state(block)) for block in got] == [b"\2\2\2", b"\5\5\5", b"\7\7\7"]


# Refusals


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        ({}, {"layers": 3}, "layers: 2 != 3"),
        ({}, {"kv_heads": 8}, "kv_heads: 4 != 8"),
        ({}, {"head_dim": 8}, "head_dim: 6 != 8"),
        ({}, {"state_bytes": 8}, "state_bytes: 0 != 8"),
        ({"rope": "none"}, {}, "rope: none != half"),
        ({"rope": "interleaved"}, {"rope": "none"}, "rope: interleaved != none"),
        ({"head_dim": 5}, {"head_dim": 5, "rope": "interleaved"}, "head_dim: 5 elements make no pairs"),
        ({"state_bytes": 8}, {"state_bytes": 8, "block_size": 2}, "block_size: 2 is no multiple of 4"),
        ({"state_bytes": 8}, {"state_bytes": 8, "block_size": 6}, "block_size: 6 is no multiple of 4"),
    ],
)
def test_a_refusal_names_both_layouts_and_the_field(source: dict[str, Any], target: dict[str, Any], why: str) -> None:
    ours, theirs = msgspec.structs.replace(BASE, **source), msgspec.structs.replace(BASE, **target)
    assert (obstacle(ours, theirs) or "").startswith(why)
    with pytest.raises(LayoutError) as refused:
        Conversion(ours, theirs)
    assert why in refused.value.why
    assert str(ours) in refused.value.why
    assert str(theirs) in refused.value.why


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_nothing_else_is_refused(source: KvLayout, target: KvLayout) -> None:
    assert obstacle(source, target) is None
