"""The entry of the frontend process, which the launcher starts:
`python -m pdd_runtime.frontend --graph FILE.json --discovery HOST:PORT --epoch E [--index N --fd F --replaces]`.

The graph's secret is in the environment, `PDD_SECRET`. It ends at EOF on stdin, or after the running answers at
SIGTERM (exit code 0), and when it cannot start (3; the error is on stderr).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import uvloop
from pydantic import ValidationError

from pdd_runtime.discovery import open_discovery
from pdd_runtime.errors import GraphError, PddError
from pdd_runtime.frontend.bulletin import Bulletin
from pdd_runtime.frontend.doors import Access
from pdd_runtime.frontend.experiment import Experiment
from pdd_runtime.frontend.presence import Presence
from pdd_runtime.frontend.server import listen, more_files, url
from pdd_runtime.frontend.servers import Servers, admin_socket
from pdd_runtime.frontend.service import Service
from pdd_runtime.frontend.siblings import Siblings
from pdd_runtime.graph import Graph
from pdd_runtime.observe import Timelines, serve_vitals
from pdd_runtime.pipeline import Driver
from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.certificate import tls_of
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.plugins.lines import Lines
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.rpc import Greeting, RpcServer
from pdd_runtime.waiting import watched
from pdd_runtime.worker.lifetime import Lifetime, race

log = logging.getLogger("pdd_runtime.frontend")

PATIENCE = 8.0
"""Seconds that running answers have to end after SIGTERM; with what follows the process is gone within 10."""
LINGER = 0.5
"""Seconds after which nothing more is expected on a connection that is open: it is closed at a drain. A client that
sends at that very moment would not know whether it was heard."""
CANNOT_START = 3
_HOST = "127.0.0.1"
"""Where its message plane listens: who asks there is on the same host."""
_LOOK_EVERY = 0.05
_YOUNG = 20_000
"""New objects after which the collector looks for cycles. Answers in flight have many objects and few cycles: with
Python's 700 a tenth of the time goes into looking."""


def main() -> None:
    options = _parse()
    gc.set_threshold(_YOUNG)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        graph = _read_graph(options.graph)
        frontend = graph.spec.frontend
        key = WorkerKey("frontend", options.index, options.epoch)
        more_files()
        with ExitStack() as stack:
            shared = options.fd is not None or len(graph.frontends) > 1
            sock = stack.enter_context(_given(options.fd) or listen(frontend.host, frontend.port, shared=shared))
            admin = admin_socket(frontend, shared=shared)
            if admin is not None:
                stack.enter_context(admin)
            uvloop.run(_run(graph, options, key, sock, admin, shared=shared))
    except PddError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(CANNOT_START)


def _given(descriptor: int | None) -> socket.socket | None:
    if descriptor is None:
        return None
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)


async def _run(
    graph: Graph,
    options: argparse.Namespace,
    key: WorkerKey,
    sock: socket.socket,
    admin: socket.socket | None,
    *,
    shared: bool,
) -> None:
    """Serve on `sock` for a lifetime; what is for operators on `admin`, where there is one. `shared`: others may serve
    on them, too. Raises `PddError` where it cannot start."""
    lifetime = Lifetime()
    cluster, secret = graph.frontends[key.index], os.environ.get("PDD_SECRET", "")
    plugins, tls = load_plugins(lazily=True), tls_of(graph, cluster)
    discovery = open_discovery(graph, plugins, options.discovery, secret, tls, tuple(options.succeeds))
    greeting = Greeting(graph=graph.name, secret=secret, cluster=cluster, name=str(key), epoch=key.epoch)
    timelines, frontend = Timelines(), graph.spec.frontend
    access = Access.of(frontend, secret)
    try:
        lines, plane = Lines(graph, cluster), RpcServer(greeting, tls=tls)
        lines.serve(plane)
        serve_vitals(plane)
        driver = Driver(graph, plugins, discovery, greeting, lines, timelines, tls)
        try:
            member = Member(
                key=key,
                role="frontend",
                cluster=cluster,
                state="ready",
                pid=os.getpid(),
                endpoint=url(sock, tls=frontend.tls is not None),
                admin=url(admin, tls=frontend.tls is not None) if admin else "",
                plane=await plane.start(_HOST),
            )
            await driver.start()
            experiment = Experiment.of(graph, options.graph.parent)
            bulletin = Bulletin(experiment, secret, key) if experiment and shared else None
            service = Service(driver, timelines, frontend.deadline, experiment)
            siblings = Siblings(service, key if shared else None, tls, bulletin, several=len(graph.frontends) > 1)
            servers = Servers(service, siblings, access, frontend, sock, admin)
            presence = Presence(discovery, member, bulletin)
            if not shared:
                await _serve(service, servers, presence, lifetime)
            else:
                await siblings.start(discovery, greeting, plane)
                await _serve_among(siblings, service, servers, presence, lifetime, options.replaces)
        finally:
            await plane.close()
            await driver.close()
    finally:
        await discovery.close()


