"""The data plane of a server engine: how the KV of its server comes and goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from asyncio import Future
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pdd_runtime.errors import EngineError
from pdd_runtime.kv import Stats
from pdd_runtime.plugins.engine import (
    DecodeRequest,
    EngineHost,
    PrefillRequest,
)
from pdd_runtime.server.geometry import Model
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.request import Generate, ServerRequest


class Readings(NamedTuple):
    """What a server says of itself in its metrics."""

    running: int
    waiting: int
    blocks_used: int = 0
    """Of its own KV cache; needed where the server alone has the KV (`NativePlane`)."""
    blocks_total: int = 0


Look = Callable[[], Awaitable[Readings]]
"""A new reading."""


class DataPlane(ABC):
    """Made by `ServerEngine.plane`, one for each engine. On the event loop alone."""

    name: str
    """The engine's."""
    socket: Path
    """Where the server finds the worker, or the worker the server: a path, from `open` on."""
    broken: Future[EngineError] | None = None
    """Done where the plane cannot be trusted any more."""

    @property
    def connected(self) -> bool:
        """Whether the server's part of it is there, once it has met."""
        return True

    @abstractmethod
    async def open(self, host: EngineHost, model: Model, place: Path) -> None:
        """Before the server starts. `place`: a directory of the engine's own."""

    @abstractmethod
    async def meet(self, http: HttpClient, look: Look, seconds: float) -> None:
        """The server makes tokens: return when its KV can come and go. Raises `EngineError`, also where that takes
        longer than `seconds`."""

    @abstractmethod
    async def close(self) -> None:
        """After every request has ended. Idempotent."""

    @abstractmethod
    def request(
        self, request: PrefillRequest | DecodeRequest, root: bytes, most: int, generate: Generate
    ) -> ServerRequest:
        """An ordinary request for at most `most` tokens: `generate` has the server make them. `root`: of the names of
        its blocks. Raises `EngineError` where the plane cannot serve it now."""

    @abstractmethod
    def cached(self, root: bytes, tokens: Sequence[int]) -> int:
        """How many leading tokens' KV is here."""

    @abstractmethod
    def blocks(self, readings: Readings) -> Stats:
        """Of the KV that is here. `total` is what the engine says that it has."""

    @property
    @abstractmethod
    def told(self) -> str:
        """What the server's start is logged with."""
