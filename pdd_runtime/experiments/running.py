"""A graph that is up for a measurement only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from pdd_runtime.errors import LaunchError
from pdd_runtime.graph import Graph
from pdd_runtime.launch import GraphState, GraphStatus, Supervisor
from pdd_runtime.plugins import PluginManager

_PATIENCE = 5.0
"""Seconds that requests get at the end; after a measurement there are none."""


@asynccontextmanager
async def running(
    graph: Graph,
    source: str,
    plugins: PluginManager,
    directory: Path,
    on_status: Callable[[GraphStatus], None],
    wait_timeout: float | None = None,
) -> AsyncIterator[str]:
    """Bring `graph` up, give its URL, and take it down. Its state lies in `directory`, so that the user's own graphs
    are not touched; its processes end with this one, however it ends. Raises `LaunchError`, also where it is not ready
    in `wait_timeout` seconds."""
    supervisor = Supervisor(graph, plugins, GraphState(graph.name, directory), source)
    supervising = asyncio.create_task(supervisor.run(), name=f"supervisor of {graph.name}")
    try:
        try:
            async with asyncio.timeout(wait_timeout):
                url = await _ready(supervisor, supervising, on_status)
        except TimeoutError:
            raise LaunchError(
                f"graph {graph.name} is not ready after {wait_timeout:g} s",
                why=supervisor.status().missing,
                fix="--wait-timeout gives it longer; `pdd-runtime up` shows what its processes log",
            ) from None
        yield url
    finally:
        supervisor.stop(_PATIENCE)
        await asyncio.wait([supervising])
        if not supervising.cancelled():
            # A start that failed was raised already.
            supervising.exception()


async def _ready(
    supervisor: Supervisor, supervising: asyncio.Task[None], on_status: Callable[[GraphStatus], None]
) -> str:
    url = asyncio.create_task(_url(supervisor.watch(), on_status), name="until ready")
    try:
        await asyncio.wait([url, supervising], return_when=asyncio.FIRST_COMPLETED)
        if url.done():
            return url.result()
        supervising.result()
        raise LaunchError(f"graph {supervisor.graph.name} was stopped while it started")
    finally:
        url.cancel()
        await asyncio.wait([url])


async def _url(statuses: AsyncGenerator[GraphStatus, None], on_status: Callable[[GraphStatus], None]) -> str:
    async with aclosing(statuses):
        async for status in statuses:
            on_status(status)
            if status.ready and all(process.state == "ready" for process in status.processes):
                return status.url
    raise AssertionError("a supervisor's status is endless")
