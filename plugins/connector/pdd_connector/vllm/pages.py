"""Copies between vLLM's pages and blocks, for a cache in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from pdd_connector.vllm.layout import PageLayout, UnknownLayout

Array = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class CacheLayout:
    """Where pages lie in the memory of a cache. Everything is counted in elements."""

    pages: int
    layers: int
    start: int
    """Where page 0 of layer 0 begins."""
    page_stride: int
    layer_stride: int
    keys: PageLayout
    values: PageLayout
    shape: tuple[int, int, int]
    """`[tokens, heads, head_dim]` of a page."""

    def view(self, layout: PageLayout) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """(offset, shape, strides) of K or V of the whole cache: `[pages, layers, …]`, then the loops over tokens,
        heads and elements."""
        loops = ((self.pages, self.page_stride), (self.layers, self.layer_stride), *layout.steps)
        return self.start + layout.start, tuple(n for n, _ in loops), tuple(stride for _, stride in loops)

    def check(self, elements: int) -> None:
        """Raises `UnknownLayout` where a view would reach out of a memory of so many elements."""
        for layout in (self.keys, self.values):
            offset, shape, strides = self.view(layout)
            ends = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
            first, last = offset + sum(end for end in ends if end < 0), offset + sum(end for end in ends if end > 0)
            if first < 0 or last >= elements:
                raise UnknownLayout(f"pages from {first} to {last} in a cache of {elements} elements")


class Saved(Protocol):
    """Pages as they were when they were saved."""

    def copy(self, index: int, block: Array, tokens: int) -> None:
        """The `index`-th of them into `block`, `[layers, 2, tokens, heads, head_dim]`; what stands behind its first
        `tokens` tokens becomes 0."""


class Copier(Protocol):
    """Copies for the worker side. Called in the engine's thread."""

    def fence(self) -> None:
        """Whatever is asked of the device from now on may write pages that were to be saved before."""

    def save(self, pages: Sequence[int], deliver: Callable[[Saved], None]) -> None:
        """Take the pages as they are once all that was asked of the device is done, and call `deliver` with them: at
        once, or later in another thread; in any case in the order of the calls."""

    def load(self, pages: Sequence[int], blocks: Sequence[Array], tokens: Sequence[int]) -> None:
        """Blocks into pages, before anything is computed with these. Only the first `tokens` of a block are right; what
        stands behind becomes 0, so that nothing that is no number gets into an attention."""


class HostCopier:
    """A cache in host memory: every copy is done when its call returns."""

    def __init__(self, memory: Array, layout: CacheLayout) -> None:
        """`memory`: all elements of the cache, flat, as unsigned integers of their size."""
        layout.check(memory.size)
        self._shape = layout.shape
        self._views = tuple(self._view(memory, layout, part) for part in (layout.keys, layout.values))

    def fence(self) -> None:
        pass

    def save(self, pages: Sequence[int], deliver: Callable[[Saved], None]) -> None:
        deliver(_HostSaved(self, pages))

    def load(self, pages: Sequence[int], blocks: Sequence[Array], tokens: Sequence[int]) -> None:
        for page, block, n in zip(pages, blocks, tokens, strict=True):
            for part, view in enumerate(self._views):
                rows = block[:, part]
                if n < self._shape[0]:
                    rows = rows.copy()
                    rows[:, n:] = 0
                np.copyto(view[page], rows.reshape(view.shape[1:]))

    def read(self, page: int, block: Array, tokens: int) -> None:
        """One page into a block, `[layers, 2, tokens, heads, head_dim]`."""
        for part, view in enumerate(self._views):
            rows = block[:, part]
            np.copyto(rows.reshape(view.shape[1:]), view[page])
            rows[:, tokens:] = 0

    @staticmethod
    def _view(memory: Array, layout: CacheLayout, part: PageLayout) -> Array:
        offset, shape, strides = layout.view(part)
        return as_strided(memory[offset:], shape, [stride * memory.itemsize for stride in strides])


@dataclass(frozen=True)
class _HostSaved:
    copier: HostCopier
    pages: Sequence[int]

    def copy(self, index: int, block: Array, tokens: int) -> None:
        self.copier.read(self.pages[index], block, tokens)
