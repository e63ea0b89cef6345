"""Whether all that moves KV is encrypted, where a graph has TLS."""

from __future__ import annotations

from collections.abc import Iterator

from pdd_runtime.errors import GraphError
from pdd_runtime.graph import LoadedGraph
from pdd_runtime.plugins.manager import PluginManager


def in_clear(loaded: LoadedGraph, plugins: PluginManager) -> Iterator[GraphError]:
    """Edges whose KV goes in clear, between clusters that do not both call that their will."""
    spec = loaded.graph.spec
    if spec.security.tls is None:
        return
    for index, edge in enumerate(spec.edges):
        pools = (spec.pools[edge.source], spec.pools[edge.target])
        if edge.carries != "kv" or all(spec.clusters[pool.cluster].insecure for pool in pools):
            continue
        if edge.transport is None:
            mover = f"engine {pools[0].engine.plugin}, which moves it itself,"
        elif not plugins.transport(edge.transport.plugin).encrypts:
            mover = f"transport {edge.transport.plugin}"
        else:
            continue
        yield GraphError(
            f"edge {edge.source} → {edge.target} moves KV in clear, and the graph has TLS",
            where=loaded.locate(("spec", "edges", index)),
            why=f"{mover} has no TLS",
            fix="take a transport that has it, such as tcp; or, in a network that nobody else can read, write "
            "insecure: true beside both clusters",
        )
