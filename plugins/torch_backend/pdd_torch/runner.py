"""The model in its thread: loaded once, then one step at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pdd_runtime.inprocess import Chunk, InProcessConfig, Runner, fingerprint
from pdd_runtime.kv import KvLayout
from pdd_runtime.plugins.engine import ModelSpec
from pdd_torch import weight_cache
from pdd_torch.model import Llama
from pdd_torch.paged_kv import PagedKv
from pdd_torch.source import open_source
from pdd_torch.weights import assemble


class TorchRunner(Runner):
    """Torch keeps its number of cores by thread: another thread would compute with another number."""

    def __init__(self, config: InProcessConfig, spec: ModelSpec) -> None:
        """Loads the weights. Raises `EngineError`."""
        torch.set_num_threads(config.threads)
        self._config, self._spec = config, spec
        self._source = open_source(spec.source)
        self.name, arch = self._source.name, self._source.architecture
        self.vocab, self.context = arch.vocab, min(arch.context, config.context_length or arch.context)
        digest = self._source.digest()
        self.fingerprint = fingerprint(digest, spec, "torch")
        self.layout = KvLayout(
            layers=arch.layers,
            kv_heads=arch.kv_heads,
            head_dim=arch.head_dim,
            dtype=spec.dtype,
            block_size=config.block_size,
        )
        self.tokenizer = self._source.tokenizer()
        self._weights = assemble(weight_cache.load(self._source, digest, getattr(torch, spec.dtype)), arch.layers)

    def open(self, memory: memoryview) -> None:
        self.model = Llama(
            self._source.architecture,
            self._weights,
            PagedKv(self.layout, memory),
            exact=self._spec.mode == "exact",
            most_rows=self._config.token_budget,
            batch_limit=self._config.batch_limit,
        )

    def step(self, chunks: Sequence[Chunk]) -> list[NDArray[np.float32] | None]:
        try:
            rows = iter(self.model.forward(chunks).numpy())
        except RuntimeError as error:
            # Of a CPU's memory torch says so in words alone.
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise MemoryError(str(error)) from error
            raise
        return [next(rows) if chunk.samples else None for chunk in chunks]
