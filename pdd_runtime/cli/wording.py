"""How a graph's parts are called in every picture of it."""

from __future__ import annotations

from pdd_runtime.graph import Edge, Graph, Link, Pool
from pdd_runtime.graph.units import write_bandwidth, write_duration


def pool_label(name: str, pool: Pool) -> str:
    """`2 × torch`, and the role where the name does not say it."""
    role = "" if pool.role == name else f", {pool.role}"
    return f"{pool.replicas} × {pool.engine.plugin}{role}"


def address(graph: Graph) -> str:
    """Where the frontend listens."""
    frontend = graph.spec.frontend
    return f"{frontend.host}:{frontend.port or 'any free port'}"


def frontend_label(graph: Graph) -> str:
    """`127.0.0.1:8000`, with the number of its processes where there are several."""
    replicas = graph.spec.frontend.replicas
    return f"{replicas} × {address(graph)}" if replicas > 1 else address(graph)


def cargo(edge: Edge) -> str:
    """What an edge carries."""
    return "token IDs" if edge.carries == "tokens" else "KV"


def carrier(edge: Edge) -> str:
    """By which transport; empty for tokens."""
    return f"by {edge.transport.plugin}" if edge.transport else ""


def link_label(link: Link) -> str:
    emulated = ", emulated" if link.emulate else ""
    return f"{write_bandwidth(link.bandwidth)}, {write_duration(link.rtt)} there and back{emulated}"


def title(graph: Graph) -> str:
    model = graph.spec.model
    return f"{model.source}, {model.dtype}, {model.mode} mode"
