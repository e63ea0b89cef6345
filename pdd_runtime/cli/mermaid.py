"""A graph as a Mermaid flowchart: Markdown on most forges draws it."""

from __future__ import annotations

from pdd_runtime.cli import wording
from pdd_runtime.graph import Graph

_FILL = {
    "prefill": "#d7f0f5,stroke:#0e7490",
    "relay": "#fdf0c4,stroke:#b45309",
    "main": "#d9f2dd,stroke:#15803d",
    "aggregated": "#d9f2dd,stroke:#15803d",
    "frontend": "#f1ddf5,stroke:#86198f",
}


def mermaid(graph: Graph) -> str:
    spec = graph.spec
    lines = ["flowchart LR"]
    for cluster in spec.clusters:
        lines.append(f'  subgraph {_id("cluster", cluster)}["{cluster}"]')
        if cluster in graph.frontend_clusters:
            lines.append(f'    {_id("pool", "frontend")}["frontend<br/>{wording.frontend_label(graph)}"]:::frontend')
        for name, pool in spec.pools.items():
            if pool.cluster == cluster:
                label = f"{name}<br/>{_text(wording.pool_label(name, pool))}"
                lines.append(f'    {_id("pool", name)}["{label}"]:::{pool.role}')
        lines.append("  end")
    for edge in spec.edges:
        arrow = "-.->" if edge.carries == "tokens" else "==>"
        words = [f"{wording.cargo(edge)} {_text(wording.carrier(edge))}".strip()]
        if edge.link:
            words.append(f"{edge.link}: {wording.link_label(spec.links[edge.link])}")
        source, target = _id("pool", edge.source), _id("pool", edge.target)
        lines.append(f'  {source} {arrow}|"{"<br/>".join(words)}"| {target}')
    lines += [f"  classDef {role} fill:{fill},color:#111" for role, fill in _FILL.items()]
    return "\n".join(lines) + "\n"


def _id(kind: str, name: str) -> str:
    """No word of Mermaid's own, such as `end`, and no dash."""
    return f"{kind}_{name.replace('-', '_')}"


def _text(text: str) -> str:
    """Plugins may be called anything."""
    return text.replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")
