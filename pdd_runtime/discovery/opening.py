"""The graph's own way to find processes, as each of its processes has it."""

from __future__ import annotations

from pdd_runtime.discovery.mark import mark_of
from pdd_runtime.graph import Graph
from pdd_runtime.graph.secrets import revealed
from pdd_runtime.plugins import PluginManager
from pdd_runtime.plugins.discovery import Discovery
from pdd_runtime.rpc import Tls


def open_discovery(
    graph: Graph,
    plugins: PluginManager,
    address: str,
    secret: str,
    tls: Tls | None = None,
    succeeds: tuple[str, ...] = (),
) -> Discovery:
    """`address`: where the graph's launcher answers; `succeeds`: as in `GraphMark`. Raises `PluginError`."""
    reference = graph.spec.discovery
    kind = plugins.discovery(reference.plugin)
    where = "spec.discovery.config"
    config = plugins.configure(kind, revealed(reference.config, where), where)
    discovery = kind(config, address, secret, mark_of(graph, succeeds))
    discovery.tls = tls
    return discovery
