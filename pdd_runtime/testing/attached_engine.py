"""One engine after another at servers that were started once: a start takes longer than all that a test asks of it."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import BaseModel

from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.server.config import ServerConfig
from pdd_runtime.server.engine import ServerEngine
from pdd_runtime.server.process import free_port
from pdd_runtime.testing.running_server import RunningServer

C = TypeVar("C", bound=ServerConfig)


class AttachedEngine(ServerEngine):
    """Stands before an engine's class among the bases. Each instance has one of the servers that are free, until it is
    closed; of its settings, those of its own memory are its own, all others are the server's."""

    free: ClassVar[list[ServerConfig]]
    """Of each subclass: how to attach to the servers that no instance has."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.free = []

    def __init__(self, config: BaseModel, model: ModelSpec) -> None:
        """Raises `IndexError` when no server is free."""
        assert isinstance(config, ServerConfig)
        own = {"kv_memory": config.kv_memory, "block_size": config.block_size}
        super().__init__(self.free[-1].model_copy(update=own), model)
        assert self.config.url is not None
        self.forget(self.config.url)
        self._server: ServerConfig | None = self.free.pop()

    @classmethod
    @abstractmethod
    def forget(cls, url: str) -> None:
        """Empty the cache of the server at `url`, which computes nothing. Raises where it cannot."""

    async def close(self) -> None:
        await super().close()
        server, self._server = self._server, None
        if server is not None:
            self.free.append(server)


@contextmanager
def servers(
    engine: type[ServerEngine], attached: type[AttachedEngine], configs: Sequence[C], model: ModelSpec, directory: Path
) -> Iterator[list[C]]:
    """A server for each of `configs`, as `engine` starts it; they start all at once. `attached` takes them, one after
    another. Yields the settings of engines that attach to them. Raises `EngineError` when one does not start."""
    with ExitStack() as stack:
        running, attaching = [], []
        for number, config in enumerate(configs):
            place = directory / f"server-{number}"
            place.mkdir()
            port, socket = free_port(), place / "agent"
            launch = engine(config, model).launch(Path(model.source), port, str(socket))
            running.append(stack.enter_context(RunningServer(launch, place)))
            attaching.append(config.model_copy(update={"url": f"http://127.0.0.1:{port}", "socket": socket}))

        async def all_served() -> None:
            async with asyncio.TaskGroup() as tasks:
                for server, config in zip(running, attaching, strict=True):
                    tasks.create_task(server.until_served(engine(config, model)))

        asyncio.run(all_served())
        attached.free[:] = attaching
        try:
            yield attaching
        finally:
            attached.free.clear()
