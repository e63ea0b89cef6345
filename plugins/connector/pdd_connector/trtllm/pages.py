"""Copies between the pages of TensorRT-LLM's cache and blocks in host memory.

The part for accelerators is written from CUDA's and PyTorch's documentation, and was never run on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_GROUP = 32 << 20
"""Bytes copied at once: bounds what a copy takes of the accelerator's memory, and of pinned memory."""
_UNSIGNED = {2: np.uint16, 4: np.uint32}
_SIGNED = {2: torch.int16, 4: torch.int32}
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

Array = NDArray[Any]


class Unsupported(Exception):
    """This cache cannot be shared, and why."""


class Pages:
    """One rank's cache: a tensor `[pages, layers, 2 (K, V), heads * tokens * head_dim]`, and in the last axis heads
    before tokens (as TensorRT-LLM's and FlashInfer's attention have it).

    `read` belongs to one thread, `write` to the engine's.
    """

    def __init__(self, cache: torch.Tensor, heads: int, head_dim: int, tokens: int) -> None:
        """`heads` of this rank; `tokens` in a page. Raises `Unsupported`."""
        if cache.dtype not in _NAMES:
            raise Unsupported(f"the cache holds {cache.dtype}: set kv_cache_config.dtype to that of the model")
        if cache.ndim < 3 or cache.shape[2] != 2 or not cache.is_contiguous():
            raise Unsupported(f"the cache is {tuple(cache.shape)}, not pages of keys and values (MLA, hybrid)")
        pages, layers = cache.shape[:2]
        if cache.numel() != pages * layers * 2 * heads * tokens * head_dim:
            raise Unsupported(
                f"the cache is {tuple(cache.shape)}, where a page of {tokens} tokens has {heads} heads of {head_dim}"
            )
        self.count, self.layers, self.tokens = pages, layers, tokens
        self.dtype: Any = _NAMES[cache.dtype]
        size = cache.element_size()
        self._cache = cache.view(_SIGNED[size]).view(pages, layers, 2, heads, tokens, head_dim)
        self._shape = (layers, 2, tokens, heads, head_dim)
        self._unsigned = _UNSIGNED[size]
        self.group = max(1, _GROUP // (layers * 2 * heads * tokens * head_dim * size))
        """Pages that `read` takes at once."""
        self._device = cache.device
        self._stream: Any = None
        self._staging: torch.Tensor | None = None
        if self._on_device:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call, unused-ignore]
            self._staging = self._host(self.group)

    def ready(self) -> Any:
        """A mark behind all that the current stream was asked to do; for `read`."""
        if not self._on_device:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def read(self, pages: Sequence[int], ready: Any) -> Array:
        """The pages, at most `group`, as they are behind the mark: `[pages, layers, 2, tokens, heads, head_dim]`, as
        unsigned integers of the element's size. Valid until the next call; waits for the device."""
        if not self._on_device:
            return self._numpy(self._gather(pages))
        assert self._staging is not None
        host = self._staging[: len(pages)]
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            host.copy_(self._gather(pages), non_blocking=True)
            self._stream.synchronize()
        return self._numpy(host)

    def write(self, pages: Sequence[int], blocks: Sequence[Array], tokens: int, stream: Any) -> None:
        """Put blocks (each `[layers, 2, tokens, heads, head_dim]`) into pages, `tokens` tokens in all; behind them the
        last page gets zeros. On a device: before all that `stream` is asked to do from now on."""
        for start in range(0, len(pages), self.group):
            group = pages[start : start + self.group]
            host = self._host(len(group))
            rows = self._numpy(host)
            for index, block in enumerate(blocks[start : start + self.group]):
                valid = min(self.tokens, tokens - (start + index) * self.tokens)
                rows[index, :, :, :valid] = block[:, :, :valid]
                rows[index, :, :, valid:] = 0
            self._scatter(group, host, stream)

    def _scatter(self, pages: Sequence[int], host: torch.Tensor, stream: Any) -> None:
        """`host`: `[pages, layers, 2, tokens, heads, head_dim]`."""
        where = torch.tensor(pages, dtype=torch.int64, pin_memory=self._on_device)
        if not self._on_device:
            self._cache[where] = host.transpose(3, 4)
            return
        with torch.cuda.stream(stream):
            staged = host.to(self._device, non_blocking=True).transpose(3, 4).contiguous()
            self._cache.index_copy_(0, where.to(self._device, non_blocking=True), staged)

    def _gather(self, pages: Sequence[int]) -> torch.Tensor:
        where = torch.tensor(pages, dtype=torch.int64, device=self._device)
        return self._cache.index_select(0, where).transpose(3, 4).contiguous()

    def _host(self, pages: int) -> torch.Tensor:
        return torch.empty((pages, *self._shape), dtype=self._cache.dtype, pin_memory=self._on_device)

    def _numpy(self, host: torch.Tensor) -> Array:
        return host.numpy().view(self._unsigned)

    @property
    def _on_device(self) -> bool:
        return self._device.type != "cpu"


def check_attention(backend: str) -> None:
    """Raises `Unsupported` for an `attn_backend` whose pages are not known to have heads before tokens."""
    if backend.upper() not in ("TRTLLM", "FLASHINFER"):
        raise Unsupported(f"attn_backend {backend}: how its pages lie is not known; use TRTLLM")
