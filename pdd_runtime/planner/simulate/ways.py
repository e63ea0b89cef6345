"""The ways that KV takes: over links, which are shared, and inside clusters, which have room for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from pdd_runtime.planner.simulate.events import Events
from pdd_runtime.planner.simulate.link import SimLink
from pdd_runtime.planner.simulate.scenario import Scenario


class Transfer(Protocol):
    """KV on its way."""

    def add(self, nbytes: float) -> None:
        """So much more can be sent."""

    def cancel(self) -> None:
        """It is not wanted any more. Idempotent."""


class Way(Protocol):
    """From one cluster to another, or inside one."""

    def open(self, size: float, done: Callable[[], None]) -> Transfer:
        """`size` bytes in all will be sent; `done` is called when they are there."""


class Local:
    """Inside a cluster: a transfer has as much as one worker can send, whatever else is sent."""

    def __init__(self, events: Events, rate: float) -> None:
        self.events, self.rate = events, rate

    def open(self, size: float, done: Callable[[], None]) -> Transfer:
        return _LocalTransfer(self, size, done)


class _LocalTransfer:
    __slots__ = ("_done", "_free", "_left", "_way")

    def __init__(self, way: Local, size: float, done: Callable[[], None]) -> None:
        self._way, self._left, self._done = way, size, done
        self._free = 0.0

    def add(self, nbytes: float) -> None:
        events = self._way.events
        self._free = max(events.now, self._free) + nbytes / self._way.rate
        self._left -= nbytes
        if self._left <= 1e-3:  # of a byte: rounding
            events.push(self._free, self._arrive)

    def cancel(self) -> None:
        self._done = _nothing

    def _arrive(self) -> None:
        self._done()


def _nothing() -> None:
    pass


class Ways:
    """All of a graph."""

    def __init__(self, events: Events, scenario: Scenario) -> None:
        spec = scenario.graph.spec
        self.links: dict[tuple[str, str], SimLink] = {}
        """By name and the cluster it leads from."""
        self._cut: dict[str, float] = {}
        """Since when a link is cut."""
        self._events = events
        self._local = Local(events, scenario.local_rate)
        self._edges: dict[tuple[str, str], tuple[Way, float]] = {}
        self._crossed: dict[tuple[str, str], tuple[str, str]] = {}
        for name, link in spec.links.items():
            model = scenario.link_model(name)
            for source in link.between:
                self.links[name, source] = SimLink(events, model)
        for edge in spec.edges:
            if edge.carries != "kv":
                continue
            if edge.link is None:
                self._edges[edge.source, edge.target] = self._local, 0.0
            else:
                crossed = edge.link, spec.pools[edge.source].cluster
                self._crossed[edge.source, edge.target] = crossed
                way = self.links[crossed]
                self._edges[edge.source, edge.target] = way, way.model.rtt / 2

    def between(self, source: str, target: str) -> tuple[Way, float]:
        """How KV goes from pool to pool, and seconds that a message takes there. Pools that no edge joins: inside a
        cluster."""
        return self._edges.get((source, target), (self._local, 0.0))

    def edge(self, source: str, target: str) -> tuple[str, str] | None:
        """The link that KV crosses from pool to pool, and the cluster that it leads from; None: it crosses none."""
        return self._crossed.get((source, target))

    def feeds(self, source: str, target: str) -> bool:
        """An edge carries KV from pool to pool."""
        return (source, target) in self._edges

    def cut(self, name: str) -> None:
        """Nothing gets through that link any more; what waits for it stays."""
        self._cut[name] = self._events.now
        self._set(name, 0.0)

    def mend(self, name: str) -> None:
        """It carries again what it did."""
        del self._cut[name]
        self._set(name, 1.0)

    def stalled(self, name: str, link: SimLink) -> float:
        """Seconds for which nothing has got through although something waited."""
        since = self._cut.get(name)
        return self._events.now - since if since is not None and link.queue else 0.0

    def _set(self, name: str, share: float) -> None:
        for (each, _), link in self.links.items():
            if each == name:
                link.set_bandwidth(share * link.model.bandwidth)
