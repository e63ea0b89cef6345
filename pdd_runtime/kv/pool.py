"""The memory of all blocks of one worker, who references them, and which are free."""

from __future__ import annotations

import mmap
import os
from array import array
from io import FileIO

from pdd_runtime.errors import CapacityError


class BlockPool:
    """A fixed number of equal blocks in one anonymous mapping, whose pages exist only once they are touched.

    Raises `CapacityError` where the system refuses that much.
    """

    def __init__(self, block_bytes: int, blocks: int, *, shared: bool = False) -> None:
        """`shared`: other processes may map it, by `fd` (Linux alone)."""
        if block_bytes < 1 or blocks < 1:
            raise ValueError(f"a pool needs blocks of at least one byte: {blocks} blocks of {block_bytes} bytes")
        self.block_bytes, self.blocks = block_bytes, blocks
        self._file: FileIO | None = None
        size = block_bytes * blocks
        try:
            if shared:
                # It has no name, and is gone with the last process that has it.
                self._file = os.fdopen(os.memfd_create("pdd-blocks"), "r+b", buffering=0)
                self._file.truncate(size)
                memory = mmap.mmap(self._file.fileno(), size)
            else:
                memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise CapacityError(
                f"no memory for {blocks} blocks of {block_bytes} bytes",
                why=str(error),
                fix="give the pool fewer blocks",
            ) from error
        self._buffer = memoryview(memory)
        self._references = array("l", bytes(array("l").itemsize * blocks))
        # A stack: the block freed last has its pages in place and its bytes in the processor's cache.
        self._free = list(range(blocks - 1, -1, -1))
        self.referenced = 0
        """Blocks with at least one reference."""

    @property
    def fd(self) -> int:
        """The descriptor of the memory. Raises `ValueError` where it is not shared."""
        if self._file is None:
            raise ValueError("the blocks are not shared")
        return self._file.fileno()

    @property
    def free(self) -> int:
        return len(self._free)

    def buffer(self) -> memoryview:
        """All blocks, one after another."""
        return self._buffer

    def memory(self, block: int) -> memoryview:
        """The bytes of one block, writable."""
        self.check(block)
        return self._buffer[block * self.block_bytes : (block + 1) * self.block_bytes]

    def check(self, block: int) -> None:
        """Raises `ValueError` for a number that is no block's (a negative one would count from the end)."""
        if not 0 <= block < self.blocks:
            raise ValueError(f"block {block} of a pool of {self.blocks}")

    def references(self, block: int) -> int:
        self.check(block)
        return self._references[block]

    def take(self, n: int) -> list[int]:
        """`n` free blocks (there must be as many), each with one reference."""
        if not 0 <= n <= len(self._free):
            raise ValueError(f"{n} blocks asked for, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(n)]
        for block in taken:
            self._references[block] = 1
        self.referenced += n
        return taken

    def retain(self, block: int) -> bool:
        """One reference more; True when it is the first."""
        self.check(block)
        self._references[block] += 1
        if self._references[block] > 1:
            return False
        self.referenced += 1
        return True

    def release(self, block: int) -> bool:
        """One reference less; True when it was the last. Raises `ValueError` where there is none."""
        self.check(block)
        if self._references[block] == 0:
            raise ValueError(f"block {block} is released more often than it was retained")
        self._references[block] -= 1
        if self._references[block]:
            return False
        self.referenced -= 1
        return True

    def give_back(self, block: int) -> None:
        """An unreferenced block is free again."""
        self._free.append(block)
