"""Which part of a graph a launcher runs."""

from __future__ import annotations

import msgspec

from pdd_runtime.graph import Graph


class Part(msgspec.Struct, frozen=True):
    """What stands in one cluster, or all of it."""

    cluster: str = ""
    """Empty: all clusters."""
    secret: str = ""
    """By which the processes of all parts know each other; empty: the launcher makes one."""

    def __repr__(self) -> str:
        return f"Part({self.cluster or 'all'})"

    def has(self, cluster: str) -> bool:
        return self.cluster in ("", cluster)

    def has_frontend(self, graph: Graph) -> bool:
        return any(self.has(cluster) for cluster in graph.frontend_clusters)

    def name(self, graph: Graph) -> str:
        """What `ps`, `logs` and `down` call it."""
        return f"{graph.name}@{self.cluster}" if self.cluster else graph.name
