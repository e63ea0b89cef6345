"""Loaded by a real vLLM server in place of the connector: the same, but every second load fails half way through."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from pdd_connector.vllm.connector import PddConnector
from pdd_connector.vllm.pages import Array, Copier, Saved


class FailingCopier:
    def __init__(self, copier: Copier) -> None:
        self._copier, self._loads = copier, 0

    def fence(self) -> None:
        self._copier.fence()

    def save(self, pages: Sequence[int], deliver: Callable[[Saved], None]) -> None:
        self._copier.save(pages, deliver)

    def load(self, pages: Sequence[int], blocks: Sequence[Array], tokens: Sequence[int]) -> None:
        self._loads += 1
        if self._loads % 2 == 0:
            self._copier.load(pages, blocks, tokens)
            return
        half = len(pages) // 2
        self._copier.load(pages[:half], blocks[:half], tokens[:half])
        raise OSError("the other half cannot be read")


class FailingConnector(PddConnector):  # type: ignore[misc]
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None
        self._worker._copier = FailingCopier(self._worker._copier)
