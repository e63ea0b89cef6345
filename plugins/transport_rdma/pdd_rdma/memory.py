"""Memory as NIXL sees it: addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from pdd_rdma.library import Rows


def address_of(memory: memoryview) -> int:
    if memory.readonly:
        return np.frombuffer(memory, np.uint8).ctypes.data
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # In a tenth of the time.


class Region(NamedTuple):
    """A run of bytes somewhere."""

    address: int
    size: int

    @classmethod
    def of(cls, memory: memoryview) -> Region:
        return cls(address_of(memory), memory.nbytes)

    def block(self, memory: Region) -> int | None:
        """Which block of that size, counted from our beginning, `memory` is; None where it is none of ours."""
        number, odd = divmod(memory.address - self.address, memory.size)
        return None if odd or not 0 <= number < self.size // memory.size else number

    def row(self, device: int = 0) -> Rows:
        return rows([self], device)

    def blocks(self, size: int, device: int = 0) -> Rows:
        """All its blocks of that size, as one row."""
        return np.array([(self.address, size, device, size, self.size // size)], np.uint64)


class MemoryType(NamedTuple):
    """What NIXL calls a kind of memory, and the number of its device."""

    kind: str = "DRAM"
    device: int = 0


def memory_type(memory: memoryview) -> MemoryType:
    """Of a worker's block memory. A `memoryview` is always the host's. An engine that can offer its blocks in GPU
    memory is to be asked here: all behind this function takes what it says (`VRAM`, and the GPU's number)."""
    return MemoryType()


def rows(regions: Iterable[Region], device: int = 0) -> Rows:
    return np.array([(region.address, region.size, device) for region in regions], np.uint64)


def joined(regions: Iterable[Region]) -> list[Region]:
    """The same bytes in as few runs as possible."""
    runs: list[Region] = []
    for region in sorted(regions):
        last = runs[-1] if runs else None
        if last is not None and region.address <= last.address + last.size:
            end = max(last.address + last.size, region.address + region.size)
            runs[-1] = Region(last.address, end - last.address)
        else:
            runs.append(region)
    return runs
