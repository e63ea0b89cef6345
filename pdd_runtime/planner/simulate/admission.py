"""Who may begin, and who waits, by the rules of `pdd_runtime.pipeline.admission`: one frontend, and one tenant. And who
is too long, by that of `pdd_runtime.frontend.model`."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final

from pdd_runtime.errors import NoRoute
from pdd_runtime.graph import Graph
from pdd_runtime.pipeline.admission_room import (
    AHEAD,
    FIRST_GUESS,
    FIRST_WAY,
    LEARNED,
    LONGEST_WAY,
    QUEUED,
)
from pdd_runtime.pipeline.admission_shares import DrainRate
from pdd_runtime.planner.simulate.pool import Pool, Worker
from pdd_runtime.plugins.routing import Route, WorkerKey

if TYPE_CHECKING:
    from pdd_runtime.planner.simulate.flight import Flight
    from pdd_runtime.planner.simulate.visit import Visit
    from pdd_runtime.planner.simulate.world import World


_ANY: Final = 1 << 60
"""More tokens than any request has."""


class Admission:
    """Bounds what is in flight by what there is room for on a whole route."""

    def __init__(self, world: World, graph: Graph) -> None:
        self._world, self._spec = world, graph.spec.admission
        self._events = world.events
        context = world.scenario.context
        self._longest = _ANY if context is None else context.tokens
        self.answer = FIRST_GUESS
        """Tokens of an answer, the mean of late."""
        self.promised: dict[tuple[str, str], float] = dict.fromkeys(world.ways.links, 0.0)
        """Bytes that requests in flight will send, by link and the cluster it leads from."""
        self._most_bytes = {
            name: float(self._spec.links[name].bytes)
            if name in self._spec.links
            else link.bandwidth / 8 * self._spec.link_time
            for name, link in graph.spec.links.items()
        }
        self._ways: dict[str, tuple[float, float]] = {}
        for pool in world.pools.values():
            self._limit(pool)
        self._queue: deque[Visit] = deque()
        self._rate = DrainRate()
        self._waiting: dict[Visit, float] = {}

    def ask(self, visit: Visit) -> None:
        """A request comes: it begins, waits, or is refused."""
        turn = visit.turn
        if turn.prompt + turn.output > self._longest:
            self._world.recorder.longer(visit)
            self._world.refuse(visit)
            return
        if not self._world.scenario.admission:
            self._begin(visit, self._world.plan(turn))
            return
        if self._queue:
            self._wait(visit)
            return
        route = self._find(visit)
        if route is None:
            self._wait(visit)
        else:
            self._begin(visit, route)

    def _begin(self, visit: Visit, route: Route) -> None:
        world = self._world
        world.compare(route, visit.turn.prompt)
        world.begin(visit, route)

    def less(self) -> None:
        """Something has room again."""
        queue = self._queue
        if not queue:
            return
        left = 0
        while queue and not self._shut():
            visit = queue[0]
            route = self._find(visit)
            if route is None:
                break
            queue.popleft()
            del self._waiting[visit]
            left += 1
            self._begin(visit, route)
        if left:
            self._rate.step(self._events.now, left, bool(queue))

    def ended(self, flight: Flight) -> None:
        """It has ended. What its answer and its way to main were like counts for those to come."""
        self._world.let_go(flight.route)
        self._learn(flight)
        self.less()

    def _learn(self, flight: Flight) -> None:
        self.answer += LEARNED * (flight.turn.output - self.answer)
        way, there = flight.way_time, flight.main_time
        if flight.main_tokens > 1 and there > 0 and flight.route.kind != "A":
            pool = flight.main.pool
            ways, theres = self._ways.get(pool.name, (FIRST_WAY * there, there))
            self._ways[pool.name] = ways + LEARNED * (way - ways), theres + LEARNED * (there - theres)

    # Room

    def _limit(self, pool: Pool) -> None:
        """Set what its workers take."""
        own, batch = self._spec.pools.get(pool.name), pool.batch_limit
        pool.least = (own and own.requests) or batch
        pool.most_waiting = math.ceil(QUEUED * batch) if pool.role != "relay" else 1 << 60
        pool.most_tokens = (own and own.tokens) or pool.capacity

    def _find(self, visit: Visit) -> Route | None:
        """A route that has room; None: there is none, or no worker."""
        world = self._world
        without: set[WorkerKey] = set()
        shut: set[tuple[str, str]] = set()
        while True:
            try:
                route = world.plan(visit.turn, without, shut)
            except NoRoute:
                return None
            if not self._lacks(visit, route, without, shut):
                return route

    def _lacks(self, visit: Visit, route: Route, without: set[WorkerKey], shut: set[tuple[str, str]]) -> bool:
        """Something of the route has no room, and is left out from now on."""
        world = self._world
        prompt = visit.turn.prompt
        answer = min(float(visit.turn.output), self.answer)
        for key in (route.prefill, route.relay, route.main if route.kind != "P-RLD" else None):
            if key is None:
                continue
            worker = world.workers[key]
            pool = worker.pool
            if not pool.loads[worker.index]:
                continue
            need = prompt - worker.hit + (0 if pool.role == "prefill" else int(answer))
            if self._full(worker) or worker.tokens + need > pool.most_tokens:
                without.update(
                    each.key
                    for each in pool.workers
                    if each is worker
                    or self._full(each)
                    or (pool.loads[each.index] and each.tokens + need > pool.most_tokens)
                )
                return True
        if route.prefill is None or route.kind == "P-RLD":
            return False
        edge = world.ways.edge(route.prefill.pool, route.main.pool)
        if edge is None:
            return False
        size = world.workers[route.prefill].pool.kv_token * (prompt - world.workers[route.main].hit)
        queued = self.promised[edge]
        if not size or not queued or queued + size <= self._most_bytes[edge[0]]:
            return False
        shut.add(edge)
        return True

    def _full(self, worker: Worker) -> bool:
        pool = worker.pool
        load = pool.loads[worker.index]
        return (load >= pool.least and load >= self._most(pool)) or worker.waiting > pool.most_waiting

    def _most(self, pool: Pool) -> int:
        """Requests that each of its workers takes at once."""
        own, batch = self._spec.pools.get(pool.name), pool.batch_limit
        if own and own.requests:
            return own.requests
        ahead = AHEAD.get(pool.role)
        if ahead is None:
            way, there = self._ways.get(pool.name, (FIRST_WAY, 1.0))
            ahead = QUEUED + min(LONGEST_WAY, way / there)
        return batch + math.ceil(ahead * batch)

    def _shut(self) -> bool:
        """No route can have room, whatever a request is like."""
        free = {
            pool.role
            for pool in self._world.pools.values()
            for worker in pool.workers
            if worker.alive and not self._full(worker)
        }
        return "aggregated" not in free and not {"prefill", "main"} <= free

    # Waiting

    def _wait(self, visit: Visit) -> None:
        now, queue = self._events.now, self._queue
        rate = self._rate.per_second(now)
        if len(queue) >= self._spec.queue or (rate is not None and len(queue) / rate > self._spec.max_wait):
            self._world.refuse(visit)
            return
        queue.append(visit)
        self._waiting[visit] = now
        self._rate.step(now, 0, True)
        self._events.push(now + self._spec.max_wait, self._too_late, visit, now)

    def _too_late(self, visit: Visit, since: float) -> None:
        if self._waiting.get(visit) == since:
            del self._waiting[visit]
            self._queue.remove(visit)
            self._rate.step(self._events.now, 0, bool(self._queue))
            self._world.refuse(visit)
