"""An in-process engine whose model is a hash: as strict about KV and batches as a real one, and quick."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import xxhash
from msgspec import structs
from numpy.typing import NDArray
from pydantic import BaseModel

from pdd_runtime.inprocess import Chunk, InProcessConfig, InProcessEngine, Runner, fingerprint
from pdd_runtime.kv import KvLayout
from pdd_runtime.plugins.engine import Capabilities, ModelSpec
from pdd_runtime.testing.byte_tokenizer import SIZE, byte_tokenizer

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=4, dtype="float32", block_size=16, axes="ldkht", tp_size=2)


class ToyRunner(Runner):
    """The KV row of a position is a hash of its token and of the row before it, which is read from the blocks: what is
    wrong there shows in every token behind it. The logits are random numbers drawn by the last row."""

    def __init__(self, config: InProcessConfig, spec: ModelSpec) -> None:
        self.name, self.vocab, self.context = spec.source, SIZE, config.context_length or 1024
        self.fingerprint = fingerprint(spec.source, spec, "toy")
        self.layout = structs.replace(LAYOUT, block_size=config.block_size, dtype=spec.dtype)
        self.tokenizer = byte_tokenizer()
        self.known: dict[int, int] = {}
        """How many tokens of each sequence are computed, of those not yet forgotten."""
        self.closed = 0
        self.go = threading.Event()
        """While it is clear, passes wait."""
        self.go.set()
        self._thread = threading.current_thread()

    def open(self, memory: memoryview) -> None:
        self._on_thread()
        self._memory = memory

    def step(self, chunks: Sequence[Chunk]) -> list[NDArray[np.float32] | None]:
        self._on_thread()
        self.go.wait()
        rows = [self._compute(chunk) for chunk in chunks]
        return [self._logits(row) if chunk.samples else None for chunk, row in zip(chunks, rows, strict=True)]

    def forget(self, sequences: Sequence[int]) -> None:
        self._on_thread()
        for sequence in sequences:
            self.known.pop(sequence, None)

    def close(self) -> None:
        self._on_thread()
        self.closed += 1

    def _compute(self, chunk: Chunk) -> bytes:
        """Returns the last row."""
        assert self.known.get(chunk.sequence, chunk.start) == chunk.start, "a chunk does not go on where the last ended"
        assert len(chunk.blocks) == -(-chunk.end // self.layout.block_size)
        row = self._row(chunk, chunk.start - 1).tobytes() if chunk.start else b""
        for position, token in enumerate(chunk.tokens, chunk.start):
            place = self._row(chunk, position)
            draw = np.random.default_rng(xxhash.xxh3_64_intdigest(row + token.to_bytes(4, "little")))
            place[...] = draw.integers(1, 2**16, place.shape)
            row = place.tobytes()
        self.known[chunk.sequence] = chunk.end
        return row

    def _row(self, chunk: Chunk, position: int) -> NDArray[np.unsignedinteger]:
        index, at = divmod(position, self.layout.block_size)
        start = chunk.blocks[index] * self.layout.block_bytes
        return self.layout.elements(self._memory[start : start + self.layout.block_bytes])[:, :, at]

    def _logits(self, row: bytes) -> NDArray[np.float32]:
        return np.random.default_rng(xxhash.xxh3_64_intdigest(row)).standard_normal(SIZE, np.float32) * 3

    def _on_thread(self) -> None:
        assert threading.current_thread() is self._thread, "called in another thread"


class ToyEngine(InProcessEngine):
    name: ClassVar[str] = "toy"

    @classmethod
    def promises(cls, model: ModelSpec, config: BaseModel) -> Capabilities:
        return structs.replace(super().promises(model, config), exact=True)

    def _load(self) -> ToyRunner:
        return ToyRunner(self.config, self.model)
