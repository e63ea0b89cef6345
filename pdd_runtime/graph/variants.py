"""Whether what a graph's traffic is split between can serve it."""

from __future__ import annotations

from collections.abc import Iterator

from pdd_runtime.errors import GraphError
from pdd_runtime.graph.document import Route
from pdd_runtime.graph.models import Experiment
from pdd_runtime.graph.scene import Scene


def check_variants(scene: Scene) -> Iterator[GraphError]:
    """Each has a whole route in its pools, one of them gets requests, and no pool is left to nobody."""
    spec, at = scene.spec, ("spec", "variants")
    if not spec.variants:
        if spec.experiment != Experiment():
            yield scene.error(
                ("spec", "experiment"),
                "there is nothing to split traffic between",
                why="spec.experiment says how requests are split between spec.variants, and there are none",
                fix="declare them: spec.variants: {a: {weight: 9}, b: {weight: 1, routing: {plugin: …}}}",
            )
        return
    if not any(variant.weight for variant in spec.variants.values()):
        yield scene.error(at, "no variant gets any requests", why="all weights are 0", fix="give one of them a weight")
    for name, variant in spec.variants.items():
        if variant.pools is not None and not _serves(scene, frozenset(variant.pools)):
            yield scene.error(
                (*at, name, "pools"),
                f'variant "{name}" has no whole route',
                why="its pools hold no aggregated one, and no prefill pool that feeds a main pool of theirs with kv",
                fix="name both ends of such an edge, or an aggregated pool",
            )
    taken = {pool for variant in spec.variants.values() for pool in variant.pools or spec.pools}
    for pool in spec.pools:
        if pool not in taken:
            yield scene.error(
                ("spec", "pools", pool),
                f'no variant takes pool "{pool}"',
                why="every variant names the pools that it takes, and this one is not among them",
                fix="add it to spec.variants.NAME.pools, or remove it",
            )


def named_by_variants(scene: Scene) -> Iterator[tuple[str, Route]]:
    """The pools that variants name, and where."""
    for name, variant in scene.spec.variants.items():
        for index, pool in enumerate(variant.pools or ()):
            yield pool, ("spec", "variants", name, "pools", index)


def _serves(scene: Scene, pools: frozenset[str]) -> bool:
    if any(scene.role(pool) == "aggregated" for pool in pools):
        return True
    ends = (
        (scene.role(edge.source), scene.role(edge.target))
        for edge in scene.spec.edges
        if edge.carries == "kv" and pools.issuperset((edge.source, edge.target))
    )
    return ("prefill", "main") in ends
