"""The transport contract: bulk KV from worker to worker, receiver-driven."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import msgspec
from pydantic import BaseModel

from pdd_runtime.errors import TransferError
from pdd_runtime.kv import KvLayout
from pdd_runtime.rpc import Greeting, Line, Tls


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """A block the receiver lacks."""

    name: bytes
    tokens: int


class Subscription(msgspec.Struct, frozen=True, kw_only=True):
    """ "These blocks of this request, in this order." Indices below are positions in `blocks`."""

    request_id: str
    blocks: tuple[Wanted, ...]
    layout: KvLayout
    """The sender's, as the receiver knows it; one that serves another refuses."""
    fingerprint: str
    epoch: str
    """The sender's epoch the receiver believes in; another one is refused."""
    cluster: str
    """Where the receiver is."""
    secret: str
    """The graph's: whoever asks must belong to it."""
    priority: int = 0
    """Of two transfers that wait for one link, each step doubles the weight."""
    behind: int = 0
    """Bytes of the same request's KV that its receiver asks for in later subscriptions: where short transfers come
    first, this one is as long as both."""
    deadline: float = 60.0
    """Seconds from now."""

    def __repr__(self) -> str:
        return f"Subscription({self.request_id}: {len(self.blocks)} blocks, to {self.cluster})"


class Ready(msgspec.Struct, frozen=True):
    """A block to send, pinned until `Feed.sent`."""

    index: int
    memory: memoryview


class Gone(msgspec.Struct, frozen=True):
    """A block that will not come: never made, or evicted."""

    index: int


class Feed(Protocol):
    """What one subscription is fed from. Called from transport threads; thread-safe."""

    def next(self, timeout: float) -> Ready | Gone | None:
        """The next block in the order asked for, waiting up to `timeout` seconds; None: not yet.
        Raises `Cancelled` when the worker closes, `DeadlineExceeded` past the subscription's deadline."""
        ...

    def sent(self, index: int) -> None:
        """The bytes of `index` have left; its pin can go."""
        ...

    def close(self) -> None:
        """Drop all pins. Idempotent."""
        ...


class BlockSource(Protocol):
    """The sending side's KV agent."""

    def open(self, subscription: Subscription) -> Feed:
        """Thread-safe. Raises `LayoutError` or `TransferError` when the two sides do not fit."""
        ...


class BlockSink(Protocol):
    """Where one fetch lands. Called from transport threads; thread-safe."""

    def memory(self, index: int) -> memoryview:
        """The block's preallocated, writable bytes."""
        ...

    def done(self, index: int) -> None:
        """The block is whole and its checksum right: it may be committed."""
        ...


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one fetch did."""

    bytes: int
    """Payload received."""
    blocks: int
    gone: int
    """Blocks the sender could not give; the engine recomputes them."""
    seconds: float
    """From the first subscription to the last block."""
    resumed: int = 0
    """How often the connection was lost and what was missing asked for again."""
    over: str = ""
    """The transport that carried it, where that is not the one that was asked: its fallback."""
    encoding: str = ""
    """How blocks were written on their way where not all came as they lie; says `lossy` where bits were lost."""

    @property
    def goodput(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


def incomplete(subscription: Subscription, endpoint: str, done: int, why: str, trouble: str = "") -> TransferError:
    """The error of a fetch from `endpoint` that ends when `done` of its blocks have come or are gone; `trouble`: what
    went wrong last."""
    total = len(subscription.blocks)
    return TransferError(
        f"{total - done} of {total} blocks did not come from {endpoint}",
        where=subscription.request_id,
        why=f"{why}; last trouble: {trouble}" if trouble else why,
        fix="see the sender's log; what arrived is kept, and a new fetch asks for the rest",
    )


class LinkFacts(msgspec.Struct, frozen=True):
    """What the graph says of a link."""

    name: str
    bandwidth: float
    """Bits/s in each direction."""
    rtt: float
    """Seconds, there and back."""
    streams: int
    """Connections that bulk KV is spread over."""


class LinkTelemetry(msgspec.Struct, frozen=True, kw_only=True):
    """What a sender knows of the way to one cluster, by its own traffic."""

    cluster: str
    """Where it leads."""
    goodput: float | None = None
    """Payload bytes/s while there was something to send, of late; None: nothing was sent yet."""
    rtt: float | None = None
    """Seconds, smoothed; None: not measured."""
    queue: int = 0
    """Bytes that are subscribed to, made, and not sent yet."""
    sent: int = 0
    """Payload bytes since the start."""
    retransmits: int = 0
    """Segments since the start."""


class TransportContext(Protocol):
    """What the worker gives its transports."""

    cluster: str
    greeting: Greeting
    """Who this worker is, for a transport that speaks the message plane's protocol on a port of its own."""
    tls: Tls | None
    """This worker's certificate, which it shows and asks for on each connection; None: the graph has no TLS."""

    @property
    def memory(self) -> memoryview:
        """All blocks of this worker, one after another, for a transport that must register memory. It is there when
        `serve` or `fetch` is called, and stays where it is. A sink's memory may lie elsewhere: where the two sides
        lay out KV differently, blocks land beside the store."""
        ...

    def link_to(self, cluster: str) -> LinkFacts | None:
        """The graph's link to `cluster`; None: there is none, as inside a cluster."""
        ...

    def line_to(self, cluster: str) -> Line | None:
        """The emulated line on which this process sends to `cluster`; None: the network as it is."""
        ...


class Transport(ABC):
    name: ClassVar[str]
    Config: ClassVar[type[BaseModel]]
    encrypts: ClassVar[bool] = False
    """Whether all that it moves goes over TLS where the graph has it: `validate` refuses those that would not."""

    def __init__(self, config: BaseModel, context: TransportContext) -> None:
        self.config, self.context = config, context

    @classmethod
    def lossless(cls, config: BaseModel) -> bool:
        """Whether blocks arrive bit for bit with these settings: `validate` refuses exact mode over what does not."""
        return True

    @abstractmethod
    async def serve(self, source: BlockSource, host: str) -> str:
        """Listen on `host` and feed subscribers from `source`. Returns the endpoint others fetch from."""

    @abstractmethod
    async def fetch(self, endpoint: str, subscription: Subscription, sink: BlockSink) -> TransferReport:
        """Bring the blocks here; a lost connection is resumed with what is missing until the deadline.
        Cancellation stops it on both sides. Raises `TransferError`; what arrived stays."""

    def telemetry(self) -> tuple[LinkTelemetry, ...]:
        """What is known of the way to each cluster that this side has sent to. Cheap; on the event loop."""
        return ()

    @abstractmethod
    async def close(self) -> None: ...
