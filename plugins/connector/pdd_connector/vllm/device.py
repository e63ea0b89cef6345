"""The same copies for a cache on an accelerator. Written from CUDA's and PyTorch's documentation; never run on one."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from pdd_connector.vllm.pages import Array, CacheLayout, Saved

log = logging.getLogger(__name__)

_GROUP = 32 << 20
"""Bytes gathered at once: bounds what the copies take of the accelerator's memory."""
_SAVES = 64
"""Saves that may wait for their delivery. With more the engine waits: host memory is not without end."""
_UNSIGNED = {2: np.uint16, 4: np.uint32}


class DevicePages:
    """The pages of a cache on whatever device, gathered and scattered by number."""

    def __init__(self, memory: torch.Tensor, layout: CacheLayout) -> None:
        """`memory`: all elements of the cache, flat, as integers of their size."""
        layout.check(memory.numel())
        self._shape = (layout.layers, *layout.shape)
        self._views = []
        for part in (layout.keys, layout.values):
            offset, shape, strides = layout.view(part)
            self._views.append(torch.as_strided(memory, shape, strides, offset))

    def gather(self, where: torch.Tensor) -> torch.Tensor:
        """Copies, `[pages, layers, 2, tokens, heads, head_dim]`."""
        parts = [view.index_select(0, where).reshape(-1, *self._shape) for view in self._views]
        return torch.stack(parts, dim=2)

    def scatter(self, where: torch.Tensor, rows: torch.Tensor) -> None:
        """The reverse: `rows` as `gather` gives them, into the pages."""
        for part, view in enumerate(self._views):
            view.index_copy_(0, where, rows[:, :, part].reshape(-1, *view.shape[1:]))


class DeviceCopier:
    """Saves leave on a stream of their own, behind the step that computed them, into pinned memory; a thread waits for
    each and delivers it. Loads are ordered before the step on the engine's own stream."""

    def __init__(self, memory: torch.Tensor, layout: CacheLayout) -> None:
        """As `DevicePages`."""
        self._pages = DevicePages(memory, layout)
        self._layout, self._device, self._dtype = layout, memory.device, memory.dtype
        self._page_bytes = layout.layers * 2 * int(np.prod(layout.shape)) * memory.element_size()
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._gathered = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._deliveries: queue.Queue[tuple[Any, list[torch.Tensor], Callable[[Saved], None]]]
        self._deliveries = queue.Queue(_SAVES)
        threading.Thread(target=self._deliver, name="pdd-deliveries", daemon=True).start()

    def fence(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._gathered)

    def save(self, pages: Sequence[int], deliver: Callable[[Saved], None]) -> None:
        groups = [self._gather(group) for group in self._groups(pages)]
        if groups:
            self._gathered.record(self._stream)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._deliveries.put((event, groups, deliver))

    def load(self, pages: Sequence[int], blocks: Sequence[Array], tokens: Sequence[int]) -> None:
        done = 0
        for group in self._groups(pages):
            host = self._pinned(len(group))
            rows = self._numpy(host)
            for index in range(len(group)):
                rows[index] = blocks[done + index]
                rows[index][:, :, tokens[done + index] :] = 0
            done += len(group)
            self._pages.scatter(self._index(group), host.to(self._device, non_blocking=True))

    def _gather(self, pages: Sequence[int]) -> torch.Tensor:
        """Into pinned memory, `[pages, layers, 2, tokens, heads, head_dim]`, behind all that was asked of the device by
        now. Not there before the stream says so."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        host = self._pinned(len(pages))
        with torch.cuda.stream(self._stream):
            host.copy_(self._pages.gather(self._index(pages)), non_blocking=True)
        return host

    def _deliver(self) -> None:
        """The thread: each group once it is in host memory."""
        while True:
            event, groups, deliver = self._deliveries.get()
            try:
                event.synchronize()
                deliver(_DeviceSaved([row for group in groups for row in self._numpy(group)]))
            except Exception:
                log.exception("saved pages could not be delivered")

    def _groups(self, pages: Sequence[int]) -> list[Sequence[int]]:
        size = max(1, _GROUP // self._page_bytes)
        return [pages[start : start + size] for start in range(0, len(pages), size)]

    def _index(self, pages: Sequence[int]) -> torch.Tensor:
        # From pinned memory: any other copy would make the host wait for the stream.
        return torch.tensor(pages, dtype=torch.int64, pin_memory=True).to(self._device, non_blocking=True)

    def _pinned(self, pages: int) -> torch.Tensor:
        shape = (pages, self._layout.layers, 2, *self._layout.shape)
        return torch.empty(shape, dtype=self._dtype, pin_memory=True)

    @staticmethod
    def _numpy(host: torch.Tensor) -> Array:
        return host.numpy().view(_UNSIGNED[host.element_size()])


class _DeviceSaved:
    def __init__(self, rows: Sequence[Array]) -> None:
        self._rows = rows

    def copy(self, index: int, block: Array, tokens: int) -> None:
        block[:, :, :tokens] = self._rows[index][:, :, :tokens]
        block[:, :, tokens:] = 0
