"""The entry of the frontend process, which the launcher starts:
`python -m pdd_runtime.frontend --graph FILE.json --discovery HOST:PORT --epoch E`.

The graph's secret is in the environment, `PDD_SECRET`. It ends at EOF on stdin, or after the running answers at
SIGTERM (exit code 0), and when it cannot start (3; the error is on stderr).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from pathlib import Path

from pydantic import ValidationError

from pdd_runtime.errors import GraphError, PddError
from pdd_runtime.frontend.app import create_app
from pdd_runtime.frontend.server import create_server, listen, url
from pdd_runtime.frontend.service import Service
from pdd_runtime.graph import Graph
from pdd_runtime.observe import Timelines
from pdd_runtime.pipeline import Driver
from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.discovery import Discovery, Member
from pdd_runtime.plugins.lines import Lines
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.rpc import Greeting
from pdd_runtime.worker.lifetime import Lifetime, race

log = logging.getLogger("pdd_runtime.frontend")

PATIENCE = 8.0
"""Seconds that running answers have to end after SIGTERM; with what follows the process is gone within 10."""
CANNOT_START = 3


def main() -> None:
    options = _parse()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        graph = _read_graph(options.graph)
        with listen(graph.spec.frontend.host, graph.spec.frontend.port) as sock:
            asyncio.run(_run(graph, options.discovery, options.epoch, os.environ.get("PDD_SECRET", ""), sock))
    except PddError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(CANNOT_START)


async def _run(graph: Graph, registry: str, epoch: str, secret: str, sock: socket.socket) -> None:
    """Serve on `sock` for a lifetime. Raises `PddError` where it cannot start."""
    lifetime = Lifetime()
    key, cluster = WorkerKey("frontend", 0, epoch), graph.frontend_cluster
    plugins = load_plugins()
    kind = plugins.discovery(graph.spec.discovery.plugin)
    config = plugins.configure(kind, graph.spec.discovery.config, "spec.discovery.config")
    discovery = kind(config, registry, secret)
    greeting = Greeting(graph=graph.name, secret=secret, cluster=cluster, name=str(key), epoch=epoch)
    timelines = Timelines()
    try:
        driver = Driver(graph, plugins, discovery, greeting, Lines(graph, cluster), timelines)
        member = Member(key=key, role="frontend", cluster=cluster, state="ready", pid=os.getpid(), endpoint=url(sock))
        try:
            await driver.start()
            await _serve(Service(driver, timelines), discovery, member, sock, lifetime)
        finally:
            await driver.close()
    finally:
        await discovery.close()


async def _serve(
    service: Service, discovery: Discovery, member: Member, sock: socket.socket, lifetime: Lifetime
) -> None:
    server = create_server(create_app(service))
    serving = asyncio.create_task(server.serve(sockets=[sock]), name="http server")
    warming = asyncio.create_task(service.warm(), name="tokenizer")
    try:
        # The kernel takes connections since `listen`, so who finds the URL gets an answer.
        if await race(discovery.register(member), lifetime.over()) == 0:
            log.info("listening on %s", member.endpoint)
            await lifetime.over()
        log.info("stopping")
        await discovery.unregister(member.key)
        await service.stop(0 if lifetime.orphaned.is_set() else PATIENCE)
    finally:
        warming.cancel()
        server.should_exit = True
        await asyncio.wait([serving, warming])
    serving.result()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pdd_runtime.frontend", description="The frontend of a graph.")
    parser.add_argument("--graph", type=Path, required=True, help="the graph as JSON")
    parser.add_argument("--discovery", required=True, help="the address that discovery is given")
    parser.add_argument("--epoch", required=True)
    return parser.parse_args()


def _read_graph(path: Path) -> Graph:
    try:
        return Graph.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise GraphError("the graph cannot be read", where=str(path), why=str(error)) from None


if __name__ == "__main__":
    main()
