"""Who may begin, and who waits: in front of every session."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence

from pdd_runtime.clock import now
from pdd_runtime.errors import Cancelled, NoRoute, Overloaded, PddError
from pdd_runtime.graph import Graph
from pdd_runtime.observe import Timeline
from pdd_runtime.pipeline.admission_metrics import AdmissionCounts
from pdd_runtime.pipeline.admission_room import Room, Stock, Ticket
from pdd_runtime.pipeline.admission_shares import DrainRate, FairQueue
from pdd_runtime.pipeline.finishing_guard import FinishingGuard
from pdd_runtime.pipeline.hit_rates import HitRates
from pdd_runtime.pipeline.request import SessionRequest
from pdd_runtime.plugins.routing import ClusterView, RequestFacts, Route, WorkerKey

log = logging.getLogger(__name__)

LOOK = 0.02
"""Seconds between two looks at what workers say, while anybody waits. What ends here is seen at once."""
QUIET = 60.0
"""Seconds without a refusal after which the next one is told in the log again."""
SOONEST = 1.0
"""Seconds after which who is refused may try again, at least."""

Plan = Callable[[SessionRequest, ClusterView], Route]


class Admitted:
    """A request that may begin, on the route that has room for it."""

    def __init__(self, admission: Admission, ticket: Ticket, tenant: str, tokens: int, cost: float) -> None:
        self.route = ticket.route
        self._admission, self._ticket = admission, ticket
        self._tenant, self._tokens, self._cost = tenant, tokens, cost
        self._open = True

    def begins(self, timeline: Timeline) -> None:
        """Its session is there, and tells `timeline` how far it is."""
        self._ticket.begins(timeline)

    def over(self, answer: int = 0, *, whole: bool = False) -> None:
        """It has ended, with so many tokens of an answer, or never begun. Idempotent."""
        if self._open:
            self._open = False
            self._ticket.over()
            self._admission.ended(self.route, self._tenant, self._tokens + answer - self._cost, answer if whole else 0)


class Admission:
    """Bounds what is in flight by what there is room for on a whole route; the others wait here, so that no stage takes
    what the next one cannot hold. Nobody waits in line, and there is room: it is decided at once, without a task
    waking up."""

    def __init__(
        self,
        graph: Graph,
        view: Callable[[Sequence[int], str], ClusterView],
        plan: Plan,
        stock: Callable[[WorkerKey], Stock],
        clock: Callable[[], float] = now,
        beside: Admission | None = None,
    ) -> None:
        """`view`: the workers, with what they have cached of a prompt, under a salt. `plan`: the route that a request
        would take in a view. `stock`: what a worker has for KV. `beside`: another one of the same process, for requests
        that take other workers: what is taken, and what is counted, is so by both together."""
        self._spec, self._view, self._plan, self._clock = graph.spec.admission, view, plan, clock
        self.room: Room = beside.room if beside else Room(graph, stock)
        self.queue: FairQueue[_Asking] = FairQueue(graph.spec.admission.shares)
        self.hit_rates: HitRates = beside.hit_rates if beside else HitRates(graph.spec.slo.hit_rate_gap)
        self.finishing: FinishingGuard = (
            beside.finishing if beside else FinishingGuard(self.hit_rates, len(graph.frontends))
        )
        self.counts: AdmissionCounts = beside.counts if beside else AdmissionCounts()
        self._rate = DrainRate()
        self._look: asyncio.TimerHandle | None = None
        self._closed = False
        self._refused_at = -math.inf
        """When the last one was."""

    async def admit(self, request: SessionRequest, timeline: Timeline) -> Admitted:
        """Returns when the request may begin. Raises `Overloaded` where too many wait, or it would wait for too long;
        what `plan` raises; `Cancelled` when the frontend closes. All of it is on the timeline."""
        try:
            if self.queue:
                return await self._wait(request, timeline, f"{len(self.queue)} wait already")
            found = self._find(request)
            if isinstance(found, Admitted):
                self.queue.pass_by(request.tenant, found._cost)
                return found
            return await self._wait(request, timeline, found)
        except PddError as error:
            timeline.failed(error)
            raise
        except asyncio.CancelledError:
            timeline.cancelled()
            raise

    def ended(self, route: Route, tenant: str, more: float, answer: int) -> None:
        """A request of `tenant` is over, and took so many tokens more than was thought. `answer`: tokens of a whole
        answer; 0: none."""
        self.finishing.ended(route)
        self.queue.correct(tenant, more)
        if answer:
            self.room.learn(answer)
        self._pump()

    def close(self) -> None:
        """Nobody waits any longer. Idempotent."""
        self._closed = True
        for asking in list(self.queue):
            fix = "send the request again"
            self._fail(asking, Cancelled("the frontend is closing", where=f"request {asking.request.id}", fix=fix))
        if self._look is not None:
            self._look.cancel()

    def view(self) -> ClusterView:
        """The workers, whatever they have cached."""
        return self._view((), "")

    # Waiting

    async def _wait(self, request: SessionRequest, timeline: Timeline, why: str) -> Admitted:
        asking = _Asking(request, self._cost(request), asyncio.get_running_loop().create_future())
        begun, ahead = self._clock(), self.queue.ahead(request.tenant, request.priority)
        rate = self._rate.per_second(begun)
        if rate is not None and ahead / rate > self._spec.max_wait:
            raise self._refusal(asking, "long", ahead)
        self.queue.put(asking)
        self._stepped(0)
        if len(self.queue) > self._spec.queue:
            last = self.queue.last()
            self._fail(last, self._refusal(last, "full", len(self.queue) - 1))
        else:
            timeline.event("", f"queued: behind {ahead}: {why}")
        timeout = asyncio.get_running_loop().call_later(self._spec.max_wait, self._too_late, asking)
        try:
            admitted = await asking.place
        except asyncio.CancelledError:
            if asking.place.done() and not asking.place.cancelled() and asking.place.exception() is None:
                asking.place.result().over()
            raise
        finally:
            timeout.cancel()
            self._remove(asking)
        waited = self._clock() - begun
        self.counts.waits.labels(request.tenant).observe(waited)
        timeline.event("", f"admitted: after {waited:.3f} s")
        return admitted

    def _pump(self) -> None:
        """Let in whoever's turn it is, as long as there is room."""
        left = 0
        while self.queue and not self._closed and not self.room.shut(self.view()):
            asking = self.queue.first()
            try:
                found = self._find(asking.request)
            except NoRoute:
                break  # A worker may come (back): for that it may wait as for room.
            except Exception as error:
                self._fail(asking, error)
                continue
            if not isinstance(found, Admitted):
                break
            self.queue.take(asking)
            asking.place.set_result(found)
            left += 1
        self._stepped(left)

    def _find(self, request: SessionRequest) -> Admitted | str:
        facts, view = request.facts, self._view(request.tokens, request.salt)
        found = self.room.find(facts, view, lambda seen: self._plan(request, seen))
        if isinstance(found, str):
            return found
        self.finishing.begun(found.route)
        if not request.beside:  # Its prompt is on its way to main, which is no gap.
            self._compare(found.route, facts, view)
        return Admitted(self, found, request.tenant, len(request.tokens), self._cost(request))

    def _compare(self, route: Route, facts: RequestFacts, view: ClusterView) -> None:
        if route.prefill is not None:
            cached = {w.key: w.cached_tokens for w in view.workers if w.key in (route.prefill, route.main)}
            self.hit_rates.saw(route.main.pool, facts.prompt_tokens, cached[route.prefill], cached[route.main])

    def _cost(self, request: SessionRequest) -> float:
        return len(request.tokens) + self.room.expected(request.max_tokens)

    # Giving up

    def _too_late(self, asking: _Asking) -> None:
        self._fail(asking, self._refusal(asking, "waited", self.queue.ahead(asking.tenant, asking.priority)))

    def _refusal(self, asking: _Asking, reason: str, ahead: int) -> Overloaded:
        """Reasons: `full`, the queue; `long`, the wait would be; `waited` in vain."""
        self.counts.refused.labels(asking.tenant, reason).inc()
        at = self._clock()
        rate = self._rate.per_second(at)
        said = {
            "full": f"the queue is full, with {self._spec.queue}",
            "long": f"{ahead} come first, and none waits for more than {self._spec.max_wait:.3g} s",
            "waited": f"there was no room for it within {self._spec.max_wait:.3g} s",
        }[reason]
        if at - self._refused_at > QUIET:
            log.warning("requests are refused from now on: %s", said)
        self._refused_at = at
        error = Overloaded(
            "more is asked for than can be served now",
            where=f"request {asking.request.id}",
            why=f"{said}; {rate:.3g} a second are let in" if rate else f"{said}; none was let in of late",
            fix="send it again after the time that Retry-After says",
        )
        # Where none leaves, it has lasted so long, and may well last as long again.
        error.retry_after = max(SOONEST, (ahead + 1) / rate if rate else self._rate.stuck(at))
        return error

    def _fail(self, asking: _Asking, error: Exception) -> None:
        self._remove(asking)
        if not asking.place.done():
            asking.place.set_exception(error)

    def _remove(self, asking: _Asking) -> None:
        self.queue.remove(asking)
        self._stepped(0)

    def _stepped(self, left: int) -> None:
        """The queue has changed, `left` of it into sessions."""
        self._rate.step(self._clock(), left, bool(self.queue))
        if self.queue and self._look is None and not self._closed:
            self._look = asyncio.get_running_loop().call_later(LOOK, self._looked)

    def _looked(self) -> None:
        self._look = None
        self._pump()


class _Asking:
    """A request that waits."""

    def __init__(self, request: SessionRequest, cost: float, place: asyncio.Future[Admitted]) -> None:
        self.request, self.cost, self.place = request, cost, place
        self.tenant, self.priority = request.tenant, request.priority
