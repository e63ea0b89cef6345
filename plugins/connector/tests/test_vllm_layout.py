"""Where things lie in a page is found out, for every packing that strides can say, and nothing else is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pdd_connector.vllm.device import DevicePages
from pdd_connector.vllm.layout import UnknownLayout, page_layouts, probe, steps
from pdd_connector.vllm.pages import CacheLayout, HostCopier

TOKENS, HEADS, DIM = SHAPE = (32, 3, 8)
Ints = NDArray[np.int64]


def rows(keys: Ints, values: Ints) -> Ints:
    """Token after token: K of all heads, then V of all heads."""
    return np.stack([keys, values], axis=1).ravel()


def heads(keys: Ints, values: Ints) -> Ints:
    """A head after another, each row K and V side by side."""
    return np.concatenate([keys, values], axis=2).transpose(1, 0, 2).ravel()


def columns(keys: Ints, values: Ints) -> Ints:
    """For each head K as columns, then V as rows, as for a matrix product without a transposition."""
    parts = [np.concatenate([keys[:, h].T.ravel(), values[:, h].ravel()]) for h in range(HEADS)]
    return np.concatenate(parts)


def tiles(keys: Ints, values: Ints) -> Ints:
    """K in pairs of elements, V in pairs of tokens, in tiles of 16 tokens: as matrix units take 16-bit numbers."""
    k = keys.reshape(2, 16, HEADS, DIM // 2, 2).transpose(2, 0, 3, 1, 4)
    v = values.reshape(TOKENS // 2, 2, HEADS, DIM).transpose(2, 0, 3, 1)
    return np.concatenate([k.ravel(), v.ravel()])


PACKINGS = [rows, heads, columns, tiles]


class Page:
    """A page of an engine that packs as it is told."""

    def __init__(self, pack: Callable[[Ints, Ints], Ints]) -> None:
        self._pack = pack
        self.content = np.zeros(2 * TOKENS * HEADS * DIM, np.int64)

    def write(self, keys: Ints, values: Ints) -> None:
        assert max(keys.max(), values.max()) < 128, "not every format of a cache has it exactly"
        self.content = self._pack(keys, values)

    def read(self) -> Ints:
        return self.content


@pytest.mark.parametrize("pack", PACKINGS)
def test_every_packing_is_found_and_copied_both_ways(pack: Callable[[Ints, Ints], Ints]) -> None:
    page = Page(pack)
    order = probe(page.write, page.read, SHAPE)
    keys, values = page_layouts(order)
    size = order.size
    layers, pages, gap = 2, 4, 5
    layout = CacheLayout(pages, layers, gap, size + 1, pages * (size + 1), keys, values, SHAPE)
    memory = np.zeros(gap + layers * pages * (size + 1), np.uint16)
    copier = HostCopier(memory, layout)
    generator = np.random.default_rng(1)
    block = generator.integers(1, 2**16, (layers, 2, *SHAPE), np.uint16)
    copier.load([2], [block], [TOKENS])
    for layer in range(layers):
        start = gap + layer * pages * (size + 1) + 2 * (size + 1)
        here = memory[start : start + size]
        assert np.array_equal(here, pack(block[layer, 0].astype(np.int64), block[layer, 1].astype(np.int64)))
        memory[start : start + size] = 0
    assert not memory.any(), "it wrote beside the page"
    copier.load([2], [block], [TOKENS])
    back = np.full_like(block, 7)
    copier.save([1, 2], lambda saved: saved.copy(1, back, TOKENS))
    assert np.array_equal(back, block)


@pytest.mark.parametrize("pack", PACKINGS)
def test_pages_on_a_device_are_gathered_and_scattered_alike(pack: Callable[[Ints, Ints], Ints]) -> None:
    """On the device that every machine has; what streams and pinned memory add is not run here."""
    page = Page(pack)
    order = probe(page.write, page.read, SHAPE)
    size = order.size
    layout = CacheLayout(4, 2, 3, size, 4 * size, *page_layouts(order), SHAPE)
    memory = np.random.default_rng(3).integers(0, 2**31, 3 + 8 * size, np.uint32)
    tensor = torch.from_numpy(memory.view(np.int32).copy())
    device, host = DevicePages(tensor, layout), HostCopier(memory, layout)
    rows = device.gather(torch.tensor([2, 0]))
    blocks = np.zeros((2, 2, 2, *SHAPE), np.uint32)
    host.save([2, 0], lambda saved: [saved.copy(index, block, TOKENS) for index, block in enumerate(blocks)])
    assert np.array_equal(rows.numpy().view(np.uint32), blocks)
    device.scatter(torch.tensor([3, 1]), rows)
    host.load([3, 1], list(blocks), [TOKENS, TOKENS])
    assert np.array_equal(tensor.numpy().view(np.uint32), memory)


def test_behind_the_last_token_of_a_tail_there_are_zeros() -> None:
    page = Page(columns)
    order = probe(page.write, page.read, SHAPE)
    layout = CacheLayout(2, 1, 0, order.size, 2 * order.size, *page_layouts(order), SHAPE)
    memory = np.full(2 * order.size, 9, np.uint32)
    copier = HostCopier(memory, layout)
    block = np.full((1, 2, *SHAPE), 5, np.uint32)
    copier.load([1], [block], [3])
    assert (block == 5).all(), "the block is not ours to change"
    back = np.full_like(block, 7)
    copier.save([1], lambda saved: saved.copy(0, back, TOKENS))
    assert (back[:, :, :3] == 5).all()
    assert not back[:, :, 3:].any()
    copier.save([0], lambda saved: saved.copy(0, back, 10))
    assert (back[:, :, :10] == 9).all()
    assert not back[:, :, 10:].any()


def test_what_is_no_permutation_is_refused() -> None:
    def rounded(keys: Ints, values: Ints) -> Ints:
        return rows(keys // 2 * 2, values)

    def short(keys: Ints, values: Ints) -> Ints:
        return rows(keys, values)[:-1]

    for pack in (rounded, short):
        page = Page(pack)
        with pytest.raises(UnknownLayout):
            probe(page.write, page.read, SHAPE)


def test_a_permutation_without_strides_is_refused() -> None:
    swizzle = np.random.default_rng(2).permutation(2 * TOKENS * HEADS * DIM)
    page = Page(lambda keys, values: rows(keys, values)[swizzle])
    order = probe(page.write, page.read, SHAPE)
    with pytest.raises(UnknownLayout):
        page_layouts(order)


def test_a_view_beyond_the_cache_is_refused() -> None:
    page = Page(rows)
    order = probe(page.write, page.read, SHAPE)
    layout = CacheLayout(2, 1, 0, order.size, 2 * order.size, *page_layouts(order), SHAPE)
    with pytest.raises(UnknownLayout):
        HostCopier(np.zeros(2 * order.size - 1, np.uint16), layout)


@pytest.mark.parametrize(
    ("places", "loops"),
    [
        ([0], ()),
        ([0, 5], ((2, 5),)),
        ([0, 1, 2, 3], ((4, 1),)),
        ([0, 1, 10, 11], ((2, 10), (2, 1))),
        ([0, 4, 1, 5, 100, 104, 101, 105], ((2, 100), (2, 1), (2, 4))),
        ([0, 1, 2, 9, 10, 11], ((2, 9), (3, 1))),
    ],
)
def test_places_are_nested_loops(places: list[int], loops: Any) -> None:
    assert steps(np.array(places)) == loops


@pytest.mark.parametrize("places", [[0, 1, 3], [0, 1, 10, 12], [0, 2, 1]])
def test_places_that_are_none_are_refused(places: list[int]) -> None:
    with pytest.raises(UnknownLayout):
        steps(np.array(places))
