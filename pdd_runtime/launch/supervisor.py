"""The launcher of a graph: brings its processes up and keeps them up, in one asyncio process."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing, suppress

import httpx
import msgspec

from pdd_runtime.discovery import RegistryServer, open_discovery
from pdd_runtime.discovery.mark import mark_of
from pdd_runtime.errors import PddError, leaves
from pdd_runtime.graph import Graph
from pdd_runtime.launch.changes import Changes
from pdd_runtime.launch.child import Child, ChildSpec
from pdd_runtime.launch.crew import Crew
from pdd_runtime.launch.identity import birth
from pdd_runtime.launch.leftovers import end_left
from pdd_runtime.launch.meeting import met
from pdd_runtime.launch.orders import Apply, Down, Plan, Progress, Restart, Wanted
from pdd_runtime.launch.part import Part
from pdd_runtime.launch.port import Ports
from pdd_runtime.launch.readiness import why_not_ready
from pdd_runtime.launch.slot import FRONTEND, Slot
from pdd_runtime.launch.specs import child_specs
from pdd_runtime.launch.state import GraphState, Launcher
from pdd_runtime.launch.status import GraphStatus
from pdd_runtime.launch.trust import trusted
from pdd_runtime.plugins import PluginManager
from pdd_runtime.plugins.certificate import tls_of
from pdd_runtime.plugins.discovery import Discovery, Member
from pdd_runtime.plugins.messages import Empty
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.rpc import Greeting, RpcContext, RpcServer, Tls

log = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds that running requests get at a stop."""
WORKER_PATIENCE = 10.0
"""Seconds from the word to SIGKILL for workers, which have no requests any more."""
MEET = 3.0
"""Seconds for discovery's servers to answer before processes are started all the same."""
MARKS = 64
"""Digests of what a graph was before that are remembered."""
READY_EVERY = 0.25
HEALTHY_EVERY = 2.0


