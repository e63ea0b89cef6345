"""The launcher process of `up -d`: an order on stdin, one line on stdout when it has begun, another if it fails."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import suppress

import msgspec

from pdd_runtime.errors import PddError
from pdd_runtime.graph import Graph
from pdd_runtime.launch.detached import Order, Said
from pdd_runtime.launch.logs import LauncherLog
from pdd_runtime.launch.part import Part
from pdd_runtime.launch.signals import stopped_by_signals
from pdd_runtime.launch.state import GraphState
from pdd_runtime.launch.supervisor import Supervisor
from pdd_runtime.plugins import load_plugins

log = logging.getLogger("pdd_runtime.launch")


def main() -> int:
    # httpx logs every request, and this process asks the frontend every other second.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
        graph = Graph.model_validate(order.graph)
        state = GraphState(order.part.name(graph))
        logging.basicConfig(level=logging.INFO, handlers=[LauncherLog(state.launcher_log)])
        asyncio.run(_run(graph, state, order.source, order.part))
    except PddError as error:
        log.error("%s", error)
        _say(Said(error.to_wire()))
        return 1
    return 0


async def _run(graph: Graph, state: GraphState, source: str, part: Part) -> None:
    supervisor = Supervisor(graph, load_plugins(), state, source, part=part)
    with stopped_by_signals(supervisor, lambda count: log.info("stopping" if count == 1 else "killing")):
        greeter = asyncio.create_task(_greet(supervisor), name="greeter")
        try:
            await supervisor.run()
        finally:
            greeter.cancel()
            await asyncio.wait([greeter])


async def _greet(supervisor: Supervisor) -> None:
    async for status in supervisor.watch():
        if any(process.pid for process in status.processes):
            _say(Said())
            return


def _say(said: Said) -> None:
    # Whoever ran `up -d` may be gone.
    with suppress(OSError):
        os.write(1, msgspec.json.encode(said) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
