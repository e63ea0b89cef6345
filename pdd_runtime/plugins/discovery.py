"""The discovery contract: who is there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import ClassVar, Literal

import msgspec
from pydantic import BaseModel

from pdd_runtime.plugins.engine import EngineInfo
from pdd_runtime.plugins.routing import Role, WorkerKey


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
    """`host:port` of a frontend's message plane, on which the others that share its URL ask it."""
    transports: dict[str, str] = {}
    """Transport plugin name to the endpoint that serves KV."""
    info: EngineInfo | None = None
    """Of a ready worker."""


class Discovery(ABC):
    """A member is gone when it says so, or when it has not renewed for `ttl` seconds."""

    name: ClassVar[str]
    Config: ClassVar[type[BaseModel]]
    ttl: ClassVar[float] = 2.0

    def __init__(self, config: BaseModel, address: str, secret: str) -> None:
        """`address`: where this graph's launcher answers (local), unused where the config names servers."""
        self.config, self.address, self.secret = config, address, secret

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
    def watch(self) -> AsyncIterator[tuple[Member, ...]]:
        """The members now, and again after each change. Survives reconnects; the last view stays valid."""

    @abstractmethod
    async def close(self) -> None: ...
