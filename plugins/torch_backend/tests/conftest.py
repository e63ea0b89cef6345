"""What the tests of the engine share: a tiny model, and the model's thread without an engine around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from pdd_torch.runner import TorchRunner
from pdd_torch.testing import build_tiny_model
from torch import Tensor

from pdd_runtime.inprocess import Chunk, InProcessConfig
from pdd_runtime.kv import BlockStore
from pdd_runtime.plugins.engine import ModelSpec

Dtype = Literal["float32", "bfloat16"]
Mode = Literal["fast", "exact"]


class Computer:
    """A model, its blocks, and sequences in them; every call is one forward pass."""

    def __init__(self, source: str, mode: Mode, dtype: Dtype, blocks: int) -> None:
        self.runner = TorchRunner(InProcessConfig(), ModelSpec(source=source, mode=mode, dtype=dtype))
        self.store = BlockStore(self.runner.layout, blocks)
        self.runner.open(self.store.buffer())

    def blocks(self, tokens: int) -> tuple[int, ...]:
        return tuple(self.store.allocate(-(-tokens // self.store.layout.block_size)))

    def run(self, *parts: tuple[tuple[int, ...], int, tuple[int, ...]]) -> Tensor:
        """(tokens, start, blocks) of each sequence; returns the logits behind each."""
        return self.runner.model.forward([Chunk(number, *part, samples=True) for number, part in enumerate(parts)])

    def kv(self, blocks: tuple[int, ...], tokens: int) -> Tensor:
        """The bytes of a sequence's KV, `[tokens, layers * 2, bytes]`."""
        layout = self.store.layout
        shape = (len(blocks), layout.layers * 2, layout.block_size, -1)
        memory = b"".join(bytes(self.store.memory(block)) for block in blocks)
        rows = torch.frombuffer(bytearray(memory), dtype=torch.uint8).view(shape)
        return rows.transpose(1, 2).reshape(-1, layout.layers * 2, rows.shape[-1])[:tokens]


Compute = Callable[..., Computer]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def compute(tiny: Path) -> Compute:
    def make(mode: Mode = "exact", dtype: Dtype = "float32", source: str | Path = tiny, blocks: int = 128) -> Computer:
        return Computer(str(source), mode, dtype, blocks)

    return make
