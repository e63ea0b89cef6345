"""The launcher of a graph: brings its processes up and keeps them up, in one asyncio process."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress

import httpx
import msgspec

from pdd_runtime.discovery import RegistryServer, open_discovery
from pdd_runtime.errors import PddError, leaves
from pdd_runtime.graph import Graph
from pdd_runtime.launch.child import Child, ChildSpec
from pdd_runtime.launch.identity import birth
from pdd_runtime.launch.leftovers import end_left
from pdd_runtime.launch.logs import LogFile
from pdd_runtime.launch.part import Part
from pdd_runtime.launch.port import reserved
from pdd_runtime.launch.state import GraphState, Launcher
from pdd_runtime.launch.status import Down, GraphStatus
from pdd_runtime.plugins import PluginManager
from pdd_runtime.plugins.certificate import tls_of
from pdd_runtime.plugins.discovery import Discovery, Member
from pdd_runtime.plugins.messages import Empty
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.rpc import Greeting, RpcContext, RpcServer

log = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds that running requests get at a stop."""
WORKER_PATIENCE = 10.0
"""Seconds from SIGTERM to SIGKILL for workers, which have no requests any more."""
MEET = 3.0
"""Seconds for discovery's servers to answer before processes are started all the same."""
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
        self._plugins, self._on_line = plugins, on_line
        self._children: list[Child] = []
        self._members: dict[str, Member] = {}
        self._discovery: Discovery | None = None
        self._trouble = ""
        self._why_not_ready = "no process has started yet"
        self._patience = PATIENCE
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._change = asyncio.Event()
        self._launcher = Launcher(pid=0, birth="", endpoint="", secret="")

    def stop(self, patience: float = PATIENCE) -> None:
        """Drain: the frontend first, which lets running requests end, then the workers. Idempotent."""
        if not self._stop.is_set():
            self._patience = patience
            self._stop.set()
            self._changed()

    def kill(self) -> None:
        """End every process now."""
        self.stop()
        self._kill.set()
        for child in self._children:
            child.kill()

    def status(self) -> GraphStatus:
        return GraphStatus(
            name=self.state.name,
            source=self.source,
            pid=os.getpid(),
            url=self._url,
            admin=next((member.admin for member in self._frontends if member.admin), ""),
            ready=not self._why_not_ready,
            why_not_ready=self._why_not_ready,
            stopping=self._stop.is_set(),
            trouble=self._trouble,
            processes=tuple(child.status(self._member(child)) for child in self._children),
        )

    async def watch(self) -> AsyncGenerator[GraphStatus, None]:
        """The status now, and again after each change. Endless."""
        while True:
            change = self._change
            yield self.status()
            await change.wait()

    async def run(self) -> None:
        """Returns when everything has been stopped in order. Raises `AlreadyRunningError`, and `LaunchError` when a
        process says at its first start that it can never work."""
        with self.state.hold():
            await end_left(self.state.launcher())
            secret = self.part.secret or secrets.token_urlsafe(32)
            cluster = self.part.cluster or self.graph.frontend_cluster
            tls = tls_of(self.graph, cluster)
            greeting = Greeting(graph=self.graph.name, secret=secret, cluster=cluster, name="launcher")
            server = RpcServer(greeting, tls=tls)
            registry = RegistryServer(server)
            server.unary("launch.ps", Empty, self._on_ps)
            server.stream("launch.watch", Empty, self._on_watch)
            server.unary("launch.down", Down, self._on_down)
            try:
                endpoint = await server.start("127.0.0.1")
                self.state.write_graph(self.graph.model_dump_json(by_alias=True, indent=1))
                self._launcher = Launcher(pid=os.getpid(), birth=birth(os.getpid()), endpoint=endpoint, secret=secret)
                self.state.write_launcher(self._launcher)
                discovery = self._discovery = open_discovery(self.graph, self._plugins, endpoint, secret, tls)
                try:
                    await _meet(discovery)
                    with self._port() as port:
                        await self._run_children(registry, discovery, self._specs(endpoint, secret, port))
                finally:
                    await discovery.close()
            except BaseExceptionGroup as group:
                errors = list(leaves(group))
                raise next((error for error in errors if isinstance(error, PddError)), errors[0]) from None
            finally:
                registry.close()
                await server.close()
                self.state.forget_launcher()

    async def _run_children(self, registry: RegistryServer, discovery: Discovery, specs: Sequence[ChildSpec]) -> None:
        async def gone(key: WorkerKey) -> None:
            # Others must not go on with a dead process: it leaves the view now, not when its lease runs out. Our own
            # registry also refuses what the dead may still have on its way; other discoveries are told as usual.
            registry.remove(key.pool, key.index)
            with suppress(PddError):
                await discovery.unregister(key)

        for spec in specs:
            log_file = LogFile(self.state.log(spec.pool, spec.index))
            child = Child(spec, log_file, on_change=self._on_child, on_line=self._on_line, on_exit=gone)
            self._children.append(child)
        async with asyncio.TaskGroup() as tasks:
            views = [
                tasks.create_task(self._watch_members(discovery), name="members"),
                tasks.create_task(self._watch_ready(), name="ready"),
            ]
            running = {child: tasks.create_task(child.supervise(), name=str(child.spec)) for child in self._children}
            await self._stop.wait()
            frontends = [child for child in running if child.spec.role == "frontend"]
            workers = [child for child in running if child.spec.role != "frontend"]
            await self._end(frontends, running, self._patience)
            await self._end(workers, running, WORKER_PATIENCE)
            for view in views:
                view.cancel()

    async def _end(self, children: Sequence[Child], running: dict[Child, asyncio.Task[None]], patience: float) -> None:
        """SIGTERM, then SIGKILL for what is still there after `patience` seconds, or once told to kill."""
        tasks = [running[child] for child in children]
        if not tasks:
            return
        for child in children:
            child.kill() if self._kill.is_set() else child.stop()
        _, left = await asyncio.wait(tasks, timeout=patience)
        if left:
            for child in children:
                child.kill()
            await asyncio.wait(left)

    def _port(self) -> AbstractContextManager[int]:
        """The port that several frontend processes share; one alone binds it itself."""
        frontend = self.graph.spec.frontend
        several = frontend.replicas > 1 and self.part.has_frontend(self.graph)
        return reserved(frontend.host, frontend.port) if several else nullcontext(frontend.port)

    def _specs(self, endpoint: str, secret: str, port: int) -> list[ChildSpec]:
        common = ("--graph", str(self.state.graph), "--discovery", endpoint)
        python = (sys.executable, "-m")
        specs = [
            ChildSpec(
                pool=name,
                index=index,
                role=pool.role,
                cluster=pool.cluster,
                command=(*python, "pdd_runtime.worker", *common, "--pool", name, "--index", str(index)),
                env={**pool.env, "PDD_SECRET": secret},
            )
            for name, pool in self.graph.spec.pools.items()
            if self.part.has(pool.cluster)
            for index in range(pool.replicas)
        ]
        if not self.part.has_frontend(self.graph):
            return specs
        frontends = [
            ChildSpec(
                pool="frontend",
                index=index,
                role="frontend",
                cluster=self.graph.frontend_cluster,
                command=(*python, "pdd_runtime.frontend", *common, "--index", str(index), "--port", str(port)),
                env={"PDD_SECRET": secret},
            )
            for index in range(self.graph.spec.frontend.replicas)
        ]
        return [*specs, *frontends]

    def _on_child(self) -> None:
        self._record()
        self._changed()

    def _record(self) -> None:
        """Keep launcher.json true, so that `down` finds every process even when this one is dead."""
        processes = tuple(child.recorded for child in self._children if child.recorded)
        fresh = msgspec.structs.replace(self._launcher, url=self._url, processes=processes)
        if fresh != self._launcher:
            self._launcher = fresh
            try:
                self.state.write_launcher(fresh)
            except OSError as error:
                # A full disk must not end what runs.
                log.error("launcher.json is out of date: %s", error)

    async def _watch_members(self, discovery: Discovery) -> None:
        async for members in discovery.watch():
            self._members = {member.key.epoch: member for member in members}
            self._on_child()

    async def _watch_ready(self) -> None:
        """Ask the frontend whether a whole route exists, as a load balancer would."""
        # Each time over a new connection: an old one ends with the process behind it, and others may share its port.
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=5.0, trust_env=False, limits=limits) as client:
            while True:
                why = await self._ask_ready(client)
                trouble = self._discovery.trouble if self._discovery else ""
                if (why, trouble) != (self._why_not_ready, self._trouble):
                    self._why_not_ready, self._trouble = why, trouble
                    self._changed()
                await asyncio.sleep(READY_EVERY if why else HEALTHY_EVERY)

    async def _ask_ready(self, client: httpx.AsyncClient) -> str:
        if not self.part.has_frontend(self.graph):
            return next((f"{child.spec} is not ready" for child in self._children if not self._is_ready(child)), "")
        if not self._url:
            return "the frontend is not there yet"
        try:
            answer = await client.get(f"{self._url}/ready")
        except httpx.HTTPError as error:
            return f"the frontend does not answer: {error}"
        if answer.is_success:
            return ""
        return _reason(answer)

    def _member(self, child: Child) -> Member | None:
        return self._members.get(child.epoch)

    def _is_ready(self, child: Child) -> bool:
        member = self._member(child)
        return member is not None and member.state == "ready"

    @property
    def _url(self) -> str:
        return next((member.endpoint for member in self._frontends), "")

    @property
    def _frontends(self) -> list[Member]:
        members = [self._member(child) for child in self._children if child.spec.role == "frontend"]
        return [member for member in members if member is not None]

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def _on_ps(self, params: Empty, context: RpcContext) -> GraphStatus:
        return self.status()

    async def _on_watch(self, params: Empty, context: RpcContext) -> AsyncGenerator[GraphStatus, None]:
        async with aclosing(self.watch()) as statuses:
            async for status in statuses:
                yield status

    async def _on_down(self, params: Down, context: RpcContext) -> None:
        self.stop(params.patience)


async def _meet(discovery: Discovery) -> None:
    """Ask once who is there, so that what keeps this launcher from ever finding the others is told before it starts
    anything. Servers that are only away are no hindrance."""
    async with aclosing(discovery.watch()) as views:
        with suppress(TimeoutError):
            async with asyncio.timeout(MEET):
                await anext(views)


def _reason(answer: httpx.Response) -> str:
    """Why the frontend says that it is not ready."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the frontend answers {answer.status_code}"
