"""The discovery contract: who is there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from typing import Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel

from pdd_runtime.plugins.engine import EngineInfo
from pdd_runtime.plugins.routing import Role, WorkerKey
from pdd_runtime.rpc import Tls


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the graph as others find it."""

    key: WorkerKey
    role: Role | Literal["frontend"]
    cluster: str
    state: Literal["starting", "ready", "draining"]
    pid: int
    endpoint: str
    """`host:port` of its message plane; of the frontend, its URL."""
    plane: str = ""
    """`host:port` of a frontend's message plane, on which processes of its host ask it: the others that share its URL,
    and those that look for leaks or make faults."""
    admin: str = ""
    """URL at which a frontend answers operators, where that is another than the `endpoint`."""
    transports: dict[str, str] = {}
    """Transport plugin name to the endpoint that serves KV."""
    info: EngineInfo | None = None
    """Of a ready worker."""
    bulletin: str = ""
    """What a frontend tells the other frontends, under a seal of theirs."""


class GraphMark(msgspec.Struct, frozen=True, kw_only=True):
    """Which graph a process belongs to. Processes find each other only where theirs are equal, or where the one is what
    the other's graph was before it was changed while it ran."""

    name: str
    digest: str = ""
    """Of `shared`."""
    shared: dict[str, Any] = {}
    """What all processes of the graph must agree on, wherever they were started: the part of its spec that is not
    one cluster's own business."""
    succeeds: tuple[str, ...] = ()
    """Digests of what this graph was before: its launcher has changed it while it runs, so processes of both meet."""


class Discovery(ABC):
    """A member is gone when it says so, or when it has not renewed for `ttl` seconds."""

    name: ClassVar[str]
    Config: ClassVar[type[BaseModel]]
    ttl: ClassVar[float] = 2.0
    across_hosts: ClassVar[bool] = True
    """Whether processes that different launchers started find each other: `up --cluster` needs it."""
    tls: Tls | None = None
    """The process's certificate, set before anything else is asked: what answers at `address` wants to see it."""

    def __init__(self, config: BaseModel, address: str, secret: str, graph: GraphMark | None = None) -> None:
        """`address`: where this graph's launcher answers (local), unused where the config names servers. `graph`:
        whose processes are to be found; None: those that `address` knows."""
        self.config, self.address, self.secret, self.graph = config, address, secret, graph

    @property
    def trouble(self) -> str:
        """Why nobody can be found or told anything at this moment; empty: all is well."""
        return ""

    @abstractmethod
    async def register(self, member: Member) -> None:
        """Add or replace; a higher epoch of the same (pool, index) replaces the lower. Kept alive by this
        object (it renews on its own) until `unregister`, `close` or death."""

    @abstractmethod
    async def renew(self, member: Member) -> None:
        """One renewal, now. `register` does it for you every third of the ttl."""

    @abstractmethod
    async def unregister(self, key: WorkerKey) -> None: ...

    @abstractmethod
    def watch(self) -> AsyncGenerator[tuple[Member, ...], None]:
        """The members now, and again after each change. Survives reconnects; the last view stays valid."""

    @abstractmethod
    async def close(self) -> None: ...
