"""A graph that runs on this host, as the state directories of its launchers tell."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from typing import Self, TypeVar

from pdd_runtime.discovery import open_discovery
from pdd_runtime.errors import ConnectionLost, LaunchError
from pdd_runtime.graph import Graph
from pdd_runtime.launch import GraphState, not_running
from pdd_runtime.launch.identity import alive, send
from pdd_runtime.launch.state import Launcher
from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.certificate import tls_of
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.rpc import Greeting, RpcConnection, connect

T = TypeVar("T")

PATIENCE = 3.0
"""Seconds for a process to answer."""


@dataclass(frozen=True)
class Process:
    """One process of a graph."""

    pool: str
    """Of a frontend: `frontend`."""
    index: int
    role: str
    cluster: str
    pid: int
    birth: str
    """By which it is told from a later process of the same pid."""

    def __str__(self) -> str:
        return f"{self.pool}/{self.index}"

    @property
    def alive(self) -> bool:
        return alive(self.pid, self.birth)

    def signal(self, number: signal.Signals) -> bool:
        """False: it is gone."""
        return send(self.pid, self.birth, number)


class RunningGraph:
    """Use it as a context manager: inside, it hears from discovery who is there, and knows who was there also while
    discovery is away. Only processes of this host are told of."""

    def __init__(self, state: GraphState) -> None:
        """`state`: of the graph, or of any part of it. Raises `NotRunningError`, and `LaunchError` where what the
        launcher has written cannot be read."""
        self.states = tuple(one for one in (state, *state.parts()) if one.running())
        """Of its parts that have a launcher here."""
        if not self.states:
            raise not_running(state)
        try:
            self.graph = Graph.model_validate_json(self.states[0].graph.read_bytes())
        except (OSError, ValueError) as error:
            raise LaunchError("the graph of a launcher cannot be read", where=str(self.states[0].graph)) from error
        self._members: tuple[Member, ...] = ()
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch(), name=f"members of {self.graph.name}")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watching is not None
        self._watching.cancel()
        await asyncio.wait([self._watching])

    @property
    def launchers(self) -> tuple[Launcher, ...]:
        """Those that live."""
        return tuple(launcher for state in self.states if (launcher := state.running()))

    @property
    def url(self) -> str:
        """Of the frontend; empty where it is not here, or not yet."""
        return next((launcher.url for launcher in self.launchers if launcher.url), "")

    @property
    def processes(self) -> list[Process]:
        """Workers and frontends that run, in the order in which the graph has them."""
        found = []
        for one in (one for launcher in self.launchers for one in launcher.left):
            pool = self.graph.spec.pools.get(one.pool)
            role, cluster = (pool.role, pool.cluster) if pool else ("frontend", self.graph.frontends[one.index])
            found.append(Process(one.pool, one.index, role, cluster, one.pid, one.birth))
        return found

    def find(self, name: str) -> Process | None:
        """The process `pool/index` as it runs now; None: it does not, perhaps not yet again."""
        return next((process for process in self.processes if str(process) == name), None)

    @property
    def members(self) -> list[Member]:
        """Who is there, by what discovery said last, and runs."""
        pids = {process.pid for process in self.processes}
        return [member for member in self._members if member.pid in pids]

    async def ask(self, member: Member, method: str, params: object, result: type[T]) -> T:
        """What a process answers on its message plane. Raises as `connect` does, `DeadlineExceeded` where it does not
        answer, and what it answers with."""
        connection = await self.connect(member)
        try:
            return await connection.call(method, params, result, timeout=PATIENCE)
        finally:
            await connection.close()

    async def connect(self, member: Member) -> RpcConnection:
        """To a process's message plane, as one of its own cluster, so that no line is between. Raises `ConnectionLost`
        and `DeadlineExceeded` where it does not answer."""
        launcher = next(iter(self.launchers), None)
        endpoint = member.plane if member.role == "frontend" else member.endpoint
        if launcher is None or not endpoint:
            raise ConnectionLost(f"{member.key} cannot be asked", why="it has no message plane, or no launcher")
        greeting = Greeting(graph=self.graph.name, secret=launcher.secret, cluster=member.cluster, name="game day")
        return await connect(endpoint, greeting, tls=tls_of(self.graph, member.cluster), timeout=PATIENCE)

    async def _watch(self) -> None:
        state, launcher = self.states[0], self.launchers[0]
        discovery = open_discovery(self.graph, load_plugins(), launcher.endpoint, launcher.secret, state.tls())
        try:
            async for self._members in discovery.watch():
                pass
        finally:
            await discovery.close()
