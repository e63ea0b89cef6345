"""A graph as a small picture for the terminal."""

from __future__ import annotations

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from pdd_runtime.graph import Edge, Graph, Link
from pdd_runtime.graph.units import write_bandwidth, write_duration

ROLE_STYLE = {"prefill": "cyan", "relay": "yellow", "main": "green", "aggregated": "green", "frontend": "magenta"}


def picture(graph: Graph) -> RenderableType:
    """Clusters as boxes with their pools, and below them who feeds whom over what."""
    spec = graph.spec
    model = f"{spec.model.source}, {spec.model.dtype}, {spec.model.mode} mode"
    title = Text.assemble((graph.name, "bold"), ("  serves ", "dim"), model)
    boxes = Columns([_box(graph, cluster) for cluster in spec.clusters], padding=(0, 1))
    lines: list[RenderableType] = [title, boxes, *(_arrow(graph, edge) for edge in spec.edges)]
    return Group(*lines)


def _box(graph: Graph, cluster: str) -> Panel:
    pools = {name: pool for name, pool in graph.spec.pools.items() if pool.cluster == cluster}
    width = max([len(name) for name in pools] + [len("frontend")])
    lines = [
        Text.assemble(
            (f"{name:<{width}}", ROLE_STYLE[pool.role]),
            f"  {pool.replicas} × {pool.engine.plugin}",
            ("" if pool.role == name else f"  {pool.role}", "dim"),
        )
        for name, pool in pools.items()
    ]
    if cluster == graph.frontend_cluster:
        port = graph.spec.frontend.port or "any free port"
        style = ROLE_STYLE["frontend"]
        lines.append(Text.assemble((f"{'frontend':<{width}}", style), f"  {graph.spec.frontend.host}:{port}"))
    return Panel(Text("\n").join(lines) if lines else Text("no pools", "dim"), title=cluster, expand=False)


def _arrow(graph: Graph, edge: Edge) -> Text:
    source, target = graph.spec.pools[edge.source], graph.spec.pools[edge.target]
    what = "token IDs" if edge.carries == "tokens" else "KV"
    over = f" by {edge.transport.plugin}" if edge.transport else ""
    link = f", {edge.link}: {_describe(graph.spec.links[edge.link])}" if edge.link else ""
    return Text.assemble(
        "  ",
        (edge.source, ROLE_STYLE[source.role]),
        (f" ──{what}──▶ ", "bold"),
        (edge.target, ROLE_STYLE[target.role]),
        (f"{over}{link}", "dim"),
    )


def _describe(link: Link) -> str:
    emulated = ", emulated" if link.emulate else ""
    return f"{write_bandwidth(link.bandwidth)}, {write_duration(link.rtt)} there and back{emulated}"
