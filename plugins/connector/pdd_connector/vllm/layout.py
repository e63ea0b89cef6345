"""Where the elements of a page lie in vLLM's cache, found by writing numbers through the engine's own operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.int64]
Steps = tuple[tuple[int, int], ...]
"""(count, stride in elements) of the loops that walk one axis, outermost first."""

_DIGIT = 7
"""Bits of a number written at once: the integers below 128 are exact in every floating-point format of a cache."""


class UnknownLayout(ValueError):
    """Pages of this engine cannot be copied: what was written into one does not lie there as strides could say."""


@dataclass(frozen=True)
class PageLayout:
    """K or V of one page of one layer, `[tokens, heads, head_dim]`: where each element lies from the page's first."""

    start: int
    tokens: Steps
    heads: Steps
    dim: Steps

    @property
    def steps(self) -> Steps:
        return self.tokens + self.heads + self.dim


def probe(
    write: Callable[[NDArray[np.int64], NDArray[np.int64]], None],
    read: Callable[[], NDArray[np.int64]],
    shape: tuple[int, int, int],
) -> Offsets:
    """Where each element of K and V of a page lies: `[2, tokens, heads, head_dim]` of indices into what `read` gives.

    `write(keys, values)` puts two arrays of `shape`, `[tokens, heads, head_dim]` of integers below 128, into a scratch
    page as the engine does; `read()` gives that page back, flat. Raises `UnknownLayout` where the engine's operation
    is no permutation.
    """
    count = 2 * int(np.prod(shape))
    numbers = np.arange(count, dtype=np.int64).reshape(2, *shape)
    found = np.zeros(count, np.int64)
    for shift in range(0, count.bit_length(), _DIGIT):
        digit = (numbers >> shift) & ((1 << _DIGIT) - 1)
        write(digit[0], digit[1])
        page = read()
        if page.shape != (count,):
            raise UnknownLayout(f"a page has {page.size} elements, where its K and V are {count}")
        found |= page << shift
    order = np.empty(count, np.int64)
    if not np.array_equal(np.sort(found), numbers.ravel()):
        raise UnknownLayout("K and V do not lie in a page element by element")
    order[found] = np.arange(count)
    return order.reshape(2, *shape)


def page_layouts(offsets: Offsets) -> tuple[PageLayout, PageLayout]:
    """Of K and of V, from `[2, tokens, heads, head_dim]` of places in memory, in elements from the page's start.
    Raises `UnknownLayout`."""
    return _page_layout(offsets[0]), _page_layout(offsets[1])


def _page_layout(offsets: Offsets) -> PageLayout:
    start = int(offsets[0, 0, 0])
    axes = (offsets[:, 0, 0], offsets[0, :, 0], offsets[0, 0, :])
    tokens, heads, dim = (steps(axis - start) for axis in axes)
    layout = PageLayout(start, tokens, heads, dim)
    whole = start + _walk(tokens)[:, None, None] + _walk(heads)[None, :, None] + _walk(dim)
    if not np.array_equal(whole, offsets):
        raise UnknownLayout("the places of a page's elements do not follow from token, head and element each by itself")
    return layout


def steps(offsets: Offsets) -> Steps:
    """The nested loops whose counters give `offsets`, which begin with 0. Raises `UnknownLayout`."""
    n = len(offsets)
    if n == 1:
        return ()
    stride = int(offsets[1])
    run = int(np.argmin(np.append(offsets == np.arange(n) * stride, False)))
    while n % run:
        run -= 1
    if run == 1:
        raise UnknownLayout(f"the places {offsets[:8].tolist()}… are no nested strides")
    found = (*steps(offsets[::run]), (run, stride))
    if not np.array_equal(_walk(found), offsets):
        raise UnknownLayout(f"the places {offsets[:8].tolist()}… are no nested strides")
    return found


def _walk(loops: Sequence[tuple[int, int]]) -> Offsets:
    places = np.zeros(1, np.int64)
    for count, stride in loops:
        places = (places[:, None] + np.arange(count) * stride).ravel()
    return places


def split(block: Any, axes: Sequence[Steps]) -> Any:
    """A view of `block`, `[layers, tokens, heads, head_dim]`, with each axis cut as the loops in `axes` are."""
    shape = [block.shape[0]]
    for axis in axes:
        shape += [count for count, _ in axis]
    return block.reshape(shape)
