"""What each process of a graph is made from: as long as that is the same, it need not be started anew. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdd_runtime.graph import Graph
from pdd_runtime.launch.part import Part
from pdd_runtime.launch.slot import FRONTEND, Slot

Form = Mapping[str, Any]
"""Plain values by the names that they have in the graph, below `spec`."""

_OF_WORKERS = ("replicas", "hardware", "env", "engine", "model")
"""What a frontend does not go by of a pool."""


def forms(graph: Graph, part: Part) -> dict[Slot, Form]:
    """Of every process of the part, in the order in which they are started."""
    wanted: dict[Slot, Form] = {}
    for name, pool in graph.spec.pools.items():
        if part.has(pool.cluster):
            form = worker_form(graph, name)
            wanted.update((Slot(name, index), form) for index in range(pool.replicas))
    if part.has_frontend(graph):
        form = frontend_form(graph)
        here = (index for index, cluster in enumerate(graph.frontends) if part.has(cluster))
        wanted.update((Slot(FRONTEND, index), form) for index in here)
    return wanted


def worker_form(graph: Graph, name: str) -> Form:
    """Of the workers of a pool. Edges count by what they make the worker do: another reader of what it serves anyway
    changes nothing."""
    spec = graph.model_dump(mode="json", by_alias=True)["spec"]
    pool = {key: value for key, value in spec["pools"][name].items() if key not in ("replicas", "hardware")}
    cluster = pool["cluster"]
    serves: dict[str, Any] = {}
    fetches: dict[str, Any] = {}
    native = False
    for edge in spec["edges"]:
        if edge["carries"] != "kv" or name not in (edge["from"], edge["to"]):
            continue
        if edge["transport"] is None:
            native = True
            continue
        transport = {**edge["transport"], "streams": _streams(spec, edge["link"])}
        if edge["from"] == name:
            serves.setdefault(transport["plugin"], transport)
        else:
            fetches.setdefault(f"{transport['plugin']} from {edge['from']}", transport)
    return {
        "pools": {name: {**pool, "model": graph.model_of(name).model_dump(mode="json")}},
        "clusters": {cluster: spec["clusters"][cluster]},
        "links": {link: value for link, value in spec["links"].items() if cluster in value["between"]},
        "edges": {"serves": serves, "fetches": fetches, "native": native},
    }


def frontend_form(graph: Graph) -> Form:
    """Of the frontends: all that they do not leave to the workers."""
    spec = graph.model_dump(mode="json", by_alias=True)["spec"]
    pools = {
        name: {key: value for key, value in pool.items() if key not in _OF_WORKERS}
        for name, pool in spec["pools"].items()
    }
    return {**{key: value for key, value in spec.items() if key != "model"}, "pools": pools}


def _streams(spec: Mapping[str, Any], link: str | None) -> int | None:
    streams: int | None = spec["links"][link]["streams"] if link is not None else None
    return streams
