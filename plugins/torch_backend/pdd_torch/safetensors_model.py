"""A Llama model in a directory: config.json, *.safetensors, tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdd_runtime.errors import EngineError
from pdd_runtime.inprocess import tokenizer
from pdd_runtime.inprocess.source import hash_files
from pdd_runtime.plugins.engine import TokenizerFiles
from pdd_torch.architecture import from_config_json
from pdd_torch.source import Source


class SafetensorsModel(Source):
    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.resolve().name
        try:
            self._config = json.loads((path / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise EngineError("the directory has no readable config.json", where=str(path), why=str(error)) from error
        self.architecture = from_config_json(self._config, str(path / "config.json"))
        self.files = sorted(path.glob("*.safetensors"))
        self._where: dict[str, Path] = {}
        for file in self.files:
            try:
                with safe_open(file, framework="pt") as tensors:
                    self._where.update(dict.fromkeys(tensors.keys(), file))
            except (OSError, SafetensorError) as error:
                raise EngineError("not a safetensors file", where=str(file), why=str(error)) from error

    def digest(self) -> str:
        return hash_files(self.files, json.dumps(self._config, sort_keys=True).encode())

    def tensor(self, name: str) -> Tensor:
        if name not in self._where:
            raise EngineError(f"no *.safetensors file here has the tensor {name}", where=str(self.path))
        with safe_open(self._where[name], framework="pt") as tensors:
            tensor: Tensor = tensors.get_tensor(name)
            return tensor

    def tokenizer(self) -> TokenizerFiles:
        return tokenizer.from_directory(self.path)
