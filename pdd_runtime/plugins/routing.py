"""The routing contract: which workers a request takes, decided by a pure function."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal, TypeAlias

import msgspec
from pydantic import BaseModel

Role = Literal["prefill", "relay", "main", "aggregated"]


class WorkerKey(msgspec.Struct, frozen=True, order=True):
    """Identity of a worker. The epoch changes with every start."""

    pool: str
    index: int
    epoch: str

    def __str__(self) -> str:
        return f"{self.pool}/{self.index}"


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """One ready worker, as the planner of routes sees it."""

    key: WorkerKey
    role: Role
    cluster: str
    cached_tokens: int
    """Leading prompt tokens whose KV is there."""
    running: int
    waiting: int
    batch_limit: int
    capabilities: frozenset[str] = frozenset()
    """What its engine can do, by name: `Capabilities.names`."""
    token_bytes: int = 0
    """Bytes of one token's KV, as it lies there; 0: not known."""
    token_time: float | None = None
    """Seconds in which it computes one token of a prompt, as measured of late; None: not known."""
    request_time: float | None = None
    """Seconds by which each request that is there delays the next one, as measured of late; None: not known."""


class EdgeView(msgspec.Struct, frozen=True, kw_only=True):
    """An edge between pools; `link` is None inside a cluster."""

    source: str
    target: str
    carries: Literal["kv", "tokens"]
    link: str | None


class LinkView(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of a link: what the graph says of it, and what those who send over it have seen of late."""

    name: str
    source: str
    """The cluster it leads from."""
    target: str
    bandwidth: float
    """Bytes/s, as the graph says."""
    rtt: float
    """Seconds there and back: as measured, else as the graph says."""
    goodput: float | None = None
    """Payload bytes/s of all senders together while they had something to send; None: nobody has sent yet."""
    queue: int = 0
    """Bytes that wait to be sent."""
    stalled: float = 0.0
    """Seconds for which nothing has got through although something waited; after that, counting down to 0."""
    sent: int = 0
    """Payload bytes sent since those senders started."""
    retransmits: int = 0
    """Segments sent again since then."""

    @property
    def rate(self) -> float:
        """Bytes/s to reckon with."""
        return self.goodput or self.bandwidth


class RequestFacts(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    max_tokens: int
    needs: tuple[str, ...] = ()
    """The capabilities it needs, by name: `Sampling.needs`. A policy may leave them alone: where its route has a
    worker that lacks one, it is asked again with a view that has no such workers."""
    single: bool = False
    """Who asks says that nothing will build on it: its KV need not be kept for a next turn."""
    seed: int = 0
    """Differs from request to request: what a policy goes by among workers that are as good as each other, so that
    several frontends, who all see the same view, do not all choose the same one."""


class Finishing(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds requests that end on a relay: main never gets the KV of those."""

    share: float = 0.0
    """How many of the last requests did, of 1."""
    sessions: dict[str, int] = {}
    """Such sessions in flight, by relay (`pool/index`)."""
    hit_rate_gaps: dict[str, float] = {}
    """By main pool: by how much its share of cached prompt tokens has been below prefill's of late."""


class ClusterView(msgspec.Struct, frozen=True, kw_only=True):
    workers: tuple[WorkerView, ...]
    edges: tuple[EdgeView, ...]
    links: tuple[LinkView, ...] = ()
    finishing: Finishing = Finishing()

    def link(self, name: str, source: str) -> LinkView | None:
        """The direction of link `name` that leads away from cluster `source`."""
        for link in self.links:
            if link.name == name and link.source == source:
                return link
        return None


RouteKind: TypeAlias = Literal["P-RLD-MD", "P-MD", "A", "P-RLD"]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """What one request takes. `P-RLD-MD`: all three; `P-MD`: no relay; `A`: `main` alone, an aggregated worker;
    `P-RLD`: the relay serves it to its end, and `main` is the one that would have taken over."""

    kind: RouteKind
    main: WorkerKey
    prefill: WorkerKey | None = None
    relay: WorkerKey | None = None
    reason: str
    """One sentence for the timeline, with the numbers that decided."""


class RoutingPolicy(ABC):
    """Pure: no I/O, no clock, no state. The simulator runs the same object."""

    name: ClassVar[str]
    Config: ClassVar[type[BaseModel]]

    def __init__(self, config: BaseModel) -> None:
        self.config = config

    @abstractmethod
    def plan(self, facts: RequestFacts, view: ClusterView) -> Route:
        """Raises `NoRoute` where no whole route of live workers exists, naming what is missing."""
