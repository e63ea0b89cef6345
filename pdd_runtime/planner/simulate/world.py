"""Everything in a simulation, and how a request finds its way through it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

from pdd_runtime.graph import link_between
from pdd_runtime.pipeline.edges import Edges
from pdd_runtime.planner.session import Session
from pdd_runtime.planner.simulate.alone import Alone, Finishing
from pdd_runtime.planner.simulate.decode import DecodeWorker
from pdd_runtime.planner.simulate.events import Events
from pdd_runtime.planner.simulate.flight import Flight
from pdd_runtime.planner.simulate.pool import Pool, Worker
from pdd_runtime.planner.simulate.prefill import PrefillWorker
from pdd_runtime.planner.simulate.recorder import Recorder
from pdd_runtime.planner.simulate.relayed import Relayed
from pdd_runtime.planner.simulate.scenario import Scenario, SimulationError
from pdd_runtime.planner.simulate.views import Views
from pdd_runtime.planner.simulate.visit import Visit
from pdd_runtime.planner.simulate.ways import Ways
from pdd_runtime.plugins.handoff import HandoffStrategy
from pdd_runtime.plugins.routing import Finishing as FinishingView
from pdd_runtime.plugins.routing import RequestFacts, Route, RoutingPolicy, WorkerKey


class World:
    """Pools, links, policy and strategy. Requests come in by `arrive`."""

    def __init__(self, scenario: Scenario, recorder: Recorder, sessions: Iterator[Session], concurrency: int) -> None:
        """`concurrency`: sessions at once where they have no start."""
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
                pool.workers.append(worker)
                self.workers[worker.key] = worker
        self.views = Views(graph, self.pools, self.ways, whole=scenario.whole_views)
        self._sessions, self._concurrency = sessions, concurrency
        self._lots = count(1)
        self._waiting: deque[Visit] = deque()

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
        if self._concurrency:
            session = next(self._sessions, None)
            if session is not None:
                self._starts_now(session)

    # Requests

    def arrive(self, visit: Visit) -> None:
        """A request is sent."""
        visit.measured = self.recorder.sent(visit)
        self.begin(visit, self.plan(visit))

    def plan(self, visit: Visit) -> Route:
        """The policy's route over the workers that are there."""
        turn = visit.turn
        facts = RequestFacts(prompt_tokens=turn.prompt, max_tokens=turn.output, seed=next(self._lots))
        return self.policy.plan(facts, self.views.view(turn.spans, FinishingView()))

    def begin(self, visit: Visit, route: Route) -> None:
        """On its route."""
        workers = self.workers
        main = workers[route.main]
        assert isinstance(main, DecodeWorker)
        if route.kind == "A":
            Alone(self, visit).start_alone(main)
            return
        assert route.prefill is not None
        prefill = workers[route.prefill]
        assert isinstance(prefill, PrefillWorker)
        if route.kind == "P-MD":
            Flight(self, visit).start(prefill, main)
            return
        assert route.relay is not None
        relay = workers[route.relay]
        assert isinstance(relay, DecodeWorker)
        if route.kind == "P-RLD":
            Finishing(self, visit).start_finishing(prefill, relay, main)
        else:
            Relayed(self, visit).start_relayed(prefill, relay, main)

    def finished(self, flight: Flight) -> None:
        """The user has the whole answer."""
        if flight.visit.measured:
            self.recorder.ended(flight)
        flight.visit.answered()

    def ended(self, flight: Flight) -> None:
        """No worker needs to do anything more for it."""

    def less(self) -> None:
        """A worker has less to do."""
