"""The session driver: plans each request's route, runs its session, keeps count of those in flight."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial

import msgspec
from prometheus_client.registry import Collector

from pdd_runtime.clock import now
from pdd_runtime.errors import Cancelled, NoRoute
from pdd_runtime.graph import Graph
from pdd_runtime.observe import Timeline, Timelines
from pdd_runtime.pipeline import deadlines
from pdd_runtime.pipeline.admission import Admitted
from pdd_runtime.pipeline.admission_metrics import AdmissionCollector
from pdd_runtime.pipeline.courses import Course, Courses
from pdd_runtime.pipeline.direct import alone, direct
from pdd_runtime.pipeline.edges import Edges
from pdd_runtime.pipeline.finishing import finish_on_relay
from pdd_runtime.pipeline.links import Links
from pdd_runtime.pipeline.output import Output
from pdd_runtime.pipeline.part import Part
from pdd_runtime.pipeline.peers import Peer, Peers
from pdd_runtime.pipeline.relayed import Relayed
from pdd_runtime.pipeline.request import Finish, SessionRequest
from pdd_runtime.pipeline.session import Session
from pdd_runtime.plugins import PluginManager
from pdd_runtime.plugins.discovery import Discovery, Member
from pdd_runtime.plugins.engine import EngineInfo, Load, Sampling, Token, TokenizerFiles
from pdd_runtime.plugins.handoff import HandoffStrategy
from pdd_runtime.plugins.lines import Lines
from pdd_runtime.plugins.messages import Empty
from pdd_runtime.plugins.routing import ClusterView, LinkView, Route
from pdd_runtime.rpc import Greeting, Tls
from pdd_runtime.waiting import watched

log = logging.getLogger(__name__)

SHOWN = 30.0
"""Seconds after which a pool without any process, starting or not, is taken to be away."""

_ANY = SessionRequest(id="", tokens=(0,), max_tokens=2, sampling=Sampling())
"""For whether there is any route at all."""


class Driver:
    """Runs requests through the graph's workers. One for each frontend process."""

    def __init__(
        self,
        graph: Graph,
        plugins: PluginManager,
        discovery: Discovery,
        greeting: Greeting,
        lines: Lines,
        timelines: Timelines,
        tls: Tls | None = None,
    ) -> None:
        """Raises `PluginError` for a policy or strategy that is not there or badly set, `GraphError` for a strategy
        that needs an edge which the graph lacks."""
        self._edges, self._links = Edges(graph), Links(graph)
        self._graph, self._timelines = graph, timelines
        self._peers = Peers(discovery, greeting, lines, tls)
        self._courses = Courses(graph, plugins, self._peers, self._edges, self._links, self._route)
        self._missing = set(graph.spec.pools)
        """Pools of which no worker has been there yet."""
        self._began = now()
        self._sessions: dict[Session, asyncio.Task[None]] = {}
        self._telling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to look for workers; returns at once."""
        await self._peers.start()
        telling = asyncio.create_task(self._tell_sessions(), name="sessions hear of workers")
        self._telling = watched(telling, "sessions do not hear of lost workers any more")

    async def close(self) -> None:
        """End all sessions, and all connections. Idempotent."""
        for admission in self._courses.admissions:
            admission.close()
        tasks = list(self._sessions.values())
        for session, task in self._sessions.items():
            error = Cancelled("the frontend is closing", where=f"request {session.id}", fix="send the request again")
            if session.finish is None:
                session.timeline.failed(error)
                session.output.fail(error)
            task.cancel()
        if self._telling is not None:
            self._telling.cancel()
            tasks.append(self._telling)
        if tasks:
            await asyncio.wait(tasks)
        await self._peers.close()

    @property
    def sessions(self) -> int:
        """Those in flight; among them such whose user has the whole answer, while main gets their KV."""
        return len(self._sessions)

    @property
    def ready(self) -> bool:
        """A whole route exists."""
        return not self.why_not_ready

    @property
    def why_not_ready(self) -> str:
        """Empty when ready. At first every pool must have shown a worker, so that a graph is not called ready
        while its relay is still starting; after that, a whole route is enough. Pools of which no process shows itself
        are not waited for beyond a while: their cluster may be away."""
        self._missing -= {peer.key.pool for peer in self._peers.ready}
        if now() > self._began + SHOWN:
            self._missing &= self._peers.pools
        if self._missing:
            pools = ", ".join(sorted(self._missing))
            return "; ".join([f"no worker is ready yet in: {pools}", *self._troubles()])
        why = ""
        for course in self._courses:
            if (lack := course.lacks(_ANY)) is None:
                return ""
            why = why or lack.what
        return "; ".join([why, *self._troubles()])

    def workers(self) -> list[tuple[Member, Load]]:
        """Those that take new sessions, each with what it last said of its load."""
        return [(peer.member, peer.load) for peer in self._peers.ready]

    def links(self) -> tuple[LinkView, ...]:
        """The graph's links in both directions, as those who send over them have found them."""
        return self._links.views(self._peers.telemetry())

    @property
    def collectors(self) -> Iterable[Collector]:
        """What admission shows in `/metrics`."""
        return (AdmissionCollector(*self._courses.admissions),)

    async def info(self) -> EngineInfo:
        """What the workers serve, with the shortest context that one of them has: a route may lead over any. Waits for
        one. Raises `DeadlineExceeded`."""
        infos = [peer.member.info for peer in await self._workers() if peer.member.info is not None]
        return min(infos, key=lambda info: info.context_length)

    async def tokenizer(self) -> TokenizerFiles:
        """Of the model served; waits for a worker. Raises `DeadlineExceeded`."""
        peer = (await self._workers())[0]
        return await peer.connection.call("engine.tokenizer", Empty(), TokenizerFiles, timeout=deadlines.CALL)

    async def run(self, request: SessionRequest) -> AsyncGenerator[Token | Finish, None]:
        """Tokens in order, each once, then `Finish`. Closing it before that cancels the request everywhere.

        Raises `NoRoute` where no worker is there to take it, `RequestError` where those that are cannot do what it
        asks for, `Overloaded` where they have no room for it in time. Where workers fail it, others go on; when none
        can, it raises the last failure: `WorkerLost`, `CapacityError`, `EngineError`, `DeadlineExceeded`.
        """
        async with self._running(request) as output:
            while True:
                item = await output.get()
                yield item
                if isinstance(item, Finish):
                    return

    async def deliver(self, request: SessionRequest, put: Callable[[Token | Finish], None]) -> None:
        """As `run`, but each item is given to `put` as soon as it is made; returns after `Finish`. Cancelling it before
        that cancels the request everywhere. Where tokens come singly it costs a sixth less than `run`."""
        async with self._running(request) as output:
            await output.deliver(put)

    @asynccontextmanager
    async def _running(self, request: SessionRequest) -> AsyncGenerator[Output, None]:
        timeline = self._timelines.begin(request.id, self._graph.name, len(request.tokens), variant=request.variant)
        course = self._courses[request.variant]
        if len(self._courses) > 1:
            request, course = self._able(request, timeline)
        session, task = self._begin(request, course, timeline, await course.admission.admit(request, timeline))
        try:
            yield session.output
        finally:
            if session.finish is None:
                task.cancel()
                await asyncio.wait({task})

    def stop(self, id: str) -> None:
        """End the answer of request `id` where it is, as by a stop string: `run` gives `Finish`, and main still gets
        its KV. Nothing happens where it has ended."""
        for session in self._sessions:
            if session.id == id:
                session.stop()

    def _able(self, request: SessionRequest, timeline: Timeline) -> tuple[SessionRequest, Course]:
        """The request as that of a variant that has workers for it: its own, else the control, else any; its own where
        none has."""
        own = self._courses[request.variant]
        asked = request if request.sampling.needs else _ANY
        lack = own.lacks(asked)
        if lack is None:
            return request, own
        for course in self._courses:
            if course is not own and course.lacks(asked) is None:
                timeline.leaves_variant(lack, course.name)
                return msgspec.structs.replace(request, variant=course.name), course
        return request, own

    def _begin(
        self, request: SessionRequest, course: Course, timeline: Timeline, admitted: Admitted
    ) -> tuple[Session, asyncio.Task[None]]:
        route = admitted.route
        try:
            workers = course.planner.workers(route)
        except NoRoute as error:
            admitted.over()
            timeline.failed(error)
            raise
        timeline.routed(route.kind, route.reason)
        tokens = len(request.tokens)
        log.info("request %s: route %s, %d prompt tokens: %s", request.id, route.kind, tokens, route.reason)
        recovery = self._graph.spec.recovery
        session = Session(request, route, workers, course.planner, self._edges, timeline, recovery)
        task = asyncio.create_task(session.run(partial(_flow, course.strategy)), name=request.id)
        self._sessions[session] = task
        admitted.begins(timeline)

        def ended(_: asyncio.Task[None]) -> None:
            # Here and not in the task: one that is cancelled before its first step runs no code of its own.
            session.leave()
            del self._sessions[session]
            admitted.over(len(session.log), whole=session.finish is not None)

        task.add_done_callback(ended)
        return session, task

    def _route(self, request: SessionRequest, view: ClusterView) -> Route:
        """That of the request which it is beside, where that one is in flight and its workers are in the view."""
        beside = request.beside
        route = next((session.route for session in self._sessions if session.id == beside), None) if beside else None
        there = {None, *(worker.key for worker in view.workers)}
        if route is None or not there.issuperset((route.prefill, route.relay, route.main)):
            return self._courses[request.variant].planner.within(request, view)
        return msgspec.structs.replace(route, reason=f"beside {beside}, which has the same prompt: {route.reason}")

    async def _tell_sessions(self) -> None:
        """Those that wait for a worker look again when one has come or gone."""
        while True:
            await self._peers.changed.next()
            for session in tuple(self._sessions):
                session.changed.fire()

    async def _workers(self) -> list[Peer]:
        """Those that are ready, at least one."""
        await self._peers.changed.until(lambda: bool(self._peers.ready), deadlines.WORKER, "a first worker")
        return self._peers.ready

    def _troubles(self) -> list[str]:
        return [f"{key}: {why}" for key, why in self._peers.troubles.items()]


async def _flow(strategy: HandoffStrategy, part: Part) -> None:
    """By the workers that a session has, whether a route or a loss has left them to it."""
    crew, route = part.session.crew, part.session.route
    if route is not None and route.kind == "P-RLD":
        await finish_on_relay(part)
    elif "relay" in crew:
        await Relayed(part, strategy).run()
    elif "prefill" in crew:
        await direct(part)
    else:
        await alone(part)
