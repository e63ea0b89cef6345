"""The entry point: what this distribution adds to pdd-runtime."""

from __future__ import annotations

from pdd_runtime.plugins.engine import Engine
from pdd_runtime.plugins.hookspecs import hookimpl
from pdd_vllm.engine import VllmEngine


@hookimpl
def pdd_register_engines() -> list[type[Engine]]:
    return [VllmEngine]
