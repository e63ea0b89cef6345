"""Graphs that differ in nothing but how many workers their pools have."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

import yaml

from pdd_runtime.errors import GraphError, PluginError
from pdd_runtime.graph import Graph, LoadedGraph, PluginRef, loads, nearest
from pdd_runtime.graph.document import Document
from pdd_runtime.graph.units import write_bandwidth
from pdd_runtime.planner.cost import Cost, graph_cost
from pdd_runtime.planner.hardware import counted
from pdd_runtime.planner.plan_spec import Kind, LinkChoice, Plan, PlanError, PoolChoice
from pdd_runtime.planner.prices import Prices
from pdd_runtime.plugins import PluginManager

MOST = 512
"""Families of one plan."""
Data = dict[str, Any]
Sizes = tuple[int, ...]
"""Workers of each pool of a family, in its order."""


@dataclass(frozen=True)
class Family:
    """One choice of everything but the counts."""

    number: int
    data: Data = field(repr=False, compare=False)
    """The graph as its file would say it."""
    choices: Mapping[str, Sizes]
    """By pool, ascending: how many workers it may have; at least 1."""
    kinds: Mapping[str, Kind] = field(repr=False, compare=False)
    """By pool, where the plan chose its hardware."""
    traits: Mapping[str, str]
    """What sets it apart from the plan's other families, for people."""

    @property
    def pools(self) -> tuple[str, ...]:
        return tuple(self.choices)

    def with_sizes(self, sizes: Sizes) -> Data:
        """The graph's data with so many workers."""
        data = copy.deepcopy(self.data)
        for pool, count in zip(self.choices, sizes, strict=True):
            data["spec"]["pools"][pool]["replicas"] = count
        return data

    def graph(self, sizes: Sizes) -> Graph:
        return Graph.model_validate_json(json.dumps(self.with_sizes(sizes)))

    @cached_property
    def smallest(self) -> Graph:
        """The graph with the fewest workers that the choices have."""
        return self.graph(tuple(counts[0] for counts in self.choices.values()))

    def cost(self, sizes: Sizes, prices: Prices, sent: Mapping[str, float] | None = None) -> Cost:
        """`sent`: bytes an hour by link, once they are known. Raises `PriceError`."""
        pools = dict(self.smallest.spec.pools)
        for pool, count in zip(self.choices, sizes, strict=True):
            pools[pool] = pools[pool].model_copy(update={"replicas": count})
        spec = self.smallest.spec.model_copy(update={"pools": pools})
        return graph_cost(self.smallest.model_copy(update={"spec": spec}), prices, sent)


def families(plan: Plan, loaded: LoadedGraph, document: Document) -> tuple[Family, ...]:
    """All that the plan lets vary, and that make a right graph. Raises `PlanError` with the place in the plan, and what
    is wrong with the graphs where none is right."""
    check_names(plan, loaded, document)
    return _families(plan, loaded, document, {})


def without_relays(plan: Plan, loaded: LoadedGraph, document: Document) -> tuple[Family, ...]:
    """The same without any relay, whatever the plan's counts of them are. Raises `PlanError` as `families` does."""
    return _families(plan, loaded, document, {name: [(name, None)] for name in relays(loaded.graph)})


def with_relays(plan: Plan, loaded: LoadedGraph, document: Document) -> tuple[Family, ...]:
    """The same with as many relays as the graph has, where the plan has none. Raises `PlanError` as `families` does."""
    pools = loaded.graph.spec.pools
    there: dict[str, list[tuple[str, Any]]] = {
        name: [(name, ((pools[name].replicas,), kind)) for kind in _choice(plan, name).hardware or (None,)]
        for name in relays(loaded.graph)
    }
    return _families(plan, loaded, document, there)


def relays(graph: Graph) -> tuple[str, ...]:
    """Its pools of that role."""
    return tuple(name for name, pool in graph.spec.pools.items() if pool.role == "relay")


def _choice(plan: Plan, pool: str) -> PoolChoice:
    return plan.spec.pools.get(pool, PoolChoice())


def _families(
    plan: Plan, loaded: LoadedGraph, document: Document, instead: Mapping[str, list[tuple[str, Any]]]
) -> tuple[Family, ...]:
    """`instead`: by pool, its ways where they are not the plan's."""
    spec = plan.spec
    ways: list[list[tuple[str, Any]]] = []
    pools = loaded.graph.spec.pools
    for name in pools:
        if name in instead:
            ways.append(instead[name])
            continue
        choice = _choice(plan, name)
        counts = choice.replicas or (pools[name].replicas,)
        some = tuple(sorted(count for count in counts if count))
        there: list[tuple[str, Any]] = [(name, (some, kind)) for kind in choice.hardware or (None,)] if some else []
        ways.append([*there, *([(name, None)] if 0 in counts else [])])
    for name in loaded.graph.spec.links:
        rates = spec.links.get(name, LinkChoice()).bandwidth or (None,)
        ways.append([(name, rate) for rate in rates])
    ways.append([("routing", each) for each in spec.routing or (None,)])
    ways.append([("handoff", each) for each in spec.handoff or (None,)])
    total = 1
    for way in ways:
        total *= len(way)
    if total > MOST:
        raise PlanError(
            f"the plan has {total} kinds of deployment",
            where=document.locate(("spec",)),
            why=f"each is searched by itself, and {MOST} are allowed; counts of workers do not matter here",
            fix="try fewer kinds of hardware, bandwidths, policies or strategies at once",
        )
    varied = {way[0][0] for way in ways if len(way) > 1}
    made: list[Family] = []
    faults: list[str] = []
    seen: set[str] = set()
    for picked in product(*ways):
        try:
            family = _family(len(made), plan, loaded, dict(picked), varied)
        except GraphError as error:
            faults.append(f"{error.what}: {error.why}")
            continue
        key = json.dumps([family.data, {name: list(counts) for name, counts in family.choices.items()}], sort_keys=True)
        if key not in seen:
            seen.add(key)
            made.append(family)
    if not made:
        raise PlanError(
            "none of the deployments is a right graph",
            where=document.locate(("spec", "pools")),
            why=faults[0],
            fix=_missing(plan, loaded) or "let other pools vary",
        )
    return tuple(made)


