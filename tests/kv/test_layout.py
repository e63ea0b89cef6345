from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdd_runtime.kv import KvLayout

LAYOUT = KvLayout(layers=3, kv_heads=4, head_dim=8, dtype="bfloat16", block_size=16)


def test_a_block_is_all_layers_of_its_tokens() -> None:
    assert LAYOUT.token_bytes == 3 * 2 * 4 * 8 * 2
    assert LAYOUT.block_bytes == 16 * LAYOUT.token_bytes


def test_shards_and_order_change_nothing_of_a_blocks_size_and_state_adds_to_it() -> None:
    other = msgspec.structs.replace(LAYOUT, tp_size=2, axes="klhtd")
    assert other.block_bytes == LAYOUT.block_bytes
    assert msgspec.structs.replace(LAYOUT, state_bytes=100).block_bytes == LAYOUT.block_bytes + 100


@pytest.mark.parametrize("wrong", [{"axes": "lkth"}, {"axes": "lkthh"}, {"tp_size": 3}, {"tp_size": 0}])
def test_what_cannot_be_laid_out_is_no_layout(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"permutation|split"):
        msgspec.structs.replace(LAYOUT, **wrong)


def test_a_difference_names_the_field_and_both_values() -> None:
    other = msgspec.structs.replace(LAYOUT, block_size=32)
    assert LAYOUT.difference(other) == "block_size: 16 != 32"
    assert LAYOUT.difference(LAYOUT) is None


def test_the_spec_does_not_depend_on_how_bytes_lie() -> None:
    other = msgspec.structs.replace(LAYOUT, block_size=32, dtype="float32", rope="interleaved", tp_size=2)
    assert LAYOUT.spec == other.spec
