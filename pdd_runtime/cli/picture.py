"""A graph as a small picture for the terminal."""

from __future__ import annotations

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from pdd_runtime.cli import wording
from pdd_runtime.graph import Edge, Graph

ROLE_STYLE = {"prefill": "cyan", "relay": "yellow", "main": "green", "aggregated": "green", "frontend": "magenta"}


def picture(graph: Graph) -> RenderableType:
    """Clusters as boxes with their pools, and below them who feeds whom over what."""
    spec = graph.spec
    title = Text.assemble((graph.name, "bold"), ("  serves ", "dim"), wording.title(graph))
    boxes = Columns([_box(graph, cluster) for cluster in spec.clusters], padding=(0, 1))
    lines: list[RenderableType] = [title, boxes, *(_arrow(graph, edge) for edge in spec.edges)]
    return Group(*lines, *(_variant(graph, name) for name in spec.variants))


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
    if cluster in graph.frontend_clusters:
        style = ROLE_STYLE["frontend"]
        lines.append(Text.assemble((f"{'frontend':<{width}}", style), f"  {wording.frontend_label(graph)}"))
    return Panel(Text("\n").join(lines) if lines else Text("no pools", "dim"), title=cluster, expand=False)


def _variant(graph: Graph, name: str) -> Text:
    variants = graph.spec.variants
    share = variants[name].weight / sum(variant.weight for variant in variants.values())
    own = variants[name]
    what = [f"by {own.routing.plugin}"] if own.routing else []
    what += [f"hands off by {own.handoff.plugin}"] if own.handoff else []
    what += [f"in {', '.join(own.pools)}"] if own.pools else []
    role = " (control)" if name == graph.control else ""
    return Text.assemble(
        "  variant ", (name, "bold"), f"{role}  {share:.0%} of requests", ("".join(f", {w}" for w in what), "dim")
    )


def _arrow(graph: Graph, edge: Edge) -> Text:
    source, target = graph.spec.pools[edge.source], graph.spec.pools[edge.target]
    over = f" {wording.carrier(edge)}" if edge.transport else ""
    link = f", {edge.link}: {wording.link_label(graph.spec.links[edge.link])}" if edge.link else ""
    return Text.assemble(
        "  ",
        (edge.source, ROLE_STYLE[source.role]),
        (f" ──{wording.cargo(edge)}──▶ ", "bold"),
        (edge.target, ROLE_STYLE[target.role]),
        (f"{over}{link}", "dim"),
    )
