"""Real vLLM servers for tests, started once and attached to by one engine after another."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from pydantic import BaseModel

from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.server.launch import Launch
from pdd_runtime.server.process import free_port
from pdd_runtime.testing import attached_engine
from pdd_runtime.testing.running_server import RunningServer
from pdd_vllm.config import VllmConfig
from pdd_vllm.engine import VllmEngine

PYTHON = "PDD_VLLM_PYTHON"
"""The environment variable with the interpreter of an environment that has vLLM."""
START = "30min"
"""What a server may take to start on a machine that has other things to do."""
HEALTH = "60s"
"""And to answer."""
BLOCK = 32
"""Tokens in a block: the fewest that vLLM on a CPU has in a page."""
CPU = {
    # Some small functions would be compiled by the first request that needs them, which takes minutes.
    "TORCHDYNAMO_DISABLE": "1",
    # For /reset_prefix_cache.
    "VLLM_SERVER_DEV_MODE": "1",
}
_RESET = 30.0


def interpreter() -> Path:
    """Skips the test where none is given."""
    python = os.environ.get(PYTHON)
    if not python:
        pytest.skip(f"{PYTHON} names no interpreter of an environment with vLLM; `make test-vllm` makes one")
    return Path(python)


def settings() -> VllmConfig:
    """Of a small server on a CPU."""
    return VllmConfig.model_validate(
        {
            "python": interpreter(),
            "block_size": BLOCK,
            "threads": 1,
            "batch_limit": 8,
            "kv_memory": "64MiB",
            "engine_kv_memory": "64MiB",
            "args": ("--enforce-eager",),
            "env": CPU,
            "start_timeout": START,
            "health_timeout": HEALTH,
        }
    )


def native(lease: str) -> VllmConfig:
    """The same, whose KV goes by vLLM's own transfer. NIXL on a CPU stands still for half a minute now and then, so a
    reader needs a long lease."""
    timeouts = {"start_timeout": START, "health_timeout": HEALTH}
    config = settings().model_dump(mode="json", exclude_unset=True, exclude={"kv_memory", *timeouts})
    of_nixl = {"data_plane": "nixl", "nixl_port": free_port(), "lease": lease}
    return VllmConfig.model_validate({**config, **timeouts, **of_nixl})


class AttachedEngine(attached_engine.AttachedEngine, VllmEngine):
    """An engine at one of the servers that are free, its cache empty."""

    config: VllmConfig

    def __init__(self, config: BaseModel, model: ModelSpec) -> None:
        assert isinstance(config, VllmConfig)
        if config.block_size != BLOCK:
            pytest.skip(f"vLLM on a CPU has pages of {BLOCK} tokens, or of more")
        super().__init__(config, model)

    @classmethod
    def forget(cls, url: str) -> None:
        httpx.post(f"{url}/reset_prefix_cache", timeout=_RESET).raise_for_status()


@contextmanager
def servers(configs: Sequence[VllmConfig], model: ModelSpec, directory: Path) -> Iterator[list[VllmConfig]]:
    """Yields the settings of engines that attach to them; `AttachedEngine` takes these."""
    with attached_engine.servers(VllmEngine, AttachedEngine, configs, model, directory) as attached:
        yield attached


@contextmanager
def plain(model: Path, directory: Path) -> Iterator[str]:
    """A server that knows nothing of us; its address."""
    port = free_port()
    argv = (
        *(str(interpreter()), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--dtype", "float32", "--block-size", str(BLOCK), "--port", str(port), "--host", "127.0.0.1"),
        *("--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager", "--generation-config", "vllm"),
    )
    env = {**CPU, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    env |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    url = f"http://127.0.0.1:{port}"
    with RunningServer(Launch(argv, env), directory) as server:
        server.until_well(f"{url}/health", settings().start_timeout)
        yield url
