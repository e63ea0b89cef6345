"""Which workers a request would take: those that cost least together, along the graph's edges only. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import xxhash

from pdd_runtime.errors import NoRoute
from pdd_runtime.pipeline.cost import compute, lacking, local, wait, way
from pdd_runtime.plugins.routing import ClusterView, EdgeView, LinkView, RequestFacts, WorkerKey, WorkerView

T = TypeVar("T", bound=tuple[Any, ...])

NEAR: Final = 0.02
NEAR_TIME: Final = 0.001
"""Costs that differ by less than this part, or by less than so many seconds more, are as good as each other."""


class Placement(msgspec.Struct, frozen=True):
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
    why: str = ""
    """What decided between them and others; empty where there were no others."""


_Best: TypeAlias = tuple[float, WorkerView]
"""Of one pool: the least cost, and a worker that costs as much as that, nearly."""


_Pair: TypeAlias = tuple[float, WorkerView, WorkerView, WorkerView | None, EdgeView, LinkView | None]
"""The best workers of two pools that an edge joins: what they cost, prefill, main, relay, edge, way."""


def place(facts: RequestFacts, view: ClusterView) -> Placement:
    """The cheapest connected pair of prefill and main worker, with the cheapest relay between them. Where no such
    pair is ready: the cheapest aggregated worker. Raises `NoRoute`, naming what is missing."""
    pools: dict[str, list[WorkerView]] = {}
    for worker in view.workers:
        name = worker.key.pool
        if name in pools:
            pools[name].append(worker)
        else:
            pools[name] = [worker]
    pairs = _pairs(facts, view, pools)
    if pairs:
        pair = pairs[0] if len(pairs) == 1 else _pick(facts, pairs, _pair_name)
        _, prefill, main, relay, edge, link = pair
        why = _why(facts, pair) if len(view.workers) > (2 if relay is None else 3) else ""
        return Placement(main, prefill, relay, edge.link, link, why)
    alone = [worker for worker in view.workers if worker.role == "aggregated"]
    if not alone:
        raise _no_route(view)
    cost, best = _best(facts, [(wait(facts, worker) + compute(facts, worker), worker) for worker in alone])
    why = f"{best.key} is the cheapest of {len(alone)}, at {cost:.3g} s" if len(alone) > 1 else ""
    return Placement(best, None, None, None, None, why)


def _pairs(facts: RequestFacts, view: ClusterView, pools: Mapping[str, list[WorkerView]]) -> list[_Pair]:
    """Of every two pools that can serve together, the best."""
    prefills: dict[str, _Best] = {}
    relays: dict[str, tuple[float, WorkerView, float]] = {}
    """What it costs to use the pool's best relay, which one it is, and how long it makes a request wait."""
    mains: dict[str, list[WorkerView]] = {}
    prompt = facts.prompt_tokens
    for pool, workers in pools.items():
        role = workers[0].role
        if role == "prefill":
            prefills[pool] = _best(facts, [(wait(facts, w) + compute(facts, w), w) for w in workers])
        elif role == "relay":
            near = []
            for worker in workers:
                lacks = prompt - worker.cached_tokens
                near.append((wait(facts, worker) + (lacks * local(worker) if lacks > 0 else 0.0), worker))
            cost, relay = _best(facts, near)
            relays[pool] = (cost, relay, wait(facts, relay))
        elif role == "main":
            mains[pool] = workers
    pairs = []
    for edge, between in _joined(view.edges):
        begun, targets = prefills.get(edge.source), mains.get(edge.target)
        if begun is None or targets is None:
            continue
        made, prefill = begun
        link = view.link(edge.link, prefill.cluster) if edge.link is not None else None
        there = [relays[pool] for pool in between if pool in relays]
        between_them, hidden = None, math.inf
        if there:
            _, between_them, hidden = there[0] if len(there) == 1 else _pick(facts, there, _worker_name)
        there_in = way(prefill, link)
        start, each = there_in.start, there_in.token
        scored = []
        for worker in targets:
            lacks = prompt - worker.cached_tokens
            takes = start + lacks * each if lacks > 0 else 0.0
            scored.append((takes + (takes if takes < hidden else hidden) + wait(facts, worker), worker))
        taken, main = _best(facts, scored)
        pairs.append((made + taken, prefill, main, between_them, edge, link))
    return pairs


@lru_cache(maxsize=64)
def _joined(edges: tuple[EdgeView, ...]) -> tuple[tuple[EdgeView, tuple[str, ...]], ...]:
    """Every edge that may carry KV to main, with the pools between its ends: those that its source feeds and that feed
    its target."""
    return tuple(
        (edge, tuple(sorted({near.target for near in edges if _between(near, edge, edges)})))
        for edge in edges
        if edge.carries == "kv"
    )


def _between(near: EdgeView, edge: EdgeView, edges: tuple[EdgeView, ...]) -> bool:
    return (near.source, near.carries) == (edge.source, "kv") and any(
        (far.source, far.target) == (near.target, edge.target) for far in edges
    )


def _best(facts: RequestFacts, scored: Sequence[tuple[float, WorkerView]]) -> _Best:
    if len(scored) == 1:
        return scored[0]
    return min([cost for cost, _ in scored]), _pick(facts, scored, _worker_name)[1]


def _worker_name(each: tuple[Any, ...]) -> str:
    key: WorkerKey = each[1].key
    return f"{key.pool}/{key.index}"


def _pair_name(pair: _Pair) -> str:
    edge = pair[4]
    return f"{edge.source} {edge.target}"


def _pick(facts: RequestFacts, candidates: Sequence[T], name: Callable[[T], str]) -> T:
    """Of candidates that begin with what they cost: the cheapest; of those that are as good, the one whose lot this
    request draws. A lot does not depend on who else is there, so a candidate that gets better is still chosen."""
    if len(candidates) == 1:
        return candidates[0]
    most = min([each[0] for each in candidates]) * (1.0 + NEAR) + NEAR_TIME
    near = [each for each in candidates if each[0] <= most]
    if len(near) == 1:
        return near[0]
    return max(near, key=lambda each: xxhash.xxh64_intdigest(name(each).encode(), facts.seed))


def _why(facts: RequestFacts, pair: _Pair) -> str:
    _, prefill, main, _, edge, link = pair
    queued = wait(facts, prefill), wait(facts, main)
    takes = way(prefill, link).takes(lacking(facts, main))
    over = f"over {edge.link}" if edge.link else "on their way"
    return (
        f"{prefill.key} and {main.key} cost least: {queued[0]:.2g} s in queue and "
        f"{compute(facts, prefill):.2g} s for {lacking(facts, prefill)} tokens, {takes:.2g} s {over} for "
        f"{lacking(facts, main)}, {queued[1]:.2g} s in queue"
    )


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
