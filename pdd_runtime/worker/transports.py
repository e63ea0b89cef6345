"""The transports of one worker: those that the graph's edges to and from its pool name."""

from __future__ import annotations

from typing import Any, Literal

from pdd_runtime.errors import GraphError, TransferError
from pdd_runtime.graph import Graph, PluginRef
from pdd_runtime.graph.secrets import revealed
from pdd_runtime.plugins import PluginManager
from pdd_runtime.plugins.transport import BlockSource, LinkTelemetry, Transport, TransportContext


class Transports:
    """Edges with the same plugin and the same settings share one instance.

    An edge out of the pool is served, an edge into it fetched from. A subscription says all that a sender needs to
    know, so one serving instance for each plugin is enough; it has the settings of the first such edge.
    """

    def __init__(self, graph: Graph, pool: str, plugins: PluginManager, context: TransportContext) -> None:
        """Raises `GraphError` or `PluginError`."""
        self._pool, self._plugins, self._context = pool, plugins, context
        self._instances: dict[tuple[str, str], Transport] = {}
        self._serving: dict[str, Transport] = {}
        self._fetching: dict[tuple[str, str], Transport] = {}
        """By plugin and source pool."""
        self._without: list[int] = []
        """Edges that have no transport."""
        for index, edge in enumerate(graph.spec.edges):
            if edge.carries != "kv" or pool not in (edge.source, edge.target):
                continue
            if edge.transport is None:
                self._without.append(index)
                continue
            plugin, transport = self._instance(graph, index, edge.transport, edge.link)
            if edge.source == pool:
                self._serving.setdefault(plugin, transport)
            else:
                self._fetching.setdefault((plugin, edge.source), transport)

    def check(self, kv: Literal["portable", "native"]) -> None:
        """Raises `GraphError` where an edge of the pool moves KV of the other kind."""
        if kv == "portable" and self._without:
            raise GraphError(
                "an edge that carries kv has no transport",
                where=f"spec.edges.{self._without[0]}",
                why=f"the engine of pool {self._pool} has portable KV, which a transport moves",
                fix="add transport: {plugin: …}",
            )
        if kv == "native" and self._instances:
            transports = ", ".join(sorted({name for name, _ in self._instances}))
            raise GraphError(
                f"edges of pool {self._pool} have a transport: {transports}",
                where="spec.edges",
                why="its engine has native KV, and moves it itself",
                fix="remove the transport",
            )

    async def serve(self, source: BlockSource, host: str) -> dict[str, str]:
        """Feed subscribers; returns the endpoint of each plugin."""
        return {plugin: await transport.serve(source, host) for plugin, transport in self._serving.items()}

    def fetching(self, plugin: str, source: str) -> Transport:
        """The transport that fetches from pool `source`; from any, where that is empty. Raises `TransferError`."""
        for (name, pool), transport in self._fetching.items():
            if name == plugin and source in ("", pool):
                return transport
        edges = ", ".join(f"{name} from {pool}" for name, pool in self._fetching) or "none"
        raise TransferError(
            f"no edge brings KV to pool {self._pool} over transport {plugin}" + (f" from {source}" if source else ""),
            why=f"the edges into it are: {edges}",
            fix="add that edge to the graph",
        )

    def telemetry(self) -> tuple[LinkTelemetry, ...]:
        """What they have seen of the ways to other clusters."""
        return tuple(link for transport in self._instances.values() for link in transport.telemetry())

    async def close(self) -> None:
        for transport in self._instances.values():
            await transport.close()

    def _instance(self, graph: Graph, index: int, named: PluginRef, link: str | None) -> tuple[str, Transport]:
        cls = self._plugins.transport(named.plugin)
        config: dict[str, Any] = dict(named.config)
        if link is not None and "streams" in cls.Config.model_fields:
            config.setdefault("streams", graph.spec.links[link].streams)
        where = f"spec.edges.{index}.transport.config"
        checked = self._plugins.configure(cls, revealed(config, where), where=where)
        key = (cls.name, checked.model_dump_json())
        if key not in self._instances:
            self._instances[key] = cls(checked, self._context)
        return cls.name, self._instances[key]
