"""Which link joins two clusters."""

from __future__ import annotations

from pdd_runtime.graph.models import Graph, Link


def link_between(graph: Graph, a: str, b: str) -> tuple[str, Link] | None:
    """The link that joins clusters `a` and `b`, with its name; None: none does, or they are one cluster."""
    for name, link in graph.spec.links.items():
        if a != b and {a, b} == set(link.between):
            return name, link
    return None
