"""Whether every pool is on a way that a request can take."""

from __future__ import annotations

from collections.abc import Iterator

from pdd_runtime.errors import GraphError
from pdd_runtime.graph.scene import Scene


def check_routes(scene: Scene) -> Iterator[GraphError]:
    """Every pool is on a whole route: aggregated alone, P-MD, or P-RLD-MD. Both kinds end on main."""
    pools = scene.spec.pools
    mains = {e.target for e in scene.spec.edges if e.carries == "kv" and scene.role(e.source) == "prefill"}
    mains = {name for name in mains if scene.role(name) == "main"}
    if not mains and not any(pool.role == "aggregated" for pool in pools.values()):
        yield scene.error(
            ("spec", "edges") if scene.spec.edges else ("spec",),
            "no request can be served: no whole route",
            why="a route is an aggregated pool, or a prefill pool that feeds a main pool with kv",
            fix="add an edge {from: PREFILL, to: MAIN, carries: kv, transport: …}",
        )
        return
    for name, pool in pools.items():
        route = ("spec", "pools", name)
        if pool.role == "prefill" and not any(scene.fed("kv", name, main) for main in mains):
            yield scene.error(
                route,
                f'prefill pool "{name}" is on no route',
                why="it feeds no main pool with kv, and every route ends on main",
                fix=f"add an edge {{from: {name}, to: MAIN, carries: kv, transport: …}}",
            )
        if pool.role == "main" and name not in mains:
            yield scene.error(
                route,
                f'main pool "{name}" is on no route',
                why="no prefill pool feeds it with kv",
                fix=f"add an edge {{from: PREFILL, to: {name}, carries: kv, transport: …}}",
            )
        if pool.role == "relay":
            yield from _relay_route(scene, name, mains)


def _relay_route(scene: Scene, name: str, mains: set[str]) -> Iterator[GraphError]:
    prefills = [p for p in scene.spec.pools if scene.fed("kv", p, name)]
    targets = [m for m in mains if scene.fed("tokens", name, m) or scene.fed("kv", name, m)]
    if any(scene.fed("kv", prefill, main) for prefill in prefills for main in targets):
        return
    if not prefills:
        why, fix = "no prefill pool feeds it with kv", f"{{from: PREFILL, to: {name}, carries: kv, transport: …}}"
    elif not targets:
        why = "it hands off to no main pool, and every route ends on main"
        fix = f"{{from: {name}, to: MAIN, carries: tokens}}"
    else:
        why = "no prefill pool feeds both it and the main pool that it hands off to"
        fix = f"{{from: {prefills[0]}, to: {targets[0]}, carries: kv, transport: …}}"
    yield scene.error(("spec", "pools", name), f'relay pool "{name}" is on no route', why=why, fix=f"add an edge {fix}")
