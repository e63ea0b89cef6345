"""Ports that a graph fixes: each is one process's on its host."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address
from typing import NamedTuple

from pdd_runtime.errors import GraphError
from pdd_runtime.graph import LoadedGraph
from pdd_runtime.graph.document import Route
from pdd_runtime.plugins.manager import PluginManager


class _Listener(NamedTuple):
    who: str
    workers: int
    host: str
    port: int
    setting: Route


def clashes(loaded: LoadedGraph, plugins: PluginManager) -> Iterator[GraphError]:
    """Ports that two would listen on: workers of one pool, of two pools, or a worker and the frontend. Those of an
    engine are its settings `port` and `…_port`; 0 fixes none."""
    taken: dict[tuple[str, int], _Listener] = {}
    for listener in _listeners(loaded, plugins):
        first = taken.setdefault((listener.host, listener.port), listener)
        if first is not listener:
            rival = f"{first.who} listens there as well"
        elif listener.workers > 1:
            rival = f"it has {listener.workers} workers"
        else:
            continue
        yield GraphError(
            f"{listener.who} cannot have port {listener.port}",
            where=loaded.locate(listener.setting),
            why=f"{rival}, and one process alone can listen on a port of a host",
            fix=f"leave {listener.setting[-1]} out, so that each takes a free one, or give each a pool and a port "
            "of its own",
        )


def _listeners(loaded: LoadedGraph, plugins: PluginManager) -> Iterator[_Listener]:
    spec = loaded.graph.spec
    # Without it one launcher starts all of the graph, on its own host.
    spread = plugins.discovery(spec.discovery.plugin).across_hosts
    frontend = spec.frontend
    if frontend.port and _shares_loopback(frontend.host):
        for home in loaded.graph.frontend_clusters if spread else ("",):
            yield _Listener("the frontend", 1, home, frontend.port, ("spec", "frontend", "port"))
    for name, pool in spec.pools.items():
        route = ("spec", "pools", name, "engine")
        config = plugins.configure(plugins.engine(pool.engine.plugin), pool.engine.config, loaded.locate(route))
        for setting in type(config).model_fields:
            port = getattr(config, setting)
            if (setting == "port" or setting.endswith("_port")) and isinstance(port, int) and port:
                place = pool.cluster if spread else ""
                yield _Listener(f'pool "{name}"', pool.replicas, place, port, (*route, "config", setting))


def _shares_loopback(host: str) -> bool:
    """Servers listen on 127.0.0.1."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified
