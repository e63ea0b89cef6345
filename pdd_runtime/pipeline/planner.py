"""Which workers a request takes, and which could take their places."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from pdd_runtime.errors import NoRoute, RequestError
from pdd_runtime.pipeline.admission_room import Stock, stock
from pdd_runtime.pipeline.capable import lacking, plan_capable
from pdd_runtime.pipeline.edges import Edges
from pdd_runtime.pipeline.links import Links
from pdd_runtime.pipeline.peers import Peer, Peers, cached_tokens
from pdd_runtime.pipeline.request import SessionRequest
from pdd_runtime.pipeline.token_log import Source
from pdd_runtime.plugins.routing import ClusterView, Finishing, RequestFacts, Role, Route, RoutingPolicy, WorkerKey

Workers = dict[Source, Peer]

GO_ON: dict[Source, tuple[Role, ...]] = {
    "prefill": ("prefill", "main", "aggregated"),
    "relay": ("relay", "main", "aggregated"),
    "main": ("main", "relay", "aggregated"),
}
"""Who can do what one of that role has failed to do, in some way."""


class Planner:
    """Plans over the workers that are there now."""

    def __init__(
        self,
        policy: RoutingPolicy,
        peers: Peers,
        edges: Edges,
        links: Links,
        finishing: Callable[[], Finishing],
        pools: frozenset[str] | None = None,
    ) -> None:
        """`finishing`: what bounds requests that end on a relay. `pools`: those whose workers are taken as long as any
        of them can; None: all of the graph."""
        self._policy, self._peers, self._edges, self._links = policy, peers, edges, links
        self._finishing, self._pools = finishing, pools
        self._joined = {(edge.source, edge.target) for edge in edges.views}

    def route(self, request: SessionRequest) -> Route:
        """The policy's. Raises `NoRoute`, and `RequestError` where those that are there cannot do what is asked for."""
        return self.within(request, self.view(request.tokens, request.salt))

    def within(self, request: SessionRequest, view: ClusterView) -> Route:
        """The same, over the workers in the view."""
        return plan_capable(self._policy, request.facts, self._own(view))

    def foreign(self, keys: Collection[WorkerKey]) -> bool:
        """One of these workers is in no pool that requests are planned for."""
        return self._pools is not None and not self._pools.issuperset(key.pool for key in keys)

    def workers(self, route: Route) -> Workers:
        """Raises `NoRoute`: one is not there any more."""
        main = None if route.kind == "P-RLD" else route.main
        keys: dict[Source, WorkerKey | None] = {"prefill": route.prefill, "relay": route.relay, "main": main}
        return {role: self._peers.get(key) for role, key in keys.items() if key is not None}

    def view(self, tokens: Sequence[int], salt: str) -> ClusterView:
        """What there is, and how much of `tokens` is cached where."""
        return ClusterView(
            workers=self._peers.views(tokens, salt),
            edges=self._edges.views,
            links=self._links.views(self._peers.telemetry()),
            finishing=self._finishing(),
        )

    def stock(self, key: WorkerKey) -> Stock:
        """What a worker has for KV. Raises `NoRoute`: it is not there any more."""
        peer = self._peers.get(key)
        info = peer.member.info
        return stock(peer.load, info.capacity_blocks, info.layout.block_size) if info else Stock(0, 0)

    # For who has lost a worker.

    def again(
        self, request: SessionRequest, output: Sequence[int], failed: Collection[WorkerKey]
    ) -> tuple[Route | None, Workers]:
        """Workers to go on behind `output`, by the policy; where it has no route, one that can go on alone, without a
        route. Those that have `failed` are left out as long as there is any other. Raises `NoRoute`, which says who
        is there and cannot."""
        tokens = (*request.tokens, *output)
        facts = RequestFacts(
            prompt_tokens=len(tokens),
            max_tokens=request.max_tokens - len(output),
            needs=needs(request, output),
            seed=request.lot,
        )
        view = self._own(self.view(tokens, request.salt))
        others = tuple(worker for worker in view.workers if worker.key not in failed)
        refusal: NoRoute | RequestError | None = None
        for workers in (others, view.workers) if len(others) < len(view.workers) else (others,):
            try:
                route = plan_capable(self._policy, facts, msgspec.structs.replace(view, workers=workers))
                return route, self.workers(route)
            except (NoRoute, RequestError) as error:
                refusal = error
            alone = self._alone(request, output, failed if workers is others else ())
            if alone is not None:
                return None, alone
        assert refusal is not None
        facts = RequestFacts(prompt_tokens=0, max_tokens=0, needs=needs(request, output))
        unable = [(peer, lacking(facts, peer.view(0))) for peer in self._peers.ready]
        raise NoRoute(
            "; ".join([refusal.what, *(f"{peer} cannot: {', '.join(what)}" for peer, what in unable if what)])
        )

    def spare(
        self,
        role: Source,
        request: SessionRequest,
        output: Sequence[int],
        failed: Collection[WorkerKey],
        *,
        feeding: Peer | None = None,
        fed_by: Peer | None = None,
    ) -> Peer | None:
        """The cheapest worker for one role: one that an edge joins to those that it feeds and is fed by, and that has
        not `failed` if there is any other."""
        joined = [
            peer
            for peer in self.able(request, output, (role,))
            if (feeding is None or (peer.key.pool, feeding.key.pool) in self._joined)
            and (fed_by is None or (fed_by.key.pool, peer.key.pool) in self._joined)
        ]
        return self._cheapest([peer for peer in joined if peer.key not in failed] or joined, request, output)

    def holder(self, request: SessionRequest, taker: Peer, above: int, tried: Collection[WorkerKey]) -> Peer | None:
        """A prefill worker that feeds `taker`, and has the KV of more than `above` leading tokens of the prompt."""
        givers = [
            peer
            for peer in self._peers.ready
            if peer.member.role == "prefill"
            and peer.key not in tried
            and self._edges.feeds(peer.key.pool, taker.key.pool)
        ]
        cached = cached_tokens(givers, request.tokens, request.salt)
        return max(
            (peer for peer in givers if cached.get(peer.key, 0) > above),
            key=lambda peer: cached[peer.key],
            default=None,
        )

    def cached(self, request: SessionRequest, peer: Peer) -> int:
        """Leading tokens of the prompt whose KV is there."""
        return cached_tokens([peer], request.tokens, request.salt).get(peer.key, 0)

    def able(self, request: SessionRequest, output: Sequence[int], roles: Collection[str]) -> list[Peer]:
        """Those of these roles that take sessions, and can go on with this one; of other pools than its own only where
        those have none: its user comes first."""
        facts = RequestFacts(prompt_tokens=0, max_tokens=0, needs=needs(request, output))
        able = [peer for peer in self._peers.ready if peer.member.role in roles and not lacking(facts, peer.view(0))]
        return [peer for peer in able if not self.foreign((peer.key,))] or able

    def _own(self, view: ClusterView) -> ClusterView:
        """Its pools' part of a view."""
        if self._pools is None:
            return view
        own = tuple([worker for worker in view.workers if worker.key.pool in self._pools])
        return msgspec.structs.replace(view, workers=own)

    def _alone(self, request: SessionRequest, output: Sequence[int], failed: Collection[WorkerKey]) -> Workers | None:
        """One worker that goes on; with prefill where it computes no KV. A relay only until a main is there, so only
        behind the first token."""
        roles: tuple[Role, ...] = ("main", "relay", "aggregated") if output else ("main", "aggregated")
        for role in roles:
            able = [peer for peer in self.able(request, output, (role,)) if peer.key not in failed]
            place: Source = "relay" if role == "relay" else "main"
            while (peer := self._cheapest(able, request, output)) is not None:
                if not peer.assisted:
                    return {place: peer}
                giver = self.spare("prefill", request, output, failed, feeding=peer)
                if giver is not None:
                    return {"prefill": giver, place: peer}
                able.remove(peer)
        return None

    def _cheapest(self, peers: Collection[Peer], request: SessionRequest, output: Sequence[int]) -> Peer | None:
        if len(peers) < 2:
            return next(iter(peers), None)
        tokens = (*request.tokens, *output)
        cached = cached_tokens(peers, tokens, request.salt)
        # In whole batches and whole prompts: a full hit is worth waiting behind one batch.
        return min(peers, key=lambda peer: (peer.busy - cached.get(peer.key, 0) / len(tokens), peer.key))


def needs(request: SessionRequest, output: Sequence[int]) -> tuple[str, ...]:
    """The capabilities that a worker must have to go on behind `output` as if nothing had happened."""
    wanted = request.sampling.needs
    return (
        (*wanted, "position_keyed_sampling") if output and request.seeded and request.sampling.temperature else wanted
    )
