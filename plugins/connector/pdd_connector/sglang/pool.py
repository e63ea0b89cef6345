"""Copies of KV between the slots of SGLang's cache and the blocks that are shared with a worker."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pdd_connector.client import Geometry

log = logging.getLogger(__name__)

Done = Callable[[bool], None]
_DTYPES: dict[torch.dtype, Literal["float32", "bfloat16", "float16"]]
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Unsupported(Exception):
    """This cache cannot be shared, and why."""


@dataclass(frozen=True)
class Place:
    """Where a run of tokens lies in the blocks."""

    blocks: NDArray[np.uint8]
    """This rank's part of all blocks, `[blocks, shard bytes]`."""
    block_size: int
    """Tokens in a block."""
    numbers: tuple[int, ...]
    """The request's blocks, in order of position."""
    start: int
    end: int
    """Positions of the run in the request: from `start` up to, not including, `end`."""


class SlotPool:
    """One rank's cache: for each layer a tensor of keys and one of values, `[slots, heads, head_dim]`.

    In host memory a copy is done when the call returns. On an accelerator it runs beside the forward pass, on a stream
    of its own, ordered by events: the scheduler never waits for it, and no slot is written before it was read.
    """

    def __init__(self, kvcache: Any, forward_stream: Any = None) -> None:
        """Raises `Unsupported` for a cache that is not plain attention in rows of tokens."""
        self._keys, self._values = _buffers(kvcache)
        self._forward = forward_stream
        first = self._keys[0]
        self.slots, self.heads, self.head_dim = first.shape
        self.layers, self._dtype, self._device = len(self._keys), first.dtype, first.device
        self.capacity = int(kvcache.size)
        self._stream: Any = None if self._device.type == "cpu" else torch.get_device_module(self._device).Stream()
        self._fetched: queue.SimpleQueue[tuple[Any, torch.Tensor, Place, Done] | None]
        self._fetched = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._unsaved = 0
        if self._stream is not None:
            self._thread = threading.Thread(target=self._store_fetched, name="pdd-kv", daemon=True)
            self._thread.start()

    def geometry(self, ranks: int) -> Geometry:
        """What the worker is told: of all `ranks` together."""
        dtype = _DTYPES[self._dtype]
        return Geometry(self.layers, self.heads * ranks, self.head_dim, dtype, capacity=self.capacity)

    def save(self, slots: torch.Tensor, place: Place, done: Done) -> None:
        """Copy the tokens in `slots`, one a token, to `place`, and clear the rest of the last block. `done(True)` is
        called when that is done, in any thread, and `done(False)` where it cannot be."""
        if self._stream is None:
            self._finish(place, lambda layer, part: self._buffer(layer, part)[slots], done)
            return
        fetched, host = self._fetch(slots)
        with self._idle:
            self._unsaved += 1
        self._fetched.put((fetched, host, place, done))

    def load(self, slots: torch.Tensor, place: Place) -> None:
        """Copy the tokens at `place` into `slots`: there before the next forward pass reads them."""
        if self._stream is None:
            for layer, part, blocks, offsets, rows in self._parts(place):
                self._buffer(layer, part)[slots] = rows[blocks, offsets]
            return
        host = self._staging(place.end - place.start)
        for layer, part, blocks, offsets, rows in self._parts(place):
            torch.index_select(rows.flatten(0, 1), 0, blocks * place.block_size + offsets, out=host[layer, part])
        device = torch.get_device_module(self._device)
        # What was computed in these slots for another request must have been read.
        self._wait_for_writers()
        with device.stream(self._stream):
            staged = host.to(self._device, non_blocking=True)
            for layer in range(self.layers):
                for part in (0, 1):
                    self._buffer(layer, part)[slots] = staged[layer, part]
        self._let_writers_wait()

    def settle(self) -> None:
        """Return when nothing is being copied."""
        with self._idle:
            self._idle.wait_for(lambda: self._unsaved == 0)

    def close(self) -> None:
        self.settle()
        if self._stream is not None:
            self._fetched.put(None)
            self._thread.join()

    def _buffer(self, layer: int, part: int) -> torch.Tensor:
        return (self._values if part else self._keys)[layer]

    def _finish(self, place: Place, rows_of: Callable[[int, int], torch.Tensor], done: Done) -> None:
        saved = False
        try:
            for layer, part, blocks, offsets, rows in self._parts(place):
                rows[blocks, offsets] = rows_of(layer, part)
                # What another request left there must reach nobody.
                rows[blocks[-1], int(offsets[-1]) + 1 :] = 0
            saved = True
        except Exception:
            log.exception("pages could not be copied into blocks")
        finally:
            done(saved)

    def _parts(self, place: Place) -> Any:
        """Of each layer its keys (0) and values (1): block numbers and offsets of the run's tokens, and where they
        index, `[blocks, block_size, heads, head_dim]`."""
        positions = np.arange(place.start, place.end)
        numbers = np.asarray(place.numbers, np.int64)[positions // place.block_size]
        blocks, offsets = torch.from_numpy(numbers), torch.from_numpy(positions % place.block_size)
        shape = (len(place.blocks), self.layers, 2, place.block_size, self.heads, self.head_dim)
        shared = torch.from_numpy(place.blocks).view(self._dtype).view(shape)
        for layer in range(self.layers):
            for part in (0, 1):
                yield layer, part, blocks, offsets, shared[:, layer, part]

    # On an accelerator

    def _staging(self, tokens: int) -> torch.Tensor:
        shape = (self.layers, 2, tokens, self.heads, self.head_dim)
        return torch.empty(shape, dtype=self._dtype, pin_memory=True)

    def _fetch(self, slots: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """The event after which the host has the rows of `slots`, and these rows."""
        device = torch.get_device_module(self._device)
        host = self._staging(len(slots))
        self._wait_for_writers()
        with device.stream(self._stream):
            pairs = zip(self._keys, self._values, strict=True)
            rows = torch.stack([torch.stack((keys[slots], values[slots])) for keys, values in pairs])
            self._let_writers_wait()
            host.copy_(rows, non_blocking=True)
            slots.record_stream(self._stream)
            fetched = device.Event()
            fetched.record(self._stream)
        return fetched, host

    def _writers(self) -> list[Any]:
        current = torch.get_device_module(self._device).current_stream(self._device)
        return [current] if self._forward is None else [current, self._forward]

    def _wait_for_writers(self) -> None:
        for stream in self._writers():
            self._stream.wait_stream(stream)

    def _let_writers_wait(self) -> None:
        """What runs on our stream by now is over before they write or read the cache again."""
        passed = torch.get_device_module(self._device).Event()
        passed.record(self._stream)
        for stream in self._writers():
            stream.wait_event(passed)

    def _store_fetched(self) -> None:
        while (task := self._fetched.get()) is not None:
            fetched, host, place, done = task

            def row_of(layer: int, part: int, fetched: Any = fetched, host: torch.Tensor = host) -> torch.Tensor:
                fetched.synchronize()
                return host[layer, part]

            self._finish(place, row_of, done)
            with self._idle:
                self._unsaved -= 1
                self._idle.notify_all()


def _buffers(kvcache: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    kind = type(kvcache).__name__
    keys, values = getattr(kvcache, "k_buffer", None), getattr(kvcache, "v_buffer", None)
    if not isinstance(keys, list) or not isinstance(values, list):
        raise Unsupported(f"a cache of the kind {kind} has no keys and values of its own (MLA, hybrid): not supported")
    if getattr(kvcache, "kv_cache_layout", "nhd") != "nhd":
        raise Unsupported(f"the cache lies as {kvcache.kv_cache_layout}, and only nhd (rows of tokens) is supported")
    for tensor in (*keys, *values):
        if tensor.dtype not in _DTYPES:
            raise Unsupported(
                f"the cache holds {tensor.dtype}: use --kv-cache-dtype auto with float32, bfloat16 or float16"
            )
        if tensor.ndim != 3 or tensor.shape[1:] != keys[0].shape[1:]:
            raise Unsupported(f"the cache of the kind {kind} has layers, or keys and values, of different shapes")
    return keys, values