class Supervisor:
    """`run` does all; `stop` and `kill`, from a signal or over the wire, end it."""

    def __init__(
        self,
        graph: Graph,
        plugins: PluginManager,
        state: GraphState,
        source: str,
        on_line: Callable[[ChildSpec, str], None] = lambda spec, line: None,
        *,
        part: Part = Part(),  # noqa: B008 - frozen
    ) -> None:
        """`source` names the YAML to people; `on_line` gets every line that a process writes."""
        self.graph, self.state, self.source, self.part = graph, state, source, part
        self._plugins = plugins
        self.crew = Crew(
            state, on_change=self._on_child, on_line=on_line, on_exit=self._on_exit, on_vacant=self._vacate
        )
        self._changes = Changes(self)
        self._ports = Ports()
        self._specs: Mapping[Slot, ChildSpec] = {}
        self._members: dict[str, Member] = {}
        """By epoch, as discovery has them; of one whose place another has taken over, the last that was seen."""
        self._registry: RegistryServer | None = None
        self._discovery: Discovery | None = None
        self._trouble = ""
        self._why_not_ready = "no process has started yet"
        self._patience = PATIENCE
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._change = asyncio.Event()
        self._launcher = Launcher(pid=0, birth="", endpoint="", secret="")
        self._tls: Tls | None = None

    def stop(self, patience: float = PATIENCE) -> None:
        """Drain: the frontend first, which lets running requests end, then the workers. Idempotent."""
        if not self._stop.is_set():
            self._patience = patience
            self._stop.set()
            self.changed()

    def kill(self) -> None:
        """End every process now."""
        self.stop()
        self._kill.set()
        self.crew.kill()

    def status(self) -> GraphStatus:
        order = {slot: place for place, slot in enumerate(self._specs)}
        children = sorted(self.crew.children, key=lambda child: order.get(child.spec.slot, len(order)))
        return GraphStatus(
            name=self.state.name,
            source=self.source,
            pid=os.getpid(),
            url=self._url,
            admin=next((member.admin for member in self._frontends if member.admin), ""),
            ready=not self._why_not_ready,
            why_not_ready=self._why_not_ready,
            stopping=self._stop.is_set(),
            trouble="; ".join(filter(None, (self._trouble, self._changes.failed, *self._lost_logs()))),
            changing=self._changes.doing,
            processes=tuple(child.status(self._member(child)) for child in children),
        )

    def _lost_logs(self) -> list[str]:
        return [f"{child.spec}: {child.log.trouble}" for child in self.crew.children if child.log.trouble]

    async def watch(self) -> AsyncGenerator[GraphStatus, None]:
        """The status now, and again after each change. Endless."""
        while True:
            change = self._change
            yield self.status()
            await change.wait()

    async def run(self) -> None:
        """Returns when everything has been stopped in order. Raises `AlreadyRunningError`, and `LaunchError` when a
        process says at its first start that it can never work."""
        with self.state.hold(), ExitStack() as stack:
            before = self.state.launcher()
            await end_left(before)
            secret = self.part.secret or secrets.token_urlsafe(32)
            self._tls = tls_of(self.graph, self._cluster)
            server = RpcServer(self._greeting(secret), tls=self._tls)
            self._registry = RegistryServer(server)
            self._serve(server)
            try:
                endpoint = await server.start("127.0.0.1")
                self._write_graph()
                self._launcher = Launcher(
                    pid=os.getpid(),
                    birth=birth(os.getpid()),
                    endpoint=endpoint,
                    secret=secret,
                    # Of other clusters there may be processes that know only what it was when its launcher died.
                    marks=_grown(before.marks if before else (), self.graph),
                )
                self.state.write_launcher(self._launcher)
                self._discovery = self._open_discovery(self.graph, self._launcher.marks)
                try:
                    await _meet(self._discovery)
                    stack.enter_context(self._ports)
                    self._specs = self._make_specs()
                    await self._run_children()
                finally:
                    await self._discovery.close()
            except BaseExceptionGroup as group:
                errors = list(leaves(group))
                raise next((error for error in errors if isinstance(error, PddError)), errors[0]) from None
            finally:
                self._registry.close()
                await server.close()
                self.state.forget_launcher()

    # For `Changes`

    async def becomes(self, graph: Graph, source: str) -> Mapping[Slot, ChildSpec]:
        marks = _grown(self._launcher.marks, graph)
        if marks != self._launcher.marks:
            discovery = self._open_discovery(graph, marks)
            try:
                await _meet(discovery)
            except BaseException:
                await discovery.close()
                raise
            before, self._discovery = self._discovery, discovery
            if before is not None:
                await before.close()
        self._launcher = msgspec.structs.replace(self._launcher, marks=marks)
        self.state.write_launcher(self._launcher)
        self.graph, self.source = graph, source
        self._write_graph()
        self._specs = self._make_specs()
        return self._specs

    def specs(self) -> Mapping[Slot, ChildSpec]:
        return self._specs

    def is_ready(self, child: Child) -> bool:
        member = self._members.get(child.epoch)
        return member is not None and member.state == "ready" and child.recorded is not None

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._change.wait()

    async def met(self, child: Child) -> None:
        member = self._members.get(child.epoch)
        if member is None or member.role == "frontend":
            return
        others = [self._member(other) for other in self.crew.children if other.spec.pool == child.spec.pool]
        known = [other for other in others if other is not None and other.key != member.key]
        if not await met(member, known, self._greeting(self._launcher.secret), self._tls):
            log.warning("not every frontend has found %s", member.key)

    def changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _run_children(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            views = [
                tasks.create_task(self._watch_members(), name="members"),
                tasks.create_task(self._watch_ready(), name="ready"),
            ]
            async with self.crew:
                for spec in self._specs.values():
                    self.crew.start(spec)
                await self._stop.wait()
                await self._changes.stop()
                children = [child for child in self.crew.children if not child.ended]
                await self.crew.end([child for child in children if child.spec.role == "frontend"], self._patience)
                workers = [child for child in children if child.spec.role != "frontend"]
                await self.crew.end(workers, grace=WORKER_PATIENCE)
            for view in views:
                view.cancel()

    @property
    def _cluster(self) -> str:
        return self.part.cluster or self.graph.frontend_cluster

    def _greeting(self, secret: str) -> Greeting:
        return Greeting(graph=self.graph.name, secret=secret, cluster=self._cluster, name="launcher")

    def _make_specs(self) -> Mapping[Slot, ChildSpec]:
        if self.part.has_frontend(self.graph):
            self._ports.keep(self.graph.spec.frontend)
        common = ["--graph", str(self.state.graph), "--discovery", self._launcher.endpoint]
        for mark in self._launcher.marks[:-1]:
            common += ["--succeeds", mark]
        return child_specs(self.graph, self.part, common, self._launcher.secret, self._ports.listener)

    def _write_graph(self) -> None:
        self.state.write_graph(self.graph.model_dump_json(by_alias=True, indent=1))

    def _open_discovery(self, graph: Graph, marks: tuple[str, ...]) -> Discovery:
        launcher = self._launcher
        return open_discovery(graph, self._plugins, launcher.endpoint, launcher.secret, self._tls, marks[:-1])

    def _on_child(self) -> None:
        self._record()
        self.changed()

    async def _on_exit(self, key: WorkerKey) -> None:
        # Others must not go on with a dead process: it leaves the view now, not when its lease runs out. Our own
        # registry also refuses what the dead may still have on its way; other discoveries are told as usual.
        assert self._registry is not None
        assert self._discovery is not None
        self._registry.remove(key)
        if not any(child.recorded and child.epoch != key.epoch for child in self._at(key)):
            # What waits on its socket nobody would answer before it is back.
            self._vacate(Slot(key.pool, key.index))
        with suppress(PddError):
            await self._discovery.unregister(key)

    def _at(self, key: WorkerKey) -> list[Child]:
        return [child for child in self.crew.children if child.spec.slot == Slot(key.pool, key.index)]

    def _vacate(self, slot: Slot) -> None:
        if slot.pool == FRONTEND:
            self._ports.vacate(slot.index)

    def _record(self) -> None:
        """Keep launcher.json true, so that `down` finds every process even when this one is dead."""
        processes = tuple(child.recorded for child in self.crew.children if child.recorded)
        fresh = msgspec.structs.replace(self._launcher, url=self._url, processes=processes)
        if fresh != self._launcher:
            self._launcher = fresh
            try:
                self.state.write_launcher(fresh)
            except OSError as error:
                # A full disk must not end what runs.
                log.error("launcher.json is out of date: %s", error)

    async def _watch_members(self) -> None:
        while (discovery := self._discovery) is not None:
            # It ends when a changed graph has another one.
            async for members in discovery.watch():
                self._take(members)
            if discovery is self._discovery:
                return

    def _take(self, members: Sequence[Member]) -> None:
        there = {(member.key.pool, member.key.index): member for member in members}
        superseded = {
            epoch: member
            for epoch, member in self._members.items()
            if (heir := there.get((member.key.pool, member.key.index))) and heir.key.epoch != epoch
        }
        ours = {child.epoch for child in self.crew.children}
        self._members = {epoch: member for epoch, member in superseded.items() if epoch in ours}
        self._members.update((member.key.epoch, member) for member in members)
        self._on_child()

    async def _watch_ready(self) -> None:
        # Each time over a new connection: an old one ends with the process behind it, and others share its port.
        limits = httpx.Limits(max_keepalive_connections=0)
        verify = trusted(self.graph)
        async with httpx.AsyncClient(timeout=5.0, trust_env=False, limits=limits, verify=verify) as client:
            while True:
                why = await self._ask_ready(client)
                trouble = self._discovery.trouble if self._discovery else ""
                if (why, trouble) != (self._why_not_ready, self._trouble):
                    self._why_not_ready, self._trouble = why, trouble
                    self.changed()
                await asyncio.sleep(READY_EVERY if why else HEALTHY_EVERY)

    async def _ask_ready(self, client: httpx.AsyncClient) -> str:
        if self.part.has_frontend(self.graph):
            return await why_not_ready(client, self._url)
        waiting = (child for child in self.crew.children if not child.stopping and not self.is_ready(child))
        return next((f"{child.spec} is not ready" for child in waiting), "")

    def _member(self, child: Child) -> Member | None:
        return self._members.get(child.epoch)

    @property
    def _url(self) -> str:
        return next((member.endpoint for member in self._frontends), "")

    @property
    def _frontends(self) -> list[Member]:
        """The ready ones first."""
        members = [self._member(child) for child in self.crew.children if child.spec.role == "frontend"]
        return sorted((member for member in members if member), key=lambda member: member.state != "ready")

    def _serve(self, server: RpcServer) -> None:
        server.unary("launch.ps", Empty, self._on_ps)
        server.stream("launch.watch", Empty, self._on_watch)
        server.unary("launch.down", Down, self._on_down)
        server.unary("launch.plan", Wanted, self._on_plan)
        server.stream("launch.apply", Apply, self._on_apply)
        server.stream("launch.restart", Restart, self._on_restart)

    async def _on_ps(self, params: Empty, context: RpcContext) -> GraphStatus:
        return self.status()

    async def _on_watch(self, params: Empty, context: RpcContext) -> AsyncGenerator[GraphStatus, None]:
        async with aclosing(self.watch()) as statuses:
            async for status in statuses:
                yield status

    async def _on_down(self, params: Down, context: RpcContext) -> None:
        self.stop(params.patience)

    async def _on_plan(self, params: Wanted, context: RpcContext) -> Plan:
        return self._changes.plan(params)

    async def _on_apply(self, params: Apply, context: RpcContext) -> AsyncGenerator[Progress, None]:
        async with aclosing(self._changes.apply(params)) as steps:
            async for step in steps:
                yield step

    async def _on_restart(self, params: Restart, context: RpcContext) -> AsyncGenerator[Progress, None]:
        async with aclosing(self._changes.restart(params)) as steps:
            async for step in steps:
                yield step


def _grown(marks: tuple[str, ...], graph: Graph) -> tuple[str, ...]:
    """With the digest of `graph` as the last."""
    digest = mark_of(graph).digest
    return (*(mark for mark in marks if mark != digest), digest)[-MARKS:]


async def _meet(discovery: Discovery) -> None:
    """Ask once who is there, so that what keeps this launcher from ever finding the others is told before it starts
    anything. Servers that are only away are no hindrance."""
    async with aclosing(discovery.watch()) as views:
        with suppress(TimeoutError):
            async with asyncio.timeout(MEET):
                await anext(views)
