"""The model in its thread: loaded once, then one step at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from pdd_runtime.errors import PddError
from pdd_runtime.kv import KvLayout
from pdd_runtime.plugins.engine import ModelSpec, Sampling, Token, TokenizerFiles
from pdd_torch import weight_cache
from pdd_torch.config import TorchConfig
from pdd_torch.guides import Guides
from pdd_torch.model import Llama
from pdd_torch.paged_kv import PagedKv
from pdd_torch.sampler import Sampler
from pdd_torch.source import open_source
from pdd_torch.step import Chunk
from pdd_torch.weights import assemble


class Runner:
    """Every method, the constructor too, runs in the same thread, unless it says otherwise: torch keeps its number of
    cores by thread."""

    def __init__(self, config: TorchConfig, spec: ModelSpec) -> None:
        """Loads the weights. Raises `EngineError`."""
        torch.set_num_threads(config.threads)
        self._config, self._spec = config, spec
        self._source = open_source(spec.source)
        self.name, arch = self._source.name, self._source.architecture
        self.vocab, self.context = arch.vocab, min(arch.context, config.context_length or arch.context)
        digest = self._source.digest()
        # Blocks of the fast mode would break the exact one's promise, and those of another dtype both: no sharing.
        self.fingerprint = f"{digest}-{spec.dtype}-{spec.mode}"
        self.layout = KvLayout(
            layers=arch.layers,
            kv_heads=arch.kv_heads,
            head_dim=arch.head_dim,
            dtype=spec.dtype,
            block_size=config.block_size,
        )
        self.tokenizer: TokenizerFiles = self._source.tokenizer()
        self._weights = assemble(weight_cache.load(self._source, digest, getattr(torch, spec.dtype)), arch.layers)

    def open(self, memory: memoryview) -> None:
        """Compute in these blocks from now on."""
        self.model = Llama(
            self._source.architecture,
            self._weights,
            PagedKv(self.layout, memory),
            exact=self._spec.mode == "exact",
            most_rows=self._config.token_budget,
            batch_limit=self._config.batch_limit,
        )

    @torch.inference_mode()
    def step(self, chunks: list[Chunk]) -> list[Token | PddError | None]:
        """One forward pass: for each chunk the token behind it, where one is wanted, or why none can be chosen."""
        rows = iter(self.model.forward(chunks))
        return [_choose(chunk.sampling, next(rows), chunk.end) if chunk.sampling else None for chunk in chunks]

    def guides(self) -> Guides:
        """In any thread. Raises `EngineError`."""
        return Guides(self.tokenizer, self.vocab)

    def sampler(self, sampling: Sampling, tokens: tuple[int, ...], prompt_tokens: int) -> Sampler:
        """Of a new request; in any thread."""
        return Sampler(sampling, tokens, prompt_tokens)


def _choose(sampler: Sampler, logits: Tensor, position: int) -> Token | PddError:
    """One request's trouble is no other's."""
    try:
        return sampler.sample(logits, position)
    except PddError as error:
        return error
