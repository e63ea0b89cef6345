from __future__ import annotations

import msgspec

from pdd_runtime.kv import KvLayout

LAYOUT = KvLayout(layers=3, kv_heads=4, head_dim=8, dtype="bfloat16", block_size=16)


def test_a_block_is_all_layers_of_its_tokens() -> None:
    assert LAYOUT.token_bytes == 3 * 2 * 4 * 8 * 2
    assert LAYOUT.block_bytes == 16 * LAYOUT.token_bytes


def test_a_tensor_parallel_shard_holds_its_heads() -> None:
    shard = msgspec.structs.replace(LAYOUT, tp_size=2, tp_rank=1)
    assert shard.block_bytes * 2 == LAYOUT.block_bytes


def test_a_difference_names_the_field_and_both_values() -> None:
    other = msgspec.structs.replace(LAYOUT, block_size=32)
    assert LAYOUT.difference(other) == "block_size: 16 != 32"
    assert LAYOUT.difference(LAYOUT) is None


def test_the_spec_does_not_depend_on_how_bytes_lie() -> None:
    other = msgspec.structs.replace(LAYOUT, block_size=32, dtype="float32", rope="interleaved", tp_size=2)
    assert LAYOUT.spec == other.spec
