"""What the routing policy is shown: the workers that are there, their load, and what they have of a prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from pdd_runtime.graph import Graph
from pdd_runtime.planner.simulate.cache import Spans
from pdd_runtime.planner.simulate.link import SimLink
from pdd_runtime.planner.simulate.pool import DEAD, Pool
from pdd_runtime.planner.simulate.ways import Ways
from pdd_runtime.plugins.routing import ClusterView, EdgeView, Finishing, LinkView, WorkerKey, WorkerView

FEW: Final = 4
"""Workers that have something of a prompt that others lack, of whom all are shown."""


class Views:
    """Made anew for each request, since load and caches have changed."""

    def __init__(self, graph: Graph, pools: Mapping[str, Pool], ways: Ways, *, whole: bool) -> None:
        """`whole`: with every worker."""
        self._pools = list(pools.values())
        self._ways, self._whole = ways, whole
        self._edges = tuple(
            EdgeView(source=edge.source, target=edge.target, carries=edge.carries, link=edge.link)
            for edge in graph.spec.edges
        )
        self._links = [
            (ways.links[name, source], name, source, target)
            for name, link in graph.spec.links.items()
            for source, target in (link.between, link.between[::-1])
        ]
        self._unused = {
            (name, source): LinkView(
                name=name, source=source, target=target, bandwidth=link.model.bandwidth, rtt=link.model.rtt
            )
            for link, name, source, target in self._links
        }

    def view(
        self,
        spans: Spans,
        finishing: Finishing,
        without: Collection[WorkerKey] = (),
        shut: Collection[tuple[str, str]] = (),
    ) -> ClusterView:
        """For a prompt; without some workers, and without the edges that bring KV over some links."""
        workers: list[WorkerView] = []
        for pool in self._pools:
            members = pool.workers
            for place in self._all(pool, without) if self._whole or without else self._best(pool, spans):
                worker = members[place]
                requests, running, key = pool.loads[place], worker.running, worker.key
                if running > requests:
                    running = requests
                worker.hit = cached = worker.cache.hit(spans)
                workers.append(
                    WorkerView(
                        key=key,
                        role=pool.role,
                        cluster=pool.cluster,
                        cached_tokens=cached,
                        running=running,
                        waiting=requests - running,
                        batch_limit=pool.batch_limit,
                        token_bytes=pool.token_bytes,
                        token_time=pool.token_time.each,
                        request_time=pool.request_time.each,
                    )
                )
        return ClusterView(
            workers=tuple(workers),
            edges=self._open(shut) if shut else self._edges,
            links=tuple([self._link(*each) for each in self._links]),
            finishing=finishing,
        )

    @staticmethod
    def _all(pool: Pool, without: Collection[WorkerKey]) -> list[int]:
        return [worker.index for worker in pool.workers if worker.alive and worker.key not in without]

    @staticmethod
    def _best(pool: Pool, spans: Spans) -> Collection[int]:
        """The least loaded one, and, of those that have more of the prompt than others, the few there are or the least
        loaded one."""
        loads, first, least = pool.loads, -1, DEAD
        for place, load in enumerate(loads):
            if load < least:
                first, least = place, load
        if first < 0:
            return ()
        count = len(loads)
        if count == 1:
            return (0,)
        chosen: set[int] | None = None
        for chain, _ in spans:
            holders = pool.holders.get(chain)
            if holders is not None and len(holders) < count:
                chosen = chosen or {first}
                chosen.update(holders if len(holders) <= FEW else (min(holders, key=loads.__getitem__),))
        return (first,) if chosen is None else sorted(chosen)

    def _link(self, link: SimLink, name: str, source: str, target: str) -> LinkView:
        if not link.made:
            return self._unused[name, source]
        return LinkView(
            name=name, source=source, target=target, bandwidth=link.model.bandwidth, rtt=link.model.rtt,
            goodput=link.goodput, queue=int(link.queue), stalled=self._ways.stalled(name, link),
        )  # fmt: skip

    def _open(self, shut: Collection[tuple[str, str]]) -> tuple[EdgeView, ...]:
        return tuple(
            edge
            for edge in self._edges
            if edge.carries != "kv" or self._ways.edge(edge.source, edge.target) not in shut
        )
