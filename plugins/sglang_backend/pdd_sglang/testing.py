"""Real SGLang servers for tests, started once and attached to by one engine after another."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from pdd_runtime.errors import EngineError
from pdd_runtime.graph import Role
from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.server.process import free_port
from pdd_runtime.testing import attached_engine
from pdd_runtime.testing.running_server import RunningServer
from pdd_sglang.config import SglangConfig
from pdd_sglang.engine import SglangEngine

PYTHON = "PDD_SGLANG_PYTHON"
"""The environment variable with the interpreter of an environment that has SGLang, and `pdd-sglang-cpu`."""
START = "30min"
"""What a server may take to start on a machine that has other things to do."""
_FLUSH = 30.0
_LOADING = 300.0
_LIBRARIES = "libibverbs1 librdmacm1 libnuma1 libcurl4"
_LINKER = {
    "--enable-unified-cache-external-linker": 0,
    "--unified-cache-external-linker-backend": 1,
    "--unified-cache-external-linker-config": 1,
}
"""Flags by which a server shares its KV, and how many words follow each."""


def interpreter() -> Path:
    """Skips the test where none is given."""
    python = os.environ.get(PYTHON)
    if not python:
        pytest.skip(f"{PYTHON} names no interpreter of an environment with SGLang; `make test-sglang` makes one")
    return Path(python)


def settings() -> SglangConfig:
    """Of a small server on a CPU."""
    return SglangConfig.model_validate({**_small(), "kv_memory": "16MiB"})


def transfer_settings() -> SglangConfig:
    """Of one that moves its KV itself. It gives a transfer up before a test gives it up. Skips the test where Mooncake
    cannot be loaded."""
    command = [str(interpreter()), "-c", "import mooncake.engine"]
    loading = subprocess.run(command, capture_output=True, text=True, timeout=_LOADING)
    if loading.returncode:
        said = loading.stderr.strip().splitlines()[-1:]
        pytest.skip(f"Mooncake cannot be loaded: {said}; on Debian it needs {_LIBRARIES}")
    return SglangConfig.model_validate({**_small(), "data_plane": "mooncake_tcp", "transfer_timeout": "15s"})


def _small() -> dict[str, object]:
    return {
        "python": interpreter(),
        "device": "cpu",
        "batch_limit": 8,
        "token_budget": 64,
        "engine_kv_memory": "16MiB",
        "start_timeout": START,
        "health_timeout": "60s",
    }


class AttachedEngine(attached_engine.AttachedEngine, SglangEngine):
    """An engine at one of the servers that are free, its cache empty."""

    config: SglangConfig

    @classmethod
    def forget(cls, url: str) -> None:
        answer = httpx.post(f"{url}/flush_cache", timeout=_FLUSH)
        if answer.status_code != 200:
            raise EngineError("SGLang still has a request of an earlier test", where=url, why=answer.text)


@contextmanager
def servers(configs: Sequence[SglangConfig], model: ModelSpec, directory: Path) -> Iterator[list[SglangConfig]]:
    """Yields the settings of engines that attach to them; `AttachedEngine` takes these."""
    with attached_engine.servers(SglangEngine, AttachedEngine, configs, model, directory) as attached:
        yield attached


@contextmanager
def transferring(model: ModelSpec, directory: Path, *roles: Role) -> Iterator[dict[Role, SglangConfig]]:
    """A server for each role, that moves its KV itself; they start all at once. Gives how engines attach to them."""
    config, attaching = transfer_settings(), {}
    with ExitStack() as stack:
        running = {}
        for role in roles:
            place = directory / role
            place.mkdir()
            port, socket = free_port(), place / "agent"
            launch = _made(config, model, role).launch(Path(model.source), port, str(socket))
            running[role] = stack.enter_context(RunningServer(launch, place))
            attached = {"url": f"http://127.0.0.1:{port}", "socket": socket}
            attaching[role] = config.model_copy(update=attached)

        async def all_served() -> None:
            async with asyncio.TaskGroup() as tasks:
                for role, server in running.items():
                    tasks.create_task(server.until_served(_made(attaching[role], model, role)))

        asyncio.run(all_served())
        yield attaching


def _made(config: SglangConfig, model: ModelSpec, role: Role) -> SglangEngine:
    engine = SglangEngine(config, model)
    engine.role = role
    return engine


@contextmanager
def plain(config: SglangConfig, model: ModelSpec, directory: Path) -> Iterator[str]:
    """A server without the linker; its address."""
    port = free_port()
    launch = SglangEngine(config, model).launch(Path(model.source), port, "none")
    argv = list(launch.argv)
    for flag, values in _LINKER.items():
        start = argv.index(flag)
        del argv[start : start + 1 + values]
    url = f"http://127.0.0.1:{port}"
    with RunningServer(replace(launch, argv=tuple(argv)), directory) as server:
        server.until_well(f"{url}/ready", config.start_timeout)
        yield url
