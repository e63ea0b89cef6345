"""How the requests of each variant are served: by which policy, strategy and workers, and in which queue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pdd_runtime.errors import NoRoute, RequestError
from pdd_runtime.graph import Graph, PluginRef, Variant
from pdd_runtime.pipeline.admission import Admission, Plan
from pdd_runtime.pipeline.edges import Edges
from pdd_runtime.pipeline.links import Links
from pdd_runtime.pipeline.peers import Peers
from pdd_runtime.pipeline.planner import Planner
from pdd_runtime.pipeline.request import SessionRequest
from pdd_runtime.plugins import PluginManager
from pdd_runtime.plugins.handoff import HandoffStrategy
from pdd_runtime.plugins.routing import RoutingPolicy


class Course(NamedTuple):
    """Of one variant; of all requests, where a graph has none."""

    name: str
    strategy: HandoffStrategy
    planner: Planner
    admission: Admission

    def lacks(self, request: SessionRequest) -> NoRoute | RequestError | None:
        """Why its workers cannot serve a request, whether they have room or not; None: they can."""
        try:
            self.planner.route(request)
        except (NoRoute, RequestError) as error:
            return error
        return None


class Courses:
    """Those of a graph. Variants that share pools share a queue, so that it is a fair one; where they do not, none
    waits behind another's requests."""

    def __init__(
        self, graph: Graph, plugins: PluginManager, peers: Peers, edges: Edges, links: Links, plan: Plan
    ) -> None:
        """`plan`: the route of a request in a view. Raises `PluginError` for a policy or strategy that is not there or
        badly set, `GraphError` for a strategy that needs an edge which the graph lacks."""
        spec = graph.spec
        variants = dict(spec.variants) or {"": Variant()}
        self._control = graph.control
        pools = {name: frozenset(variant.pools or spec.pools) for name, variant in variants.items()}
        made: list[Admission] = []
        admissions: dict[str, Admission] = {}
        planners: dict[str, Planner] = {}
        strategies: dict[str, HandoffStrategy] = {}
        for name, variant in variants.items():
            own = f"spec.variants.{name}"
            routing, handoff = variant.routing or spec.routing, variant.handoff or spec.handoff
            policy = _policy(plugins, routing, own if variant.routing else "spec")
            strategies[name] = strategy = _strategy(plugins, handoff, own if variant.handoff else "spec")
            if strategy.carries == "kv":
                edges.require_relay_kv(strategy.name, pools[name])
            among = None if variant.pools is None else pools[name]
            planners[name] = Planner(policy, peers, edges, links, lambda: made[0].finishing.view, among)
        whole = planners[self._control]
        for lane in _lanes(pools):
            admission = Admission(graph, whole.view, plan, whole.stock, beside=made[0] if made else None)
            made.append(admission)
            admissions.update(dict.fromkeys(lane, admission))
        self.admissions = tuple(made)
        """One for each queue."""
        self._courses = {
            name: Course(name, strategies[name], planners[name], admissions[name])
            for name in sorted(variants, key=lambda name: name != self._control)
        }

    def __getitem__(self, variant: str) -> Course:
        """That of a variant; of one that the graph does not have, the control's."""
        return self._courses.get(variant) or self._courses[self._control]

    def __iter__(self) -> Iterator[Course]:
        """The control's first."""
        return iter(self._courses.values())

    def __len__(self) -> int:
        return len(self._courses)


def _policy(plugins: PluginManager, reference: PluginRef, at: str) -> RoutingPolicy:
    found = plugins.routing(reference.plugin)
    policy: RoutingPolicy = found(plugins.configure(found, reference.config, f"{at}.routing.config"))
    return policy


def _strategy(plugins: PluginManager, reference: PluginRef, at: str) -> HandoffStrategy:
    found = plugins.handoff(reference.plugin)
    strategy: HandoffStrategy = found(plugins.configure(found, reference.config, f"{at}.handoff.config"))
    return strategy


def _lanes(pools: Mapping[str, frozenset[str]]) -> list[set[str]]:
    """The variants in groups, of which no two have a pool in common."""
    groups: list[tuple[set[str], set[str]]] = []
    for name, own in pools.items():
        names, taken = {name}, set(own)
        for group in [group for group in groups if not own.isdisjoint(group[1])]:
            groups.remove(group)
            names |= group[0]
            taken |= group[1]
        groups.append((names, taken))
    return [names for names, _ in groups]
