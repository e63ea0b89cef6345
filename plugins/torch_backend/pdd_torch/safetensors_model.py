"""A Llama model in a directory: config.json, *.safetensors, tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdd_runtime.errors import EngineError
from pdd_runtime.models import directory, tokenizer
from pdd_runtime.plugins.engine import TokenizerFiles
from pdd_torch.architecture import from_config_json
from pdd_torch.source import Source


class SafetensorsModel(Source):
    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.resolve().name
        self._config = directory.read_config(path)
        self.architecture = from_config_json(self._config, str(path / "config.json"))
        self.files = directory.weight_files(path)
        self._where: dict[str, Path] = {}
        for file in self.files:
            try:
                with safe_open(file, framework="pt") as tensors:
                    self._where.update(dict.fromkeys(tensors.keys(), file))
            except (OSError, SafetensorError) as error:
                raise EngineError("not a safetensors file", where=str(file), why=str(error)) from error

    def digest(self) -> str:
        return directory.digest(self.path, self._config)

    def tensor(self, name: str) -> Tensor:
        if name not in self._where:
            raise EngineError(f"no *.safetensors file here has the tensor {name}", where=str(self.path))
        with safe_open(self._where[name], framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
            return tensor

    def tokenizer(self) -> TokenizerFiles:
        return tokenizer.from_directory(self.path)
