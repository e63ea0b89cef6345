"""Starting the stand-in: for engines to attach to, or to be asked as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import yaml
from pydantic import BaseModel

from pdd_runtime.graph import Role
from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.server.process import free_port
from pdd_runtime.testing.running_server import RunningServer
from pdd_trtllm.config import TrtllmConfig
from pdd_trtllm.engine import TrtllmEngine
from pdd_trtllm.launch import FILE, launch

SITE = Path(__file__).parent / "site"
"""Has a `tensorrt_llm` that is the stand-in."""
_PATIENCE = 120.0
"""Seconds until it listens: it imports torch."""


def environment(**more: str) -> dict[str, str]:
    """With which an interpreter that has this package and torch runs the stand-in for TensorRT-LLM."""
    return {"PYTHONPATH": str(SITE), **more}


@contextmanager
def running(
    config: TrtllmConfig, model: ModelSpec, directory: Path, socket: Path | None, role: Role = "aggregated", **env: str
) -> Iterator[str]:
    """A stand-in for the model in `model.source`, in a pool of that role; gives its url. Its connector dials `socket`,
    and it does not listen before a worker is there; with None it has no connector, and listens. `directory` is for its
    files and its log."""
    port, path = free_port(), Path(model.source)
    found = launch(config.model_copy(update={"env": environment(**env)}), model, path, port, str(socket), role)
    if socket is None:
        file = yaml.safe_load(found.files[FILE])
        file.pop("kv_connector_config", None)
        found = replace(found, files={FILE: yaml.safe_dump(file)})
    url = f"http://127.0.0.1:{port}"
    with RunningServer(found, directory) as server:
        if socket is None:
            server.until_well(f"{url}/health", _PATIENCE)
        yield url


@contextmanager
def attaching(directory: Path, role: Role = "aggregated", **env: str) -> Iterator[type[TrtllmEngine]]:
    """An engine, for pools of that role, each of whose instances attaches to a stand-in with its settings that no other
    one has: to one that ran before, where there is one, for a start takes longer than all that a test asks of it. They
    remember the prompts of the instances before."""
    numbers = count()
    free: dict[str, list[TrtllmConfig]] = {}
    with ExitStack() as stack:

        class Attaching(TrtllmEngine):
            def __init__(self, config: BaseModel, model: ModelSpec) -> None:
                assert isinstance(config, TrtllmConfig)
                wanted = config.model_copy(update={"url": None, "socket": None})
                self._free = free.setdefault(wanted.model_dump_json(), [])
                super().__init__(self._free.pop() if self._free else _started(wanted, model), model)
                self._left = False

            async def close(self) -> None:
                await super().close()
                if not self._left:
                    self._left = True
                    self._free.append(self.config)

        def _started(config: TrtllmConfig, model: ModelSpec) -> TrtllmConfig:
            place = directory / f"{role}-{next(numbers)}"
            place.mkdir()
            socket = place / "agent" if config.by_socket else None
            url = stack.enter_context(running(config, model, place, socket, role, **env))
            return config.model_copy(update={"url": url, "socket": socket})

        yield Attaching
