"""What may be begun at once: as much as workers' batches and blocks hold, and as links carry in their time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from pdd_runtime.errors import NoRoute, RequestError
from pdd_runtime.graph import Graph
from pdd_runtime.graph.models import PoolAdmission
from pdd_runtime.observe import Timeline
from pdd_runtime.plugins.engine import Load
from pdd_runtime.plugins.routing import ClusterView, RequestFacts, Role, Route, WorkerKey, WorkerView

AHEAD: dict[Role, float] = {"prefill": 0.25, "relay": 1.0, "aggregated": 0.25}
"""Requests beyond a worker's batch, as a share of it: so that no place in it is empty while the next one comes. Main's
follow from how long they are on their way to it."""
QUEUED = 0.25
"""Requests that may wait in a worker's own queue, as a share of its batch. They have a first token by then: who waits
there sees a stop. A relay's may be longer: users wait for what it hides as well."""
FIRST_GUESS = 256.0
"""Tokens of an answer, before any has ended."""
FIRST_WAY, LONGEST_WAY = 0.75, 4.0
"""The time that requests are on their way to main, over the time that they are decoded there: before any has ended, and
at most."""
LEARNED = 0.05
"""What one answer's length counts for in the mean."""
_NO_LIMIT = PoolAdmission()

Plan = Callable[[ClusterView], Route]


class Stock(NamedTuple):
    """What a worker has for KV, in tokens."""

    used: int
    total: int
    """0: not known."""
    waiting: int = 0
    """Requests in its engine's own queue."""


class Ticket:
    """One request's part of what there is room for, from its admission to its end."""

    def __init__(self, room: Room, route: Route, tokens: dict[WorkerKey, int], way: tuple[str, str], size: int) -> None:
        self.route = route
        self._room, self._timeline = room, Timeline("", "", 0)
        self._tokens, self._way, self._bytes = tokens, way, size
        self._begun = 0.0
        self._waits = True
        for key, count in tokens.items():
            room.pending[key] += 1
            room.tokens[key] += count
        room.bytes[way] += size
        room.tickets.add(self)

    def begins(self, timeline: Timeline) -> None:
        """Its session counts on its workers from now on. `timeline` tells how far it is."""
        self._timeline, self._begun = timeline, timeline.elapsed
        self._count()

    def shrink(self) -> None:
        """Give back what its session does not need any more."""
        timeline, route = self._timeline, self.route
        if timeline.tokens.prefill and route.prefill is not None:
            self._give(route.prefill)
        if timeline.handoff is not None and timeline.handoff.gap is not None and route.relay is not None:
            self._give(route.relay)
        if self._bytes and route.prefill is not None and timeline.arrived(route.prefill.pool, route.main.pool):
            self._room.bytes[self._way] -= self._bytes
            self._bytes = 0

    def over(self) -> None:
        """It has ended, or never begun. Idempotent."""
        self._count()
        self._learn()
        for key in list(self._tokens):
            self._give(key)
        self._room.bytes[self._way] -= self._bytes
        self._bytes = 0
        self._room.tickets.discard(self)

    def _learn(self) -> None:
        timeline, route = self._timeline, self.route
        if timeline.tokens.main > 1 and route.prefill is not None and (starts := timeline.when("main starts")):
            first = timeline.when("commit") or starts
            if timeline.elapsed > first:
                self._room.learn_way(route.main.pool, starts - self._begun, timeline.elapsed - first)
        self._timeline = Timeline("", "", 0)

    def _count(self) -> None:
        if self._waits:
            self._waits = False
            for key in self._tokens:
                _less(self._room.pending, key, 1)

    def _give(self, key: WorkerKey) -> None:
        _less(self._room.tokens, key, self._tokens.pop(key, 0))


