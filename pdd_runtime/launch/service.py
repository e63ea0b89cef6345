"""What a launcher serves to `ps`, `down`, `restart` and `up` of a graph that runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from pdd_runtime.launch.changes import Changes
from pdd_runtime.launch.orders import Apply, Down, Plan, Progress, Restart, Wanted
from pdd_runtime.launch.status import GraphStatus
from pdd_runtime.plugins.messages import Empty
from pdd_runtime.rpc import RpcContext, RpcServer


class Launching(Protocol):
    """The launcher, as its callers see it."""

    def status(self) -> GraphStatus: ...
    def watch(self) -> AsyncGenerator[GraphStatus, None]: ...
    def stop(self, patience: float) -> None: ...


class Service:
    """The handlers."""

    def __init__(self, launcher: Launching, changes: Changes) -> None:
        self._launcher, self._changes = launcher, changes

    def register(self, server: RpcServer) -> None:
        server.unary("launch.ps", Empty, self.ps)
        server.stream("launch.watch", Empty, self.watch)
        server.unary("launch.down", Down, self.down)
        server.unary("launch.plan", Wanted, self.plan)
        server.stream("launch.apply", Apply, self.apply)
        server.stream("launch.restart", Restart, self.restart)

    async def ps(self, params: Empty, context: RpcContext) -> GraphStatus:
        return self._launcher.status()

    async def watch(self, params: Empty, context: RpcContext) -> AsyncGenerator[GraphStatus, None]:
        async with aclosing(self._launcher.watch()) as statuses:
            async for status in statuses:
                yield status

    async def down(self, params: Down, context: RpcContext) -> None:
        self._launcher.stop(params.patience)

    async def plan(self, params: Wanted, context: RpcContext) -> Plan:
        return self._changes.plan(params)

    async def apply(self, params: Apply, context: RpcContext) -> AsyncGenerator[Progress, None]:
        async with aclosing(self._changes.apply(params)) as steps:
            async for step in steps:
                yield step

    async def restart(self, params: Restart, context: RpcContext) -> AsyncGenerator[Progress, None]:
        async with aclosing(self._changes.restart(params)) as steps:
            async for step in steps:
                yield step
