"""What the routing policy is shown: the workers that are there, their load, and what they have of a prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pdd_runtime.graph import Graph
from pdd_runtime.planner.simulate.cache import Spans
from pdd_runtime.planner.simulate.pool import Pool, Worker
from pdd_runtime.planner.simulate.ways import Ways
from pdd_runtime.plugins.routing import ClusterView, EdgeView, Finishing, LinkView, WorkerKey, WorkerView


class Views:
    """Made anew for each request, since load and caches have changed."""

    def __init__(self, graph: Graph, pools: Mapping[str, Pool], ways: Ways, *, whole: bool) -> None:
        """`whole`: with every worker."""
        self._pools = list(pools.values())
        self._ways, self._whole = ways, whole
        self.hits: dict[WorkerKey, int] = {}
        """Leading tokens of the last view's prompt that are cached where."""
        self._edges = tuple(
            EdgeView(source=edge.source, target=edge.target, carries=edge.carries, link=edge.link)
            for edge in graph.spec.edges
        )
        self._links = [
            (ways.links[name, source], name, source, target)
            for name, link in graph.spec.links.items()
            for source, target in (link.between, link.between[::-1])
        ]

    def view(
        self,
        spans: Spans,
        finishing: Finishing,
        without: Collection[WorkerKey] = (),
        shut: Collection[tuple[str, str]] = (),
    ) -> ClusterView:
        """For a prompt; without some workers, and without the edges that bring KV over some links."""
        hits = self.hits = {}
        workers = []
        for pool in self._pools:
            for worker in pool.workers:
                if worker.alive and worker.key not in without:
                    hits[worker.key] = cached = worker.cache.hit(spans)
                    workers.append(self._worker(worker, pool, cached))
        return ClusterView(
            workers=tuple(workers), edges=self._open(shut) if shut else self._edges, links=self._ways_now(),
            finishing=finishing,
        )  # fmt: skip

    def _ways_now(self) -> tuple[LinkView, ...]:
        return tuple(
            LinkView(
                name=name, source=source, target=target, bandwidth=link.model.bandwidth, rtt=link.model.rtt,
                goodput=link.goodput, queue=int(link.queue),
            )
            for link, name, source, target in self._links
        )  # fmt: skip

    def _open(self, shut: Collection[tuple[str, str]]) -> tuple[EdgeView, ...]:
        return tuple(
            edge
            for edge in self._edges
            if edge.carries != "kv" or self._ways.edge(edge.source, edge.target) not in shut
        )

    def _worker(self, worker: Worker, pool: Pool, cached: int) -> WorkerView:
        running = min(worker.requests, worker.running)
        return WorkerView(
            key=worker.key,
            role=pool.role,
            cluster=pool.cluster,
            cached_tokens=cached,
            running=running,
            waiting=worker.requests - running,
            batch_limit=pool.model.batch_limit,
            token_bytes=int(pool.model.kv_token),
            token_time=pool.token_time.each,
            request_time=pool.request_time.each,
        )
