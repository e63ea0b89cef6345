"""The graph's edges, as routing and sessions ask for them."""

from __future__ import annotations

from collections.abc import Collection

from pdd_runtime.errors import GraphError
from pdd_runtime.graph import Graph
from pdd_runtime.plugins.routing import EdgeView


class Edges:
    """Which pool feeds which."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.views = tuple(
            EdgeView(source=edge.source, target=edge.target, carries=edge.carries, link=edge.link)
            for edge in graph.spec.edges
        )

    def feeds(self, source: str, target: str) -> bool:
        """An edge carries KV from pool to pool."""
        return any((edge.source, edge.target, edge.carries) == (source, target, "kv") for edge in self.views)

    def transport(self, source: str, target: str) -> str | None:
        """The name of the transport plugin that moves KV from pool to pool; None: their engines move it themselves.
        Raises `GraphError` where no edge carries it."""
        for edge in self._graph.spec.edges:
            if (edge.source, edge.target, edge.carries) == (source, target, "kv"):
                return None if edge.transport is None else edge.transport.plugin
        raise GraphError(f"no edge carries kv from {source} to {target}")

    def require_relay_kv(self, strategy: str, among: Collection[str] | None = None) -> None:
        """For a strategy that moves the relay's KV. Raises `GraphError` where a relay pool lacks the edge for it.
        `among`: the pools it is used with; None: all."""
        pools = self._graph.spec.pools
        for edge in self.views:
            if edge.carries != "tokens" or pools[edge.source].role != "relay":
                continue
            if among is not None and edge.source not in among:
                continue
            try:
                transport = self.transport(edge.source, edge.target)
            except GraphError:
                link = f", link: {edge.link}" if edge.link else ""
                raise GraphError(
                    f"handoff strategy {strategy} moves KV from {edge.source} to {edge.target}, and no edge carries it",
                    where="spec.handoff",
                    fix=f"add to spec.edges: {{from: {edge.source}, to: {edge.target}, carries: kv, "
                    f"transport: {{plugin: …}}{link}}}, or choose a strategy that hands off token IDs",
                ) from None
            if transport is None:
                raise GraphError(
                    f"handoff strategy {strategy} moves KV from {edge.source} to {edge.target}",
                    where="spec.handoff",
                    why="their engines have native KV: they give out what they have prefilled, not what they decode",
                    fix="choose a strategy that hands off token IDs",
                )
