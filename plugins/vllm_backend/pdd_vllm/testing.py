"""Real vLLM servers for tests, started once and attached to by one engine after another."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
from pydantic import BaseModel

from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.server import guardian
from pdd_runtime.server.process import free_port
from pdd_runtime.testing.engine_harness import StoreHost
from pdd_vllm.config import VllmConfig
from pdd_vllm.engine import VllmEngine

PYTHON = "PDD_VLLM_PYTHON"
"""The environment variable with the interpreter of an environment that has vLLM."""
START = "30min"
"""What a server may take to start on a machine that has other things to do."""
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
        }
    )


@contextmanager
def serving(config: VllmConfig, model: ModelSpec, directory: Path) -> Iterator[VllmConfig]:
    """A server as an engine of `config` starts it, until the end; the settings of an engine that attaches to it."""
    port, socket = free_port(), directory / "agent"
    launch = VllmEngine(config, model).launch(Path(model.source), port, str(socket))
    launch.write_files(directory)
    shared = config.model_dump(include={"block_size", "batch_limit", "kv_memory", "start_timeout"})
    attached = VllmConfig(url=f"http://127.0.0.1:{port}", socket=socket).model_copy(update=shared)
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, *launch.argv],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=launch.environment(os.environ),
            start_new_session=True,
        )
        try:
            asyncio.run(_first(VllmEngine(attached, model), process))
            yield attached
        except _Ended as ended:
            raise RuntimeError(f"vLLM {ended}:\n{(directory / 'log').read_text()[-4000:]}") from None
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


class _Ended(Exception):
    """The server did, before it was ready."""


async def _first(engine: VllmEngine, process: subprocess.Popen[bytes]) -> None:
    """Return when a first worker has come and gone. A connector waits a minute for it, and no longer."""
    starting = asyncio.ensure_future(engine.start(StoreHost()))
    while not starting.done():
        await asyncio.wait({starting}, timeout=0.5)
        if process.poll() is not None:
            starting.cancel()
            raise _Ended(f"ended with status {process.returncode}")
    await starting
    await engine.close()


class AttachedEngine(VllmEngine):
    """An engine at one of the servers that are free, its caches empty: another instance has another server."""

    free: ClassVar[list[VllmConfig]] = []

    def __init__(self, config: BaseModel, model: ModelSpec) -> None:
        super().__init__(config, model)
        wanted = self.config
        if wanted.block_size != BLOCK:
            pytest.skip(f"vLLM on a CPU has pages of {BLOCK} tokens, or of more")
        self._server: VllmConfig | None = self.free.pop()
        self.config = self._server.model_copy(update={"kv_memory": wanted.kv_memory})
        httpx.post(f"{self.config.url}/reset_prefix_cache", timeout=_RESET).raise_for_status()

    async def close(self) -> None:
        await super().close()
        server, self._server = self._server, None
        if server is not None:
            self.free.append(server)


@contextmanager
def servers(model: ModelSpec, directory: Path, n: int) -> Iterator[None]:
    """So many servers for `AttachedEngine`."""
    with ExitStack() as stack:
        for number in range(n):
            place = directory / f"server-{number}"
            place.mkdir()
            AttachedEngine.free.append(stack.enter_context(serving(settings(), model, place)))
        try:
            yield
        finally:
            AttachedEngine.free.clear()
