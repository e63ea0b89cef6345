"""Fields that a request has and nobody knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel


def unknown_fields(model: type[BaseModel], data: Mapping[str, Any], prefix: str = "") -> list[str]:
    """By their full names, as `stream_options.include_usages`: those of `data` that `model` would ignore."""
    if model.model_config.get("extra") == "allow":
        return []
    fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    found: list[str] = []
    for name, value in data.items():
        if name not in fields:
            found.append(prefix + name)
        elif isinstance(value, Mapping):
            for inner in _models(fields[name]):
                found += unknown_fields(inner, value, f"{prefix}{name}.")
    return found


def _models(annotation: Any) -> list[type[BaseModel]]:
    return [
        kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type) and issubclass(kind, BaseModel)
    ]
