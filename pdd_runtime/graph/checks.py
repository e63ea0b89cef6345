"""Whole-graph checks: what no single key can get wrong on its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from pdd_runtime.errors import GraphError
from pdd_runtime.graph.document import Document, Route
from pdd_runtime.graph.exposure import check_doors, check_exposure
from pdd_runtime.graph.faults import nearest
from pdd_runtime.graph.links import link_between
from pdd_runtime.graph.models import Edge, Graph
from pdd_runtime.graph.routes import check_routes
from pdd_runtime.graph.scene import Scene
from pdd_runtime.graph.secrets import check_secrets
from pdd_runtime.graph.variants import check_variants, named_by_variants

_MAY_FEED = {
    "kv": {("prefill", "relay"), ("prefill", "main"), ("relay", "main")},
    "tokens": {("relay", "main")},
}


def check(graph: Graph, document: Document) -> list[GraphError]:
    """All that is wrong. Checks that build on names run only when every name is right."""
    scene = Scene(graph, document)
    names = [*_names(scene)]
    if names:
        return names
    return [error for look in _CHECKS for error in look(scene)]


def _names(scene: Scene) -> Iterator[GraphError]:
    """Clusters, pools and links are referred to by names that exist."""
    spec = scene.spec

    def unknown(kind: str, name: str, known: dict[str, object], route: Route) -> Iterator[GraphError]:
        if name not in known:
            names = ", ".join(known) or "none"
            fix = nearest(name, known) or f"add it below spec.{kind}s, or name one that is there"
            yield scene.error(route, f'there is no {kind} "{name}"', why=f"the {kind}s are: {names}", fix=fix)

    for name, link in spec.links.items():
        for end, cluster in enumerate(link.between):
            yield from unknown("cluster", cluster, dict(spec.clusters), ("spec", "links", name, "between", end))
    for name, pool in spec.pools.items():
        yield from unknown("cluster", pool.cluster, dict(spec.clusters), ("spec", "pools", name, "cluster"))
        if name == "frontend":
            yield GraphError(
                'no pool can be called "frontend"',
                where=scene.document.locate_key(("spec", "pools", name)),
                why="the frontend is a process of its own in every graph, listed beside the pools",
                fix="give the pool another name",
            )
    for index, edge in enumerate(spec.edges):
        yield from unknown("pool", edge.source, dict(spec.pools), ("spec", "edges", index, "from"))
        yield from unknown("pool", edge.target, dict(spec.pools), ("spec", "edges", index, "to"))
        if edge.link is not None:
            yield from unknown("link", edge.link, dict(spec.links), ("spec", "edges", index, "link"))
    for name in spec.admission.pools:
        yield from unknown("pool", name, dict(spec.pools), ("spec", "admission", "pools", name))
    for name in spec.admission.links:
        yield from unknown("link", name, dict(spec.links), ("spec", "admission", "links", name))
    for name, route in named_by_variants(scene):
        yield from unknown("pool", name, dict(spec.pools), route)
    if spec.experiment.control is not None:
        yield from unknown("variant", spec.experiment.control, dict(spec.variants), ("spec", "experiment", "control"))
    for name in scene.graph.frontend_clusters if spec.frontend.cluster else ():
        yield from unknown("cluster", name, dict(spec.clusters), ("spec", "frontend", "cluster"))


def _links(scene: Scene) -> Iterator[GraphError]:
    """A link joins two clusters, and no other link joins the same two."""
    seen: dict[frozenset[str], str] = {}
    for name, link in scene.spec.links.items():
        route = ("spec", "links", name, "between")
        a, b = link.between
        pair = frozenset(link.between)
        if a == b:
            yield scene.error(
                route,
                f'link "{name}" joins {a} with itself',
                why="inside a cluster the network needs no link",
                fix="name two clusters",
            )
        elif pair in seen:
            yield scene.error(
                route,
                f'links "{seen[pair]}" and "{name}" both join {a} and {b}',
                why="a pair of clusters has one link, which all their traffic shares",
                fix="remove one of them",
            )
        seen.setdefault(pair, name)


def _edges(scene: Scene) -> Iterator[GraphError]:
    """Each edge by itself: its ends, what it carries, its transport and its link."""
    seen: dict[tuple[str, str, str], int] = {}
    for index, edge in enumerate(scene.spec.edges):
        route: Route = ("spec", "edges", index)
        ends = (scene.role(edge.source), scene.role(edge.target))
        arrow = f"{edge.source} → {edge.target}"
        key = (edge.source, edge.target, edge.carries)
        if edge.source == edge.target:
            yield scene.error(
                route,
                f'pool "{edge.source}" feeds itself',
                why="what a pool has made is in it already",
                fix="remove the edge, or name another pool",
            )
            continue
        if "aggregated" in ends:
            yield scene.error(
                route,
                f"edge {arrow} joins an aggregated pool",
                why="an aggregated pool prefills and decodes on its own; nothing feeds it, and it feeds nothing",
                fix="remove the edge, or change the pool's role",
            )
            continue
        if ends not in _MAY_FEED[edge.carries]:
            yield scene.error(
                route,
                f"edge {arrow} carries {edge.carries} from a {ends[0]} pool to a {ends[1]} pool",
                why="kv goes prefill → relay, prefill → main and relay → main; tokens go relay → main",
                fix=_redirected(ends, edge),
            )
            continue
        if key in seen:
            yield scene.error(
                route,
                f"edge {arrow} carrying {edge.carries} is there twice",
                why=f"spec.edges.{seen[key]} says the same",
                fix="remove one of them",
            )
        seen.setdefault(key, index)
        yield from _transport(scene, edge, route, arrow)
        yield from _crossing(scene, edge, route, arrow)


def _redirected(ends: tuple[str, str], edge: Edge) -> str:
    """What an edge that carries the wrong thing, or the wrong way, was probably meant to be."""
    if ends[::-1] in _MAY_FEED[edge.carries]:
        return f"turn it round: {{from: {edge.target}, to: {edge.source}, carries: {edge.carries}}}"
    other = "kv" if edge.carries == "tokens" else "tokens"
    return f"set carries: {other}" if ends in _MAY_FEED[other] else "remove the edge, or change a pool's role"


def _transport(scene: Scene, edge: Edge, route: Route, arrow: str) -> Iterator[GraphError]:
    if edge.carries == "tokens" and edge.transport is not None:
        yield scene.error(
            (*route, "transport"),
            f"edge {arrow} carries tokens and has a transport",
            why="tokens go over the message plane; a transport moves kv",
            fix="remove the transport",
        )


def _crossing(scene: Scene, edge: Edge, route: Route, arrow: str) -> Iterator[GraphError]:
    a, b = scene.cluster(edge.source), scene.cluster(edge.target)
    joining = link_between(scene.graph, a, b)
    if a == b and edge.link is not None:
        yield scene.error(
            (*route, "link"),
            f'edge {arrow} has link "{edge.link}", but both pools are in {a}',
            why="links lie between clusters",
            fix="remove the link, or move a pool",
        )
    elif a != b and edge.link is None:
        fix = f"add link: {joining[0]}" if joining else f"declare a link between {a} and {b}, and name it here"
        yield scene.error(
            route,
            f"edge {arrow} crosses from {a} to {b} and has no link",
            why="traffic between clusters goes over a declared link",
            fix=fix,
        )
    elif a != b and edge.link is not None and set(scene.spec.links[edge.link].between) != {a, b}:
        there = " and ".join(scene.spec.links[edge.link].between)
        yield scene.error(
            (*route, "link"),
            f'edge {arrow} crosses from {a} to {b}, but link "{edge.link}" joins {there}',
            why="an edge crosses the link between the clusters of its two pools",
            fix=f"use link: {joining[0]}" if joining else f"declare a link between {a} and {b}",
        )


def _models(scene: Scene) -> Iterator[GraphError]:
    """Who passes KV or tokens to another computes the same model: each pool with a model of its own is told once."""
    told: set[str] = set()
    for edge in scene.spec.edges:
        ends = (edge.source, edge.target)
        ours, theirs = (scene.graph.model_of(pool) for pool in ends)
        one_engine = len({scene.spec.pools[pool].engine.plugin for pool in ends}) == 1
        # Each engine has its own names for models, so sources of two engines say nothing. KV of another dtype is
        # converted by who receives it, but then it is not bit for bit what exact mode computes.
        exact = "exact" in (ours.mode, theirs.mode)
        for key in (*(("source",) if one_engine else ()), *(("dtype",) if exact else ()), "mode"):
            a, b = getattr(ours, key), getattr(theirs, key)
            own = next((pool for pool in reversed(ends) if scene.spec.pools[pool].model), edge.target)
            if a == b or own in told:
                continue
            told.add(own)
            yield scene.error(
                ("spec", "pools", own, "model", key),
                f'pools "{ends[0]}" and "{ends[1]}" do not compute the same model: {key} is {a} and {b}',
                why=f"{edge.carries} of the one would mean something else to the other, which refuses it",
                fix="set spec.model for all pools; a pool's own `model` replaces it whole",
            )


def _relays(scene: Scene) -> Iterator[GraphError]:
    """A relay hides the WAN from the user, so its own KV must not cross it."""
    for index, edge in enumerate(scene.spec.edges):
        if (edge.carries, scene.role(edge.source), scene.role(edge.target)) != ("kv", "prefill", "relay"):
            continue
        a, b = scene.cluster(edge.source), scene.cluster(edge.target)
        if a != b:
            yield scene.error(
                ("spec", "edges", index),
                f'relay pool "{edge.target}" is in {b}, but its prefill pool "{edge.source}" is in {a}',
                why="a relay decodes while the KV crosses to main; behind the same link it would wait just as long",
                fix=f"put the relay pool into {a}, or leave the relay out",
            )


def _frontend(scene: Scene) -> Iterator[GraphError]:
    """The frontend talks to every pool, so a link must lead to each."""
    homes = scene.graph.frontend_clusters
    for home in homes:
        if homes.count(home) > 1:
            yield scene.error(
                ("spec", "frontend", "cluster"),
                f"the frontend stands in {home} twice",
                why="spec.frontend.replicas says how many processes it has in each of its clusters",
                fix="name each cluster once",
            )
            return
    for home, (name, pool) in product(homes, scene.spec.pools.items()):
        if pool.cluster != home and link_between(scene.graph, home, pool.cluster) is None:
            where = "the frontend stands" if len(homes) == 1 else "a frontend stands"
            yield scene.error(
                ("spec", "pools", name),
                f'no link joins {home}, where {where}, and {pool.cluster}, where pool "{name}" is',
                why="the frontend drives every session: it sends tokens to each pool",
                fix="declare that link, or move the frontend with spec.frontend.cluster",
            )


_CHECKS: tuple[Callable[[Scene], Iterator[GraphError]], ...] = (
    _links,
    _edges,
    _models,
    _relays,
    check_routes,
    check_variants,
    _frontend,
    check_exposure,
    check_doors,
    check_secrets,
)
