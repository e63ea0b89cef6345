"""Addresses."""

from __future__ import annotations

import pytest
from pdd_rdma.memory import Region, joined


def test_a_view_is_where_its_bytes_are() -> None:
    memory = memoryview(bytearray(64))
    whole = Region.of(memory)
    assert whole.size == 64
    assert Region.of(memory[16:48]) == Region(whole.address + 16, 32)
    assert Region.of(memory[16:48].toreadonly()) == Region(whole.address + 16, 32)


@pytest.mark.parametrize(("address", "number"), [(100, 0), (116, 1), (148, 3), (108, None), (84, None), (164, None)])
def test_blocks_are_counted_from_the_beginning(address: int, number: int | None) -> None:
    assert Region(100, 70).block(Region(address, 16)) == number


def test_neighbours_are_joined() -> None:
    assert joined([Region(30, 10), Region(0, 10), Region(10, 10), Region(15, 10)]) == [Region(0, 25), Region(30, 10)]
