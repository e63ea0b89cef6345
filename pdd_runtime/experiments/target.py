"""What is measured: a graph that is brought up for it, or one that runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.experiments.running import running
from pdd_runtime.graph import Graph
from pdd_runtime.launch import GraphStatus
from pdd_runtime.plugins import PluginManager


class Watcher(Protocol):
    """Hears how a measurement goes on."""

    def starting(self, name: str, status: GraphStatus) -> None: ...

    def warming(self, name: str) -> None: ...

    def ended(self, name: str, outcome: Outcome) -> None: ...


@dataclass(frozen=True)
class Target:
    """A graph to be brought up, or one that runs at `url` already."""

    name: str
    graph: Graph | None
    source: str = ""
    url: str = ""


@asynccontextmanager
async def brought_up(
    target: Target, plugins: PluginManager, watcher: Watcher, wait_timeout: float | None
) -> AsyncIterator[str]:
    """The URL of `target`, which is up as long as this is used. Raises `LaunchError` where it does not come up, in
    `wait_timeout` seconds where that is given."""
    if target.url:
        yield target.url
        return
    assert target.graph is not None
    with TemporaryDirectory(prefix="pdd-bench-", ignore_cleanup_errors=True) as directory:
        up = running(
            target.graph,
            target.source,
            plugins,
            Path(directory),
            lambda status: watcher.starting(target.name, status),
            wait_timeout,
        )
        async with up as url:
            yield url
