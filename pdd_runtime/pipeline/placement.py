"""Which workers a request would take: cheapest first, along the graph's edges only. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pdd_runtime.errors import NoRoute
from pdd_runtime.plugins.routing import ClusterView, EdgeView, LinkView, RequestFacts, Role, WorkerView


class Placement(NamedTuple):
    """The best workers for one request, whatever kind of route it then takes."""

    main: WorkerView
    """Of role aggregated where there is no prefill."""
    prefill: WorkerView | None
    relay: WorkerView | None
    """The best relay between the two; None: no relay that is ready joins them."""
    link: str | None
    """The link that KV crosses from prefill to main; None: it stays inside one cluster."""
    way: LinkView | None = None
    """The direction of it that KV takes, where the view knows it."""


def place(facts: RequestFacts, view: ClusterView) -> Placement:
    """The cheapest connected pair of prefill and main worker, with the cheapest relay between them. Where no such
    pair is ready: the cheapest aggregated worker. Raises `NoRoute`, naming what is missing."""
    best = _best_of_pools(facts, view)
    pairs = [
        (best[edge.source], best[edge.target], edge.link)
        for edge in view.edges
        if _joins(edge, "prefill", "main", best) and edge.carries == "kv"
    ]
    if pairs:
        prefill, main, link = min(
            pairs, key=lambda pair: (cost(facts, pair[0]) + cost(facts, pair[1]), pair[1].key, pair[0].key)
        )
        relays = [best[pool] for pool in _between(view, prefill.key.pool, main.key.pool) if pool in best]
        way = view.link(link, prefill.cluster) if link is not None else None
        return Placement(main, prefill, _cheapest(facts, relays), link, way)
    aggregated = _cheapest(facts, (worker for worker in best.values() if worker.role == "aggregated"))
    if aggregated is None:
        raise _no_route(view)
    return Placement(aggregated, None, None, None)


def cost(facts: RequestFacts, worker: WorkerView) -> float:
    """What sending the request to `worker` costs, in whole batches and whole prompts: its queue over its batch limit,
    plus the part of the prompt that is not cached there.

    So a full hit is worth waiting behind one batch, and among workers that cached the same, load alone decides.
    """
    load = (worker.running + worker.waiting) / max(1, worker.batch_limit)
    return load + 1.0 - min(1.0, worker.cached_tokens / max(1, facts.prompt_tokens))


def _best_of_pools(facts: RequestFacts, view: ClusterView) -> dict[str, WorkerView]:
    # Edges join pools, so the best worker of a pool is best on every edge of it: no pairs of workers to try.
    pools: dict[str, list[WorkerView]] = {}
    for worker in view.workers:
        pools.setdefault(worker.key.pool, []).append(worker)
    return {pool: best for pool, workers in pools.items() if (best := _cheapest(facts, workers))}


def _cheapest(facts: RequestFacts, workers: Iterable[WorkerView]) -> WorkerView | None:
    return min(workers, key=lambda worker: (cost(facts, worker), worker.key), default=None)


def _joins(edge: EdgeView, source: Role, target: Role, best: dict[str, WorkerView]) -> bool:
    ends = (best.get(edge.source), best.get(edge.target))
    return ends[0] is not None and ends[1] is not None and (ends[0].role, ends[1].role) == (source, target)


def _between(view: ClusterView, prefill: str, main: str) -> Iterator[str]:
    """The pools that `prefill` feeds with KV and that feed `main`."""
    fed = {edge.target for edge in view.edges if edge.source == prefill and edge.carries == "kv"}
    return (pool for pool in sorted(fed) if any((edge.source, edge.target) == (pool, main) for edge in view.edges))


def _no_route(view: ClusterView) -> NoRoute:
    ready: set[str] = {worker.role for worker in view.workers}
    pools = {edge.source for edge in view.edges if edge.carries == "kv"}
    lacking = [role for role in ("prefill", "main") if role not in ready]
    if not pools:
        lacking, what = ["aggregated"], "no aggregated worker is ready"
    elif lacking:
        what = f"no {' and no '.join(lacking)} worker is ready"
    else:
        what = "no prefill worker that is ready feeds a main worker that is ready"
    there = ", ".join(str(worker.key) for worker in view.workers) or "none"
    return NoRoute(
        what,
        why=f"a route needs them; workers that are ready: {there}",
        fix="wait until they are up; `pdd-runtime ps` shows their states, `pdd-runtime logs` what they say",
    )
