"""What an in-process engine adds of its own: a model that computes chunks in blocks of memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdd_runtime.inprocess.chunk import Chunk
from pdd_runtime.kv import KvLayout
from pdd_runtime.plugins.engine import ModelSpec, TokenizerFiles


class Runner(ABC):
    """Every method, the constructor too, runs in the same thread, and not the event loop's. The attributes are set by
    the constructor and never change."""

    name: str
    """What users call the model."""
    fingerprint: str
    """As `fingerprint` below makes it."""
    layout: KvLayout
    """Of the blocks it computes in; without state."""
    vocab: int
    context: int
    """Tokens of the longest sequence."""
    tokenizer: TokenizerFiles

    @abstractmethod
    def open(self, memory: memoryview) -> None:
        """Compute in these blocks from now on: all of them, one after another, `layout.block_bytes` each. Called once,
        before the first step."""

    @abstractmethod
    def step(self, chunks: Sequence[Chunk]) -> Sequence[NDArray[np.float32] | None]:
        """Make the KV of all chunks. Returns for each, in their order, the logits behind its last token, `[vocab]`,
        if it samples; they are read before the next call, and never written.

        When it returns, the KV of [start, end) of each chunk must be in its blocks. A chunk with `start` > 0 of a
        sequence that the runner has not seen, or was told to forget, begins with KV that is in the blocks already.

        Whatever it raises, the chunks may come again, one by one, after their sequences were forgotten. `MemoryError`:
        there was none for what the pass needs beside the blocks."""

    def forget(self, sequences: Sequence[int]) -> None:  # noqa: B027 - most keep nothing
        """These have ended, or gave their blocks back for now: what is kept of them beside the blocks can go. Some it
        may never have seen."""

    def close(self) -> None:  # noqa: B027 - most need no end
        """Nothing is called after this."""


def fingerprint(digest: str, spec: ModelSpec, engine: str) -> str:
    """Of a model whose files have this digest. KV of the fast mode may come from any engine and be of any dtype; that
    of the exact one is bit for bit what this engine computes."""
    return f"{digest}-{spec.dtype}-{engine}" if spec.mode == "exact" else digest