class Room:
    """Limits, and what is taken of them. A worker's requests are those it tells of, those of every frontend among them,
    or those of this one, whichever are more; so are its tokens, and the bytes that wait for a link."""

    def __init__(self, graph: Graph, stock: Callable[[WorkerKey], Stock]) -> None:
        """`stock`: what a worker has for KV."""
        self._spec, self._stock = graph.spec.admission, stock
        self._bandwidth = {name: link.bandwidth / 8 for name, link in graph.spec.links.items()}
        self.answer = FIRST_GUESS
        """Tokens of an answer, the mean of late."""
        self._ways: dict[str, tuple[float, float]] = {}
        """Seconds on the way to a main pool and in it, the means of late."""
        self.pending: Counter[WorkerKey] = Counter()
        """Requests admitted whose sessions do not count on their workers yet."""
        self.tokens: Counter[WorkerKey] = Counter()
        """That requests of this frontend will need there."""
        self.bytes: Counter[tuple[str, str]] = Counter()
        """That they will send, by link and the cluster it leads from."""
        self.tickets: set[Ticket] = set()

    def find(self, facts: RequestFacts, view: ClusterView, plan: Plan) -> Ticket | str:
        """A place on the best route that has room; else why there is none. What is full is left out of the view, and
        the policy asked again, until its route fits. Raises what `plan` raises on the whole view."""
        route = first = plan(view)
        if (lack := self._lacks(route, facts, view)) is None:
            return self._enter(route, facts, view)
        for ticket in tuple(self.tickets):
            ticket.shrink()
        said = ""
        while (lack := self._lacks(route, facts, view)) is not None:
            said = said or lack.why
            view = lack.rest
            try:
                route = plan(view)
            except (NoRoute, RequestError):
                return said
        if first.relay is not None and route.relay is None:
            route = msgspec.structs.replace(route, reason=f"{said}, though {first.reason}")
        elif said:
            route = msgspec.structs.replace(route, reason=f"{route.reason}; {said}")
        return self._enter(route, facts, view)

    def shut(self, view: ClusterView) -> str:
        """Why no route can have room now, whatever it is for; empty: one may have. Cheaper than `find`."""
        free = {worker.key.pool: worker.role for worker in view.workers if self._crowded(worker) is None}
        if "aggregated" in free.values():
            return ""
        if any(free.get(e.source) == "prefill" and free.get(e.target) == "main" for e in view.edges):
            return ""
        return f"full: {', '.join(sorted({worker.key.pool for worker in view.workers} - free.keys()))}"

    def expected(self, max_tokens: int) -> float:
        """Tokens of an answer that may have so many."""
        return min(float(max_tokens), self.answer)

    def learn(self, tokens: int) -> None:
        """An answer ended with so many."""
        self.answer += LEARNED * (tokens - self.answer)

    def learn_way(self, pool: str, way: float, there: float) -> None:
        """A request was so many seconds on its way to that main pool, and then decoded there for so many."""
        ways, theres = self._ways.get(pool, (FIRST_WAY * there, there))
        self._ways[pool] = ways + LEARNED * (way - ways), theres + LEARNED * (there - theres)

    def most(self, worker: WorkerView) -> int:
        """Requests that it takes at once: for main its batch, what may wait there, and as many as may be on their way
        while those in the batch make room for them."""
        if limit := self._spec.pools.get(worker.key.pool, _NO_LIMIT).requests:
            return limit
        ahead = AHEAD.get(worker.role)
        if ahead is None:
            way, there = self._ways.get(worker.key.pool, (FIRST_WAY, 1.0))
            ahead = QUEUED + min(LONGEST_WAY, way / there)
        return worker.batch_limit + math.ceil(ahead * worker.batch_limit)

    def most_bytes(self, link: str) -> float:
        """KV that may wait for it in one direction."""
        if (limit := self._spec.links.get(link)) is not None:
            return float(limit.bytes)
        return self._bandwidth[link] * self._spec.link_time

    def _lacks(self, route: Route, facts: RequestFacts, view: ClusterView) -> _Lack | None:
        """What of the route has no room."""
        workers = {worker.key: worker for worker in view.workers}
        for key in _keys(route):
            if (why := self._full(workers[key], facts)) is not None:
                rest = tuple(w for w in view.workers if w.key.pool != key.pool or self._full(w, facts) is None)
                return _Lack(why, msgspec.structs.replace(view, workers=rest))
        way, size = self._crossing(route, facts, workers, view)
        if not size:
            return None
        link = view.link(*way)
        queued = max(link.queue if link else 0, self.bytes[way])
        if not queued or queued + size <= (most := self.most_bytes(way[0])):
            return None
        why = f"{queued / 1e6:.3g} of {most / 1e6:.3g} MB wait for {way[0]}, too many for {size / 1e6:.3g} more"
        source = {w.key.pool for w in view.workers if w.cluster == way[1]}
        edges = tuple(e for e in view.edges if (e.carries, e.link) != ("kv", way[0]) or e.source not in source)
        return _Lack(why, msgspec.structs.replace(view, edges=edges))

    def _full(self, worker: WorkerView, facts: RequestFacts) -> str | None:
        if not self.queued(worker):
            return None
        if (why := self._crowded(worker)) is not None:
            return why
        used, total, _ = self._stock(worker.key)
        total = self._spec.pools.get(worker.key.pool, _NO_LIMIT).tokens or total
        used = max(used, self.tokens[worker.key])
        need = self._needs(worker, facts)
        if total and used + need > total:
            return f"{worker.key} has {used} of {total} tokens in use, too many for {need} more"
        return None

    def _crowded(self, worker: WorkerView) -> str | None:
        """Why it has no room, whatever a request is like."""
        queued, most = self.queued(worker), self.most(worker)
        if queued >= most:
            return f"{worker.key} is full with {queued} of {most} requests"
        waiting, may = self._stock(worker.key).waiting, math.ceil(QUEUED * worker.batch_limit)
        if waiting > may and worker.role != "relay":
            return f"{worker.key} has {waiting} in its own queue, more than {may}"
        return None

    def queued(self, worker: WorkerView) -> int:
        """Requests that are there, or on their way."""
        return worker.running + worker.waiting + self.pending[worker.key]

    def _needs(self, worker: WorkerView, facts: RequestFacts) -> int:
        answer = 0 if worker.role == "prefill" else int(self.expected(facts.max_tokens))
        return max(0, facts.prompt_tokens - worker.cached_tokens) + answer

    def _crossing(
        self, route: Route, facts: RequestFacts, workers: dict[WorkerKey, WorkerView], view: ClusterView
    ) -> tuple[tuple[str, str], int]:
        """The link that its KV takes, with the cluster it leads from, and how many bytes."""
        if route.prefill is None or route.kind == "P-RLD":
            return ("", ""), 0
        prefill, main = workers[route.prefill], workers[route.main]
        link = next((e.link for e in view.edges if _carries(e.source, e.target, e.carries, route)), None)
        if link is None:
            return ("", ""), 0
        return (link, prefill.cluster), prefill.token_bytes * max(0, facts.prompt_tokens - main.cached_tokens)

    def _enter(self, route: Route, facts: RequestFacts, view: ClusterView) -> Ticket:
        workers = {worker.key: worker for worker in view.workers}
        tokens = {key: self._needs(workers[key], facts) for key in _keys(route)}
        return Ticket(self, route, tokens, *self._crossing(route, facts, workers, view))


class _Lack(NamedTuple):
    why: str
    rest: ClusterView
    """The view without what is full."""


def stock(load: Load, blocks: int, block_size: int) -> Stock:
    """Of a worker whose engine has so many `blocks`, where its load does not say."""
    return Stock(load.blocks_used * block_size, (load.blocks_total or blocks) * block_size, load.waiting)


def _keys(route: Route) -> Iterator[WorkerKey]:
    """The workers that serve it."""
    main = None if route.kind == "P-RLD" else route.main
    return (key for key in (route.prefill, route.relay, main) if key is not None)


def _carries(source: str, target: str, carries: str, route: Route) -> bool:
    assert route.prefill is not None
    return (source, target, carries) == (route.prefill.pool, route.main.pool, "kv")


def _less(counter: Counter[WorkerKey], key: WorkerKey, count: int) -> None:
    counter[key] -= count
    if not counter[key]:
        del counter[key]
