"""A model whose weights torch can read: a GGUF file, or a directory of safetensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING

from pdd_runtime.models.source import find_model
from pdd_runtime.plugins.engine import TokenizerFiles
from pdd_torch.architecture import Architecture

if TYPE_CHECKING:
    from torch import Tensor


class Source(ABC):
    """A model as it lies on disk. Tensors have their Hugging Face names, `[out, in]`, with half-split rotary rows."""

    name: str
    """What users call the model."""
    architecture: Architecture
    files: list[Path]
    """Where the weights lie."""

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @abstractmethod
    def digest(self) -> str:
        """Hex of a hash over weights and config: the same on every host, whatever the path."""

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """One tensor in float32 or as stored. Raises `EngineError` where it is missing."""

    @abstractmethod
    def tokenizer(self) -> TokenizerFiles: ...


def open_source(source: str) -> Source:
    """Raises `EngineError` where nothing is found under this name, or it is a model this engine cannot compute."""
    from pdd_torch.gguf_model import GgufModel
    from pdd_torch.safetensors_model import SafetensorsModel

    found = find_model(source)
    return SafetensorsModel(found.path) if found.path.is_dir() else GgufModel(found.path, found.name)
