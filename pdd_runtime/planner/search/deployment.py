"""A deployment that is shown: what it costs, and what it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdd_runtime.graph import Graph
from pdd_runtime.planner.cost import Cost, bcr
from pdd_runtime.planner.prices import Range
from pdd_runtime.planner.search.family import Family
from pdd_runtime.planner.search.point import Candidate
from pdd_runtime.planner.search.trial import Verdict
from pdd_runtime.planner.simulate import repeated


@dataclass(frozen=True)
class Deployment:
    """One that is shown."""

    family: Family
    candidate: Candidate
    graph: Graph
    cost: Cost
    """With what is sent at its goodput."""
    goodput: float
    """Requests/s."""
    interval: Range
    """Where its goodput lies, by the seeds: 95 %. Of one seed both ends are alike."""
    verdict: Verdict
    """At its goodput."""
    rates: Mapping[int, float] = field(repr=False)
    """Its goodput by seed: the same seed is the same requests for all that are shown."""

    @property
    def bcr(self) -> Range:
        """By the prices' range."""
        return bcr(self.goodput, self.cost)

    @property
    def pools(self) -> dict[str, str]:
        """`10 x 4x8xh100` by pool."""
        pools = self.graph.spec.pools
        return {name: f"{pool.replicas} × {pool.hardware or 'its hardware'}" for name, pool in pools.items()}

    def spent(self, rate: float) -> Range:
        """What it costs an hour while it serves `rate` requests/s: what is sent grows with them."""
        fixed = self.cost.nodes.plus(self.cost.lines).plus(self.cost.energy)
        return fixed.plus(self.cost.traffic.times(rate / self.goodput))


def interval(values: Sequence[float]) -> Range:
    """95 % of the mean, by Student's t; of one value, that."""
    found = repeated.interval(list(values))
    if found.low is None or found.high is None:
        return Range(found.mean, found.mean)
    return Range(found.low, found.high)
