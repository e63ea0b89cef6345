"""Which graph a process belongs to, and in what two graphs of one name differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pdd_runtime.graph import Graph
from pdd_runtime.plugins.discovery import GraphMark

_OWN_OF_POOL = frozenset({"replicas", "hardware", "env"})
ABSENT = "nothing"
"""What stands in for a value that one side lacks."""


def mark_of(graph: Graph, succeeds: tuple[str, ...] = ()) -> GraphMark:
    """Left out is what only the processes of one cluster go by: how many replicas a pool has, its environment and its
    engine's settings, addresses, where discovery's servers are, and the SLO. `succeeds`: digests of what the graph was
    before."""
    spec = graph.spec.model_dump(mode="json", by_alias=True)
    pools = {}
    for name, pool in spec["pools"].items():
        shared = {key: value for key, value in pool.items() if key not in _OWN_OF_POOL}
        pools[name] = {**shared, "engine": pool["engine"]["plugin"], "model": graph.model_of(name).model_dump()}
    frontends = graph.frontend_clusters
    shared = {
        "clusters": sorted(spec["clusters"]),
        "links": spec["links"],
        "pools": pools,
        "edges": spec["edges"],
        "routing": spec["routing"],
        "handoff": spec["handoff"],
        "frontend": {"cluster": graph.frontend_cluster if len(frontends) == 1 else list(frontends)},
        "discovery": spec["discovery"]["plugin"],
    }
    return GraphMark(name=graph.name, digest=_digest(shared), shared=shared, succeeds=succeeds)


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Each differing part as `spec.links.wan.rtt: 0.05 here, 0.09 there`."""
    return [f"{part}: {shown(a)} here, {shown(b)} there" for part, a, b in differing("spec", ours, theirs)]


def _digest(shared: Mapping[str, Any]) -> str:
    canonical = json.dumps(shared, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def differing(part: str, ours: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    """Where below `part` the two have different values, and which."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in sorted({*ours, *theirs}):
            yield from differing(f"{part}.{key}", ours.get(key, ABSENT), theirs.get(key, ABSENT))
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differing(f"{part}.{index}", mine, other)
    elif ours != theirs:
        yield part, ours, theirs


def shown(value: Any) -> str:
    """A value as a message has it."""
    text = value if value is ABSENT else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:79]}…"
