"""A routing policy that goes by queues alone, and a handoff strategy that goes by the relay's load."""

from __future__ import annotations

from pydantic import BaseModel, Field

from pdd_runtime.errors import NoRoute
from pdd_runtime.plugins import hookimpl
from pdd_runtime.plugins.handoff import HandoffConfig, HandoffStrategy, HandoffView, Step
from pdd_runtime.plugins.routing import ClusterView, RequestFacts, Route, RoutingPolicy, WorkerView


class ShortestQueueConfig(BaseModel, extra="forbid"):
    longest: int = Field(default=8, ge=0)
    """A relay with more requests than this is left out of the route."""


class ShortestQueue(RoutingPolicy):
    """Every request takes the workers with the fewest requests, whatever they have cached."""

    name = "shortest-queue"
    Config = ShortestQueueConfig
    config: ShortestQueueConfig

    def plan(self, facts: RequestFacts, view: ClusterView) -> Route:
        best: dict[str, WorkerView] = {}
        for worker in sorted(view.workers, key=lambda worker: (queue(worker), worker.key)):
            best.setdefault(worker.key.pool, worker)
        edges = {(edge.source, edge.target, edge.carries) for edge in view.edges}
        kv = [(best[a], best[b]) for a, b, what in sorted(edges) if what == "kv" and a in best and b in best]
        pairs = [(p, m) for p, m in kv if (p.role, m.role) == ("prefill", "main")]
        if pairs:
            prefill, main = min(pairs, key=lambda pair: queue(pair[0]) + queue(pair[1]))
            reason = f"shortest queues: {prefill.key} has {queue(prefill)} requests, {main.key} has {queue(main)}"
            onward = {a for a, b, _ in edges if b == main.key.pool}
            relays = [r for p, r in kv if p == prefill and r.role == "relay" and r.key.pool in onward]
            relay = min(relays, key=queue, default=None)
            if relay is None or queue(relay) > self.config.longest:
                return Route(kind="P-MD", prefill=prefill.key, main=main.key, reason=f"{reason}, no relay is free")
            reason += f", {relay.key} has {queue(relay)}"
            return Route(kind="P-RLD-MD", prefill=prefill.key, relay=relay.key, main=main.key, reason=reason)
        whole = [worker for worker in best.values() if worker.role == "aggregated"]
        if whole:
            main = min(whole, key=queue)
            return Route(kind="A", main=main.key, reason=f"shortest queue: {main.key} has {queue(main)} requests")
        lacking = {"prefill", "main"} - {worker.role for worker in view.workers} or {"joined prefill and main"}
        raise NoRoute(f"no {' and no '.join(sorted(lacking))} worker is ready", fix="see `pdd-runtime ps`")


def queue(worker: WorkerView) -> int:
    return worker.running + worker.waiting


class LoadAwareConfig(HandoffConfig):
    busy: float = Field(default=0.5, ge=0.0)
    """From this load on (requests over batch limit) a relay is freed at once."""


class LoadAware(HandoffStrategy):
    """Frees a busy relay at once. Beside an idle one main first catches up, so that the user sees no gap."""

    name = "load-aware"
    Config = LoadAwareConfig
    config: LoadAwareConfig

    def step(self, view: HandoffView) -> Step:
        if not view.main_ready or view.known == 0:
            return Step("wait")
        least = 0 if view.relay_stopped else 1 + self.config.min_relay_tokens
        idle = view.relay_load < self.config.busy and not view.relay_stopped
        if idle and view.extending:
            return Step("wait")
        if idle and view.rounds == 0 and view.outstanding > 1:
            return Step("extend", view.known)
        return Step("seal", max(view.known, least))


@hookimpl
def pdd_register_routing_policies() -> list[type[RoutingPolicy]]:
    return [ShortestQueue]


@hookimpl
def pdd_register_handoff_strategies() -> list[type[HandoffStrategy]]:
    return [LoadAware]
