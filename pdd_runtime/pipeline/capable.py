"""Routes over workers that can do all that a request needs. Pure, like the policies it asks."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pdd_runtime.errors import NoRoute, RequestError
from pdd_runtime.plugins.routing import ClusterView, RequestFacts, Route, RoutingPolicy, WorkerKey, WorkerView


def plan_capable(policy: RoutingPolicy, facts: RequestFacts, view: ClusterView) -> Route:
    """The policy's route; where a worker of it lacks what the request needs, its route without all such workers. So
    no policy has to think of capabilities. Raises `NoRoute` as the policy does, and `RequestError` where the only
    thing in the way is what the workers cannot do."""
    unable = {worker.key: worker for worker in view.workers if lacking(facts, worker)}
    route = policy.plan(facts, view)
    if not unable.keys() & _workers(route):
        return route
    able = msgspec.structs.replace(view, workers=tuple(w for w in view.workers if w.key not in unable))
    try:
        other = policy.plan(facts, able)
    except NoRoute as error:
        wanted = [worker for key, worker in unable.items() if key in _workers(route)]
        # Most policies can do without a relay, so it is not what stands in the way where anything else does.
        raise _impossible(facts, [worker for worker in wanted if worker.role != "relay"] or wanted) from error
    if route.relay in unable and other.relay is None:
        cannot = ", ".join(lacking(facts, unable[route.relay]))
        return msgspec.structs.replace(other, reason=f"relay cannot: {cannot}, though {route.reason}")
    return other


def lacking(facts: RequestFacts, worker: WorkerView) -> tuple[str, ...]:
    """What the request needs and the worker cannot do."""
    return tuple(need for need in facts.needs if need not in worker.capabilities)


def _workers(route: Route) -> set[WorkerKey]:
    return {key for key in (route.prefill, route.relay, route.main) if key is not None}


def _impossible(facts: RequestFacts, workers: Iterable[WorkerView]) -> RequestError:
    pools = {worker.key.pool: lacking(facts, worker) for worker in workers}
    return RequestError(
        "; ".join(f"pool {pool} cannot: {', '.join(what)}" for pool, what in sorted(pools.items())),
        why="its engine does not have what the request needs, and no other worker that is ready does",
        fix="leave that out of the request, or give the pool an engine that has it",
    )
