"""Real SGLang servers for tests, started once and attached to by one engine after another."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar

import httpx
import pytest
from pydantic import BaseModel

from pdd_runtime.clock import now
from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.server import guardian
from pdd_runtime.server.process import free_port
from pdd_runtime.testing.engine_harness import StoreHost
from pdd_sglang.config import SglangConfig
from pdd_sglang.engine import SglangEngine

PYTHON = "PDD_SGLANG_PYTHON"
"""The environment variable with the interpreter of an environment that has SGLang, and `pdd-sglang-cpu`."""
START = "30min"
"""What a server may take to start on a machine that has other things to do."""
_FLUSH = 30.0
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
    return SglangConfig.model_validate(
        {
            "python": interpreter(),
            "device": "cpu",
            "batch_limit": 8,
            "token_budget": 64,
            "kv_memory": "16MiB",
            "engine_kv_memory": "16MiB",
            "start_timeout": START,
        }
    )


class Server:
    """One, as an engine starts it, but until the end of a `with`."""

    def __init__(self, config: SglangConfig, model: ModelSpec, directory: Path) -> None:
        self._config, self._model, self._directory = config, model, directory
        port, socket = free_port(), directory / "agent"
        shared = config.model_dump(include={"block_size", "batch_limit", "kv_memory", "start_timeout"})
        self.attached = SglangConfig(url=f"http://127.0.0.1:{port}", socket=socket).model_copy(update=shared)
        """Settings of an engine that attaches to it."""
        self._launch = SglangEngine(config, model).launch(Path(model.source), port, str(socket))

    def __enter__(self) -> Server:
        self._launch.write_files(self._directory)
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, *self._launch.argv],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                env=self._launch.environment(os.environ),
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    async def first(self) -> None:
        """Return when a first worker has come and gone: a linker waits a minute for it, and no longer."""
        engine = SglangEngine(self.attached, self._model)
        starting = asyncio.ensure_future(engine.start(StoreHost()))
        while not starting.done():
            await asyncio.wait({starting}, timeout=0.5)
            if self._process.poll() is not None:
                starting.cancel()
                await asyncio.wait({starting})
                raise RuntimeError(f"SGLang ended:\n{(self._directory / 'log').read_text()[-4000:]}")
        await starting
        await engine.close()


class AttachedEngine(SglangEngine):
    """An engine at one of the servers that are free, whose cache is empty: another instance has another server."""

    free: ClassVar[list[SglangConfig]] = []

    def __init__(self, config: BaseModel, model: ModelSpec) -> None:
        super().__init__(config, model)
        self._server: SglangConfig | None = self.free.pop()
        wanted = {"kv_memory": self.config.kv_memory, "block_size": self.config.block_size}
        self.config = self._server.model_copy(update=wanted)
        answer = httpx.post(f"{self.config.url}/flush_cache", timeout=_FLUSH)
        if answer.status_code != 200:
            raise EngineError("SGLang still has a request of an earlier test", why=answer.text)

    async def close(self) -> None:
        await super().close()
        server, self._server = self._server, None
        if server is not None:
            self.free.append(server)


@contextmanager
def servers(configs: Sequence[SglangConfig], model: ModelSpec, directory: Path) -> Iterator[list[SglangConfig]]:
    """They start all at once. Yields the settings of engines that attach to them; `AttachedEngine` takes these."""
    with ExitStack() as stack:
        running: list[Server] = []
        for number, config in enumerate(configs):
            place = directory / f"server-{number}"
            place.mkdir()
            running.append(stack.enter_context(Server(config, model, place)))

        async def all_first() -> None:
            async with asyncio.TaskGroup() as tasks:
                for server in running:
                    tasks.create_task(server.first())

        asyncio.run(all_first())
        attached = [server.attached for server in running]
        AttachedEngine.free[:] = attached
        try:
            yield attached
        finally:
            AttachedEngine.free.clear()


@contextmanager
def plain(config: SglangConfig, model: ModelSpec, directory: Path) -> Iterator[str]:
    """A server without the linker; yields its address."""
    port = free_port()
    launch = SglangEngine(config, model).launch(Path(model.source), port, "none")
    argv = list(launch.argv)
    for flag, values in _LINKER.items():
        start = argv.index(flag)
        del argv[start : start + 1 + values]
    url = f"http://127.0.0.1:{port}"
    with (directory / "plain-log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guardian.__file__, *argv],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,
            env=launch.environment(os.environ),
            start_new_session=True,
        )
        try:
            until = now() + config.start_timeout
            while not _ready(url):
                if process.poll() is not None or now() > until:
                    raise RuntimeError(f"SGLang did not start:\n{(directory / 'plain-log').read_text()[-4000:]}")
                time.sleep(0.5)
            yield url
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=_FLUSH).status_code == 200
    except httpx.TransportError:
        return False
