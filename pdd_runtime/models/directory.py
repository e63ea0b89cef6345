"""A model in a directory, as Hugging Face lays it out: config.json, *.safetensors, tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdd_runtime.errors import EngineError
from pdd_runtime.models.digest_cache import digest_files


def read_config(path: Path) -> dict[str, Any]:
    """What `config.json` says. Raises `EngineError` where there is none, or none of that form."""
    try:
        config = json.loads((path / "config.json").read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise EngineError(
            "the directory has no readable config.json",
            where=str(path),
            why=str(error),
            fix="spec.model.source must name a directory with config.json, *.safetensors and tokenizer.json",
        ) from error
    return config


def weight_files(path: Path) -> list[Path]:
    """Its safetensors files, in the order of their names."""
    return sorted(path.glob("*.safetensors"))


def digest(path: Path, config: Mapping[str, Any]) -> str:
    """Hex of a hash over config and weights: the same on every host, whatever the path and however the config is
    spaced. Reads every byte of the weights, but for large ones that have been read before."""
    return digest_files(weight_files(path), json.dumps(config, sort_keys=True).encode())