def _missing(plan: Plan, loaded: LoadedGraph) -> str:
    """What to do where pools that a route needs have no workers in any deployment."""
    none = [
        name
        for name, pool in loaded.graph.spec.pools.items()
        if pool.role != "relay" and _choice(plan, name).replicas == (0,)
    ]
    return f"let {' and '.join(none)} have workers, e.g. replicas: 1..8" if none else ""


def as_given(number: int, loaded: LoadedGraph) -> Family:
    """The plan's graph as it is, with what `set` changed: what others are compared with."""
    choices = {name: (pool.replicas,) for name, pool in loaded.graph.spec.pools.items()}
    return Family(number, loaded.document.data, choices, {}, {"graph": "as it is"})


def check_names(plan: Plan, loaded: LoadedGraph, document: Document) -> None:
    """Every pool and link that may vary is in the graph. Raises `PlanError`."""
    parts: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
        ("pool", plan.spec.pools, loaded.graph.spec.pools),
        ("link", plan.spec.links, loaded.graph.spec.links),
    )
    for kind, named, known in parts:
        for name in named:
            if name not in known:
                raise PlanError(
                    f'the graph has no {kind} "{name}"',
                    where=document.locate_key(("spec", f"{kind}s", name)),
                    why=f"the {kind}s of {loaded.path} are: {', '.join(known) or 'none'}",
                    fix=nearest(name, known) or f"name one of them, or add {kind} {name} to the graph",
                )


def check_policies(plan: Plan, document: Document, plugins: PluginManager) -> None:
    """Every policy and strategy that the plan names is installed, and has such settings. Raises `PlanError`."""
    for key, some in (("routing", plan.spec.routing), ("handoff", plan.spec.handoff)):
        find = plugins.routing if key == "routing" else plugins.handoff
        for index, ref in enumerate(some or ()):
            try:
                plugins.configure(find(ref.plugin), ref.config, f"spec.{key}")
            except PluginError as error:
                where = document.locate(("spec", key, index))
                raise PlanError(error.what, where=where, why=error.why, fix=error.fix) from error


def _family(number: int, plan: Plan, loaded: LoadedGraph, picked: Mapping[str, Any], varied: set[str]) -> Family:
    """Raises `GraphError` where that is no graph."""
    data = copy.deepcopy(loaded.document.data)
    data["metadata"]["name"] = plan.metadata.name
    spec, traits, choices, kinds = data["spec"], {}, {}, {}
    for name, pool in loaded.graph.spec.pools.items():
        if picked[name] is None:
            _drop(spec, name)
            traits[name] = "none"
            continue
        counts, kind = picked[name]
        if kind is not None:
            _equip(spec["pools"][name], kind, pool.hardware)
            kinds[name] = kind
        if name in varied:
            traits[name] = spec["pools"][name].get("hardware") or "some"
        choices[name] = counts
    for name in loaded.graph.spec.links:
        rate = picked[name]
        if rate is not None:
            spec["links"][name]["bandwidth"] = write_bandwidth(rate)
        if name in varied:
            traits[name] = write_bandwidth(rate)
    relays = any(pool["role"] == "relay" for pool in spec["pools"].values())
    for key in ("routing", "handoff"):
        ref: PluginRef | None = picked[key]
        # Without a relay every policy does the same, and nothing is handed off.
        if ref is not None and relays:
            spec[key] = ref.model_dump(mode="json")
            if key in varied:
                traits[key] = _written(ref)
    loads(yaml.safe_dump(data, sort_keys=False), name=str(loaded.path))
    return Family(number, data, choices, kinds, traits)


def _drop(spec: Data, pool: str) -> None:
    del spec["pools"][pool]
    spec["edges"] = [edge for edge in spec.get("edges", []) if pool not in (edge["from"], edge["to"])]
    spec.get("admission", {}).get("pools", {}).pop(pool, None)


def _equip(pool: Data, kind: Kind, before: str | None) -> None:
    """Give its workers other chips; an engine's `tp` that was as many as the chips stays so."""
    config = pool["engine"].setdefault("config", {})
    if before is not None and config.get("tp") == counted(before.lower())[0]:
        config["tp"] = counted(kind.hardware)[0]
    config.update(kind.config)
    pool["hardware"] = kind.hardware


def _written(ref: PluginRef) -> str:
    settings = ", ".join(f"{key} {value}" for key, value in ref.config.items())
    return f"{ref.plugin} ({settings})" if settings else ref.plugin


def neighbours(sizes: Sizes, choices: Mapping[str, Sizes]) -> Iterator[Sizes]:
    """One step up or down in one pool, and down in one with up in another."""
    steps = list(choices.values())
    at = [counts.index(size) for counts, size in zip(steps, sizes, strict=True)]

    def moved(*changes: tuple[int, int]) -> Iterator[Sizes]:
        to = list(at)
        for axis, by in changes:
            to[axis] += by
            if not 0 <= to[axis] < len(steps[axis]):
                return
        yield tuple(counts[index] for counts, index in zip(steps, to, strict=True))

    for axis in range(len(at)):
        yield from moved((axis, -1))
        yield from moved((axis, 1))
        for other in range(len(at)):
            if other != axis:
                yield from moved((axis, -1), (other, 1))