async def _serve_among(
    siblings: Siblings,
    service: Service,
    servers: Servers,
    presence: Presence,
    lifetime: Lifetime,
    replaces: bool,
) -> None:
    """Serve beside others. One that comes to a port on which others answer takes its share of the connections only
    when it can answer, too; until then, as in a graph that is just starting, it is listed as starting, or, where it
    replaces one, not at all."""
    try:
        await race(_may_listen(siblings, service, presence, replaces), lifetime.over())
        await _serve(service, servers, presence, lifetime, late=True)
    finally:
        await siblings.close()


async def _may_listen(siblings: Siblings, service: Service, presence: Presence, replaces: bool) -> None:
    if not replaces:
        await presence.show("starting")
    if await siblings.serving() or replaces:
        await _until_ready(service)


async def _until_ready(service: Service) -> None:
    while service.why_not_ready() is not None:  # noqa: ASYNC110 - readiness is worked out when asked, it has no event
        await asyncio.sleep(_LOOK_EVERY)


async def _serve(
    service: Service,
    servers: Servers,
    presence: Presence,
    lifetime: Lifetime,
    *,
    late: bool = False,
) -> None:
    """`late`: it is announced when it is ready, not before."""
    serving = asyncio.create_task(servers.serve(), name="http server")
    warming = asyncio.create_task(service.warm(), name="tokenizer")
    watched(warming, "the tokenizer is left to the first request")
    telling = asyncio.create_task(presence.keep(), name="telling other frontends")
    watched(telling, "the other frontends are not told any more what is decided")

    async def over() -> None:
        await race(lifetime.over(), asyncio.wait([serving]))

    try:
        if late:
            await race(_until_ready(service), over())
        # The kernel takes connections since `listen`, so who finds the URL gets an answer.
        if await race(presence.show("ready"), over()) == 0:
            member = presence.member
            log.info("listening on %s%s", member.endpoint, f", for operators on {member.admin}" if member.admin else "")
            await over()
        if lifetime.orphaned.is_set() or serving.done():
            await service.stop(0.0)
        else:
            log.info("draining: what has come is answered")
            await servers.leave()
            patience = PATIENCE if lifetime.patience is None else lifetime.patience
            leaving = asyncio.create_task(_tell_draining(presence), name="telling discovery")
            await service.stop(patience, lambda: servers.quiet(LINGER))
            # At once: what came now would be refused.
            servers.hang_up()
            leaving.cancel()
            await asyncio.wait([leaving])
        # It would tell of one that is there.
        telling.cancel()
        await asyncio.wait([telling])
        await presence.leave()
    finally:
        warming.cancel()
        telling.cancel()
        servers.stop()
        await asyncio.wait([serving, warming, telling])
    serving.result()


async def _tell_draining(presence: Presence) -> None:
    # Where another has taken its place over, that is what discovery knows.
    with suppress(PddError):
        await presence.show("draining")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m pdd_runtime.frontend", description="The frontend of a graph.")
    parser.add_argument("--graph", type=Path, required=True, help="the graph as JSON")
    parser.add_argument("--discovery", required=True, help="the address that discovery is given")
    parser.add_argument("--epoch", required=True)
    parser.add_argument("--index", type=int, default=0, help="which of the frontend's replicas")
    parser.add_argument("--fd", type=int, help="the socket on which to listen, and on which a successor will go on")
    parser.add_argument("--succeeds", action="append", default=[], help="digest of what the graph was before")
    parser.add_argument("--replaces", action="store_true", help="be seen only when ready: another has its place")
    return parser.parse_args()


def _read_graph(path: Path) -> Graph:
    try:
        return Graph.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise GraphError("the graph cannot be read", where=str(path), why=str(error)) from None


if __name__ == "__main__":
    main()
