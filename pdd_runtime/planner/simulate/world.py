"""Everything in a simulation, and how a request finds its way through it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import count
from typing import ClassVar

from pdd_runtime.errors import NoRoute
from pdd_runtime.graph import link_between
from pdd_runtime.pipeline.edges import Edges
from pdd_runtime.pipeline.finishing_guard import FinishingGuard
from pdd_runtime.pipeline.hit_rates import HitRates
from pdd_runtime.pipeline.routing_policies import PlacingPolicy
from pdd_runtime.planner.session import Session, Spans, Turn
from pdd_runtime.planner.simulate.admission import Admission
from pdd_runtime.planner.simulate.alone import Alone, Finishing
from pdd_runtime.planner.simulate.decode import DecodeWorker
from pdd_runtime.planner.simulate.events import Events
from pdd_runtime.planner.simulate.flight import Flight
from pdd_runtime.planner.simulate.looks import Looks
from pdd_runtime.planner.simulate.pool import Pool, Worker
from pdd_runtime.planner.simulate.prefill import PrefillWorker
from pdd_runtime.planner.simulate.recorder import Recorder
from pdd_runtime.planner.simulate.relayed import Relayed
from pdd_runtime.planner.simulate.scenario import Failure, Scenario, SimulationError
from pdd_runtime.planner.simulate.views import Views
from pdd_runtime.planner.simulate.visit import Visit
from pdd_runtime.planner.simulate.ways import Ways
from pdd_runtime.plugins.handoff import HandoffStrategy
from pdd_runtime.plugins.routing import Finishing as FinishingView
from pdd_runtime.plugins.routing import RequestFacts, Route, RoutingPolicy, WorkerKey

_NONE = FinishingView()


class World:
    """Pools, links, policy and strategy. Requests come in by `arrive`."""

    LOOK: ClassVar[float] = 0.1
    """Seconds between two looks for a worker, where a request needs one and none is there."""

    def __init__(
        self, scenario: Scenario, recorder: Recorder, sessions: Iterator[Session], concurrency: int, apart: bool = False
    ) -> None:
        """`concurrency`: sessions at once where they have no start. `apart`: sessions have nothing in common beyond
        the prefixes that they begin with."""
        graph, plugins = scenario.graph, scenario.plugins
        spec = graph.spec
        self.scenario, self.recorder, self.events = scenario, recorder, Events()
        routing, handoff = plugins.routing(spec.routing.plugin), plugins.handoff(spec.handoff.plugin)
        self.policy: RoutingPolicy = routing(plugins.configure(routing, spec.routing.config, "spec.routing.config"))
        self.strategy: HandoffStrategy = handoff(plugins.configure(handoff, spec.handoff.config, "spec.handoff.config"))
        if self.strategy.carries == "kv":
            Edges(graph).require_relay_kv(self.strategy.name)
        self.ways = Ways(self.events, scenario)
        self.overlap = scenario.overlap
        self.pools: dict[str, Pool] = {}
        self.workers: dict[WorkerKey, Worker] = {}
        for name, declared in spec.pools.items():
            model = scenario.pools.get(name)
            if model is None:
                raise SimulationError(
                    f"nothing says how the workers of pool {name} behave",
                    where=f"spec.pools.{name}",
                    fix="measure a profile (`pdd-runtime profile`), or name the pool's `hardware`",
                )
            between = link_between(graph, graph.frontend_cluster, declared.cluster)
            delay = scenario.link_model(between[0]).rtt / 2 if between else 0.0
            pool = self.pools[name] = Pool(self.events, name, declared.role, declared.cluster, model, delay)
            kind = PrefillWorker if declared.role == "prefill" else DecodeWorker
            for index in range(declared.replicas):
                worker = kind(pool, index)
                self.workers[worker.key] = worker
        self.admission = Admission(self, graph)
        self.flights: dict[Flight, None] | None = {} if scenario.failures else None
        """Those under way; None where nobody will ask."""
        for failure in scenario.failures:
            self._checked(failure)
            self.events.push(failure.at, self._fails, failure)
        self._rates = HitRates(None)
        self._guard = FinishingGuard(self._rates, 1) if _may_finish_on_relay(self.policy) else None
        self.looks = Looks(self.pools, self.ways)
        self.views = Views(graph, self.pools, self.ways, whole=scenario.whole_views)
        self._sessions, self._concurrency, self.sessions_apart = sessions, concurrency, apart
        self._lots = count(1)

    # Sessions come

    def open(self) -> None:
        """The first ones."""
        session = next(self._sessions, None)
        if session is None:
            return
        if session.start is not None:
            self.events.push(session.start, self._starts, session)
            return
        self._starts_now(session)
        for _ in range(self._concurrency - 1):
            self.left()

    def _starts(self, session: Session) -> None:
        if self.recorder.enough:
            return
        following = next(self._sessions, None)
        if following is not None:
            start = following.start
            assert start is not None
            self.events.push(start, self._starts, following)
        Visit(self, session).ask()

    def _starts_now(self, session: Session) -> None:
        self.events.push(self.events.now, Visit(self, session).ask)

    def left(self) -> None:
        """A session has ended. In a closed loop it makes room for the next."""
        if self._concurrency and not self.recorder.enough:
            session = next(self._sessions, None)
            if session is not None:
                self._starts_now(session)

    # Requests

    def arrive(self, visit: Visit) -> None:
        """A request is sent."""
        visit.measured = self.recorder.sent(visit)
        if visit.measured:
            self.looks.look()
        self.admission.ask(visit)

    def plan(self, turn: Turn, without: Collection[WorkerKey] = (), shut: Collection[tuple[str, str]] = ()) -> Route:
        """The policy's route over the workers that are there; without some of them, and without KV over some links.
        Raises `NoRoute`."""
        facts = RequestFacts(prompt_tokens=turn.prompt, max_tokens=turn.output, seed=next(self._lots))
        return self.policy.plan(facts, self.views.view(turn.spans, self._finishing_view(), without, shut))

    def begin(self, visit: Visit, route: Route, lost: Flight | None = None) -> None:
        """On its route. `lost`: the flight that it follows, when it has lost a worker."""
        workers = self.workers
        main = workers[route.main]
        assert isinstance(main, DecodeWorker)
        flight: Flight
        if route.kind == "A":
            alone = flight = Alone(self, visit, route, lost)
            alone.start_alone(main)
        else:
            assert route.prefill is not None
            prefill = workers[route.prefill]
            assert isinstance(prefill, PrefillWorker)
            if route.kind == "P-MD":
                flight = Flight(self, visit, route, lost)
                flight.start(prefill, main)
            else:
                assert route.relay is not None
                relay = workers[route.relay]
                assert isinstance(relay, DecodeWorker)
                if route.kind == "P-RLD":
                    finishing = flight = Finishing(self, visit, route, lost)
                    finishing.start_finishing(prefill, relay, main)
                else:
                    relayed = flight = Relayed(self, visit, route, lost)
                    relayed.start_relayed(prefill, relay, main)
        if self.flights is not None:
            self.flights[flight] = None

    def finished(self, flight: Flight) -> None:
        """The user has the whole answer."""
        visit, recorder = flight.visit, self.recorder
        if recorder.sending:
            recorder.within += 1
        if visit.measured:
            recorder.ended(flight)
        visit.answered()

    def ended(self, flight: Flight) -> None:
        """No worker needs to do anything more for it."""
        if self.flights is not None:
            self.flights.pop(flight, None)
        self.admission.ended(flight)

    def refuse(self, visit: Visit) -> None:
        """Its user is told to come back later."""
        if visit.measured:
            self.recorder.refused(visit)
        visit.answered()

    # Failures

    def _fails(self, failure: Failure) -> None:
        if failure.kind == "link":
            self.ways.cut(failure.name)
            self.events.push(self.events.now + failure.duration, self.ways.mend, failure.name)
            return
        worker = self.pools[failure.name].workers[failure.index]
        if not worker.alive:
            return
        worker.vanish()
        assert self.flights is not None
        for flight in list(self.flights):
            if not flight.over:
                flight.lost(worker)
        del self.workers[worker.key]
        worker.fail()
        self.events.push(self.events.now + failure.duration, self._returns, worker)

    def _returns(self, worker: Worker) -> None:
        worker.come_back()
        self.workers[worker.key] = worker
        self.admission.less()

    def resume(self, lost: Flight) -> None:
        """Go on with other workers, behind what its user has."""
        assert self.flights is not None
        self.flights.pop(lost, None)
        if lost.known >= lost.max_tokens:
            self.finished(lost)
            self.admission.ended(lost)
        else:
            self._resume(lost, self.events.now + self.scenario.graph.spec.recovery.wait)

    def _resume(self, lost: Flight, until: float) -> None:
        turn = lost.left
        try:
            route = self.plan(turn)
        except NoRoute:
            if self.events.now < until:
                self.events.push(self.events.now + self.LOOK, self._resume, lost, until)
                return
            if lost.visit.measured:
                self.recorder.gave_up(lost.visit)
            self.admission.ended(lost)
            lost.visit.answered()
            return
        self.begin(lost.visit, route, lost)

    def spare(self, role: str, source: str) -> Worker | None:
        """The least loaded worker of that role which pool `source` feeds with KV; None: there is none."""
        there = [
            worker
            for pool in self.pools.values()
            if pool.role == role and self.ways.feeds(source, pool.name)
            for worker in pool.workers
            if worker.alive
        ]
        return min(there, key=lambda worker: worker.requests, default=None)

    def holder(self, spans: Spans, taker: Worker) -> PrefillWorker | None:
        """The prefill worker that feeds `taker` and has most of a prompt; None: nobody has any of it."""
        there = [
            (worker.cache.hit(spans), worker)
            for pool in self.pools.values()
            if pool.role == "prefill" and self.ways.feeds(pool.name, taker.pool.name)
            for worker in pool.workers
            if worker.alive and isinstance(worker, PrefillWorker)
        ]
        hit, worker = max(there, key=lambda had: had[0], default=(0, None))
        return worker if hit else None

    # What bounds requests that end on the relay

    def compare(self, route: Route, prompt: int) -> None:
        """A request was admitted: its prompt's hits on prefill and main are compared, and its route is counted."""
        if self._guard is not None and route.prefill is not None:
            self._guard.begun(route)
            prefill, main = self.workers[route.prefill], self.workers[route.main]
            self._rates.saw(route.main.pool, prompt, prefill.hit, main.hit)

    def let_go(self, route: Route) -> None:
        """It has ended."""
        if self._guard is not None:
            self._guard.ended(route)

    def _finishing_view(self) -> FinishingView:
        return _NONE if self._guard is None else self._guard.view

    def _checked(self, failure: Failure) -> None:
        known: Collection[str] = self.pools if failure.kind == "worker" else self.scenario.graph.spec.links
        if failure.name not in known:
            raise SimulationError(
                f"a {failure.kind} of {failure.name or '(no name)'} is to fail, which the graph does not have",
                why=f"it has {', '.join(known) or 'none'}",
            )
        if failure.kind == "worker" and not 0 <= failure.index < len(self.pools[failure.name].workers):
            raise SimulationError(f"worker {failure.name}/{failure.index} is to fail, which the graph does not have")
        if failure.at < 0 or failure.duration < 0:
            raise SimulationError(f"a failure at {failure.at} s for {failure.duration} s lies before the beginning")


def _may_finish_on_relay(policy: RoutingPolicy) -> bool:
    """The built-in policies look at what bounds that only where it is allowed; of others it is not known."""
    return not isinstance(policy, PlacingPolicy) or getattr(policy.config, "finish_on_relay", None) is not None
