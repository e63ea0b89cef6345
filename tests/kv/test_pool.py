from __future__ import annotations

import mmap
import resource

import pytest

from pdd_runtime.errors import CapacityError
from pdd_runtime.kv.pool import BlockPool


def test_blocks_are_windows_into_one_buffer() -> None:
    pool = BlockPool(8, 4)
    pool.memory(2)[:] = b"8 bytes!"
    assert bytes(pool.buffer()[16:24]) == b"8 bytes!"
    assert len(pool.buffer()) == 32
    assert len(pool.memory(3)) == 8


def test_memory_never_touched_costs_nothing() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = BlockPool(1 << 20, 1 << 10)
    assert pool.memory(1023)[-1] == 0
    assert len(pool.buffer()) == 1 << 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "in KiB"


def test_a_pool_larger_than_the_machine_says_what_to_do() -> None:
    with pytest.raises(CapacityError, match="1048576 blocks of 1073741824 bytes"):
        BlockPool(1 << 30, 1 << 20)


def test_shared_blocks_are_the_same_bytes_in_another_mapping() -> None:
    pool = BlockPool(8, 4, shared=True)
    other = mmap.mmap(pool.fd, 32)
    pool.memory(2)[:] = b"8 bytes!"
    assert other[16:24] == b"8 bytes!"
    other[0:2] = b"hi"
    assert bytes(pool.memory(0)[:2]) == b"hi"
    with pytest.raises(ValueError, match="not shared"):
        _ = BlockPool(8, 4).fd


@pytest.mark.parametrize("block", [-1, 4])
def test_a_number_that_is_no_block_is_refused(block: int) -> None:
    pool = BlockPool(8, 4)
    for use in (pool.memory, pool.retain, pool.release, pool.references):
        with pytest.raises(ValueError, match="of a pool of 4"):
            use(block)


def test_a_block_released_too_often_is_an_error() -> None:
    pool = BlockPool(8, 4)
    (block,) = pool.take(1)
    assert not pool.retain(block)
    assert not pool.release(block)
    assert pool.release(block)
    with pytest.raises(ValueError, match="released more often"):
        pool.release(block)


@pytest.mark.parametrize(("size", "blocks"), [(0, 1), (1, 0)])
def test_an_empty_pool_is_refused(size: int, blocks: int) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        BlockPool(size, blocks)
