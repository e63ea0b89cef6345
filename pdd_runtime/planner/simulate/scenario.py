"""What is simulated: a graph, how its workers and links behave, and what fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from pdd_runtime.errors import PddError
from pdd_runtime.graph import Graph
from pdd_runtime.planner.context_limit import ContextLimit, least
from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.profile import Profile
from pdd_runtime.planner.simulate.link import LinkModel
from pdd_runtime.plugins import PluginManager

LOCAL_RATE: Final = 1.25e9
"""Bytes/s of KV inside a cluster, unless the scenario says otherwise."""


class SimulationError(PddError):
    """What was asked for cannot be simulated."""

    code = "simulation"


@dataclass(frozen=True)
class Failure:
    """Something that stops working for a while."""

    at: float
    """Seconds from the beginning."""
    duration: float
    """Seconds until it is back: a worker without any KV, a link with what waits for it."""
    kind: Literal["worker", "link"] = "worker"
    name: str = ""
    """The pool's, or the link's."""
    index: int = 0
    """Which worker of the pool."""


@dataclass(frozen=True)
class Scenario:
    """A graph and its surroundings. The same scenario, workload and seed give the same figures, on every machine."""

    graph: Graph
    """Pools, replicas, links, edges, routing, handoff and admission as `up` runs them."""
    pools: Mapping[str, PoolModel]
    """How each pool's workers behave, by its name."""
    plugins: PluginManager
    """Routing policies and handoff strategies: the very objects that the runtime asks."""
    links: Mapping[str, LinkModel] = field(default_factory=dict)
    """How links behave that are to differ from what the graph says, by name."""
    failures: tuple[Failure, ...] = ()
    local_rate: float = LOCAL_RATE
    """Bytes/s of KV between two workers of one cluster; such transfers do not slow each other."""
    warm: bool = True
    """Begin with caches that have seen the prefixes which sessions share, as after a day."""
    admission: bool = True
    """Bound what is in flight by the graph's admission; else all begin at once, and wait with the workers."""
    overlap: bool = True
    """Send KV as prefill makes it; else when prefill has all of it."""
    whole_views: bool = False
    """Show the routing policy every worker. Else it sees, of each pool, those that a policy would choose which likes
    less load and more of the prompt: nearly always the same choice, for a fraction of the time."""

    @property
    def context(self) -> ContextLimit | None:
        """The longest request that is served; None: any is."""
        return least(self.pools[name].context for name in self.graph.spec.pools if name in self.pools)

    def link_model(self, name: str) -> LinkModel:
        """How that link behaves in each direction."""
        model = self.links.get(name)
        if model is not None:
            return model
        link = self.graph.spec.links[name]
        return LinkModel(bandwidth=link.bandwidth / 8, rtt=link.rtt, streams=link.streams)


def measured_links(graph: Graph, profile: Profile) -> dict[str, LinkModel]:
    """The links of a graph as fast as they were measured, with the round trips that the graph declares."""
    declared = graph.spec.links
    return {
        name: LinkModel((measured.goodput or declared[name].bandwidth) / 8, declared[name].rtt)
        for name, measured in profile.links.items()
        if name in declared
    }
