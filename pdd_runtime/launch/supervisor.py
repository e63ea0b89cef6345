"""The launcher of a graph: brings its processes up and keeps them up, in one asyncio process."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, suppress

import msgspec

from pdd_runtime.discovery import RegistryServer, open_discovery
from pdd_runtime.errors import PddError, leaves
from pdd_runtime.graph import Graph
from pdd_runtime.launch.changes import Changes
from pdd_runtime.launch.child import Child, ChildSpec
from pdd_runtime.launch.crew import Crew
from pdd_runtime.launch.identity import birth
from pdd_runtime.launch.leftovers import end_left
from pdd_runtime.launch.lineage import grown, meet
from pdd_runtime.launch.meeting import met
from pdd_runtime.launch.part import Part
from pdd_runtime.launch.port import Ports
from pdd_runtime.launch.readiness import reasons
from pdd_runtime.launch.service import Service
from pdd_runtime.launch.slot import FRONTEND, Slot
from pdd_runtime.launch.specs import child_specs
from pdd_runtime.launch.state import GraphState, Launcher
from pdd_runtime.launch.status import GraphStatus
from pdd_runtime.launch.view import View
from pdd_runtime.plugins import PluginManager
from pdd_runtime.plugins.certificate import tls_of
from pdd_runtime.plugins.discovery import Discovery
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.rpc import Greeting, RpcServer, Tls
from pdd_runtime.worker.lifetime import race

log = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds that running requests get at a stop."""
WORKER_PATIENCE = 10.0
"""Seconds from the word to SIGKILL for workers, which have no requests any more."""


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
        self._view = View()
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
            admin=next((member.admin for member in self._view.frontends(children) if member.admin), ""),
            ready=not self._why_not_ready,
            why_not_ready=self._why_not_ready,
            stopping=self._stop.is_set(),
            trouble="; ".join(filter(None, (self._trouble, *self._lost_logs()))),
            changing=self._changes.doing,
            failed=self._changes.failed,
            processes=tuple(child.status(self._view.of(child)) for child in children),
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
            if await race(self._stop.wait(), end_left(before)) == 0:
                return
            secret = self.part.secret or secrets.token_urlsafe(32)
            self._tls = tls_of(self.graph, self._cluster)
            server = RpcServer(self._greeting(secret), tls=self._tls)
            self._registry = RegistryServer(server)
            Service(self, self._changes).register(server)
            try:
                endpoint = await server.start("127.0.0.1")
                self._write_graph()
                self._launcher = Launcher(
                    pid=os.getpid(),
                    birth=birth(os.getpid()),
                    endpoint=endpoint,
                    secret=secret,
                    # Of other clusters there may be processes that know only what it was when its launcher died.
                    marks=grown(before.marks if before else (), self.graph),
                )
                self.state.write_launcher(self._launcher)
                self._discovery = self._open_discovery(self.graph, self._launcher.marks)
                try:
                    if await race(self._stop.wait(), meet(self._discovery)) == 0:
                        return
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
        marks = grown(self._launcher.marks, graph)
        if marks != self._launcher.marks:
            discovery = self._open_discovery(graph, marks)
            try:
                await meet(discovery)
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
        return self._view.is_ready(child)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._change.wait()

    async def met(self, child: Child) -> None:
        member = self._view.of(child)
        if member is None or member.role == "frontend":
            return
        others = [self._view.of(other) for other in self.crew.children if other.spec.pool == child.spec.pool]
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
        slot = Slot(key.pool, key.index)
        others = (child for child in self.crew.children if child.spec.slot == slot and child.epoch != key.epoch)
        if not any(child.recorded for child in others):
            # What waits on its socket nobody would answer before it is back.
            self._vacate(slot)
        with suppress(PddError):
            await self._discovery.unregister(key)

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
                self._view.take(members, self.crew.children)
                self._on_child()
            if discovery is self._discovery:
                return

    async def _watch_ready(self) -> None:
        async for answer in reasons(self.graph, lambda: self._url):
            why = answer if self.part.has_frontend(self.graph) else self._not_ready()
            trouble = self._discovery.trouble if self._discovery else ""
            if (why, trouble) != (self._why_not_ready, self._trouble):
                self._why_not_ready, self._trouble = why, trouble
                self.changed()

    def _not_ready(self) -> str:
        """Of a part without a frontend."""
        waiting = (child for child in self.crew.children if not child.stopping and not self.is_ready(child))
        return next((f"{child.spec} is not ready" for child in waiting), "")

    @property
    def _url(self) -> str:
        return next((member.endpoint for member in self._view.frontends(self.crew.children)), "")
