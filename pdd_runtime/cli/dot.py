"""A graph in the language of Graphviz."""

from __future__ import annotations

from pdd_runtime.cli import wording
from pdd_runtime.graph import Graph

_FILL = {
    "prefill": "#d7f0f5",
    "relay": "#fdf0c4",
    "main": "#d9f2dd",
    "aggregated": "#d9f2dd",
    "frontend": "#f1ddf5",
}


def dot(graph: Graph) -> str:
    spec = graph.spec
    lines = [
        f"digraph {_quoted(graph.name)} {{",
        "  rankdir=LR; compound=true; nodesep=0.5; ranksep=1.6;",
        f"  label={_quoted(f'{graph.name} serves {wording.title(graph)}')}; labelloc=t;",
        '  fontname="Helvetica"; node [fontname="Helvetica", shape=box, style="rounded,filled"];',
        '  edge [fontname="Helvetica", fontsize=10];',
    ]
    for cluster in spec.clusters:
        lines.append(f"  subgraph {_quoted(f'cluster_{cluster}')} {{")
        lines.append(f'    label={_quoted(cluster)}; style=rounded; color="#9ca3af";')
        if cluster in graph.frontend_clusters:
            lines.append(_node("frontend", wording.frontend_label(graph), "frontend"))
        for name, pool in spec.pools.items():
            if pool.cluster == cluster:
                lines.append(_node(name, wording.pool_label(name, pool), pool.role))
        lines.append("  }")
    for edge in spec.edges:
        words = [f"{wording.cargo(edge)} {wording.carrier(edge)}".strip()]
        if edge.link:
            words.append(f"{edge.link}: {wording.link_label(spec.links[edge.link])}")
        style = "dashed" if edge.carries == "tokens" else "bold"
        label = _quoted("\n".join(words))
        lines.append(f"  {_quoted(edge.source)} -> {_quoted(edge.target)} [label={label}, style={style}];")
    return "\n".join([*lines, "}"]) + "\n"


def _node(name: str, about: str, role: str) -> str:
    label = _quoted(f"{name}\n{about}")
    return f'    {_quoted(name)} [label={label}, fillcolor="{_FILL[role]}"];'


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
