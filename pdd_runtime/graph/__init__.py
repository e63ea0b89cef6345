"""The declared graph: its form, loading with file:line errors, whole-graph checks."""

from __future__ import annotations

from pdd_runtime.graph.exposure import leaves_host
from pdd_runtime.graph.faults import GraphErrors, nearest
from pdd_runtime.graph.links import link_between
from pdd_runtime.graph.loading import LoadedGraph, load, loads
from pdd_runtime.graph.models import (
    Cluster,
    Edge,
    Experiment,
    Frontend,
    Graph,
    Guardrails,
    Link,
    Model,
    PluginRef,
    Pool,
    Recovery,
    Role,
    Spec,
    Variant,
)

__all__ = [
    "Cluster",
    "Edge",
    "Experiment",
    "Frontend",
    "Graph",
    "GraphErrors",
    "Guardrails",
    "Link",
    "LoadedGraph",
    "Model",
    "PluginRef",
    "Pool",
    "Recovery",
    "Role",
    "Spec",
    "Variant",
    "leaves_host",
    "link_between",
    "load",
    "loads",
    "nearest",
]
