"""The two ends of a KV transfer, on a real block store: a worker's KV agent without the worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pdd_runtime.clock import now
from pdd_runtime.errors import DeadlineExceeded, LayoutError, TransferError
from pdd_runtime.kv import Block, BlockStore, KvLayout, chain, seed
from pdd_runtime.plugins.transport import Gone, LinkFacts, Ready, Subscription, Wanted
from pdd_runtime.rpc import Greeting, Line, Tls

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float32", block_size=16)
"""Blocks of 16 KiB."""
FINGERPRINT, EPOCH, SECRET = "model", "epoch-1", "shared"


def sequence(blocks: int, layout: KvLayout = LAYOUT, salt: str = "") -> list[Block]:
    """The blocks of a sequence; the last is partial."""
    tokens = range(blocks * layout.block_size - layout.block_size // 2)
    return chain(seed(FINGERPRINT, layout.spec, salt=salt), tokens, layout.block_size)


def content(name: bytes, layout: KvLayout = LAYOUT) -> bytes:
    """What a block of that name holds."""
    return (name * (layout.block_bytes // len(name) + 1))[: layout.block_bytes]


def subscription(
    blocks: Sequence[Block],
    *,
    layout: KvLayout = LAYOUT,
    request_id: str = "req-1",
    cluster: str = "dc-b",
    deadline: float = 20.0,
) -> Subscription:
    """All that `blocks` are, in their order."""
    return Subscription(
        request_id=request_id,
        blocks=tuple(Wanted(block.name, block.tokens) for block in blocks),
        layout=layout,
        fingerprint=FINGERPRINT,
        epoch=EPOCH,
        cluster=cluster,
        secret=SECRET,
        deadline=deadline,
    )


class Context:
    """A `TransportContext`: a worker of `cluster`, with links and emulated lines to others. `memory` may be set until a
    transport is told to serve or fetch; without, it is that of a worker which has no block of the test's."""

    def __init__(
        self,
        cluster: str,
        lines: dict[str, Line] | None = None,
        *,
        links: dict[str, LinkFacts] | None = None,
        memory: memoryview | None = None,
        tls: Tls | None = None,
    ) -> None:
        self.tls = tls
        self.cluster, self._lines, self._links = cluster, lines or {}, links or {}
        self.memory = memory or memoryview(bytearray(LAYOUT.block_bytes))
        self.greeting = Greeting(graph="test", secret=SECRET, cluster=cluster, name=f"{cluster}/0")

    def line_to(self, cluster: str) -> Line | None:
        return self._lines.get(cluster)

    def link_to(self, cluster: str) -> LinkFacts | None:
        return self._links.get(cluster)


class StoreSource:
    """A `BlockSource` for any thread: one lock around a store, which stands for the worker's event loop."""

    def __init__(self, layout: KvLayout = LAYOUT, blocks: int = 128, epoch: str = EPOCH) -> None:
        self.layout, self.epoch = layout, epoch
        self.store = BlockStore(layout, blocks)
        self.changed = threading.Condition()
        self.feeds: list[StoreFeed] = []
        self.opened: list[Subscription] = []
        """All that anybody has subscribed to, in order."""
        self.ended = False
        self.error: Exception | None = None

    def make(self, blocks: Sequence[Block]) -> None:
        """What an engine does: write, commit, go on."""
        with self.changed:
            numbers = self.store.allocate(len(blocks))
            for block, number in zip(blocks, numbers, strict=True):
                self.store.memory(number)[:] = content(block.name, self.layout)
                self.store.commit(block, number)
            self.store.release(numbers)
            self.changed.notify_all()

    def end(self) -> None:
        """The request has ended: what is not here will not come."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Every feed raises `error` from now on."""
        with self.changed:
            self.error = error
            self.changed.notify_all()

    def wait_for_feeds(self, count: int, timeout: float = 10.0) -> None:
        """Blocks until so many are open. Raises `AssertionError` when that takes long."""
        with self.changed:
            arrived = self.changed.wait_for(lambda: len(self.feeds) == count, timeout)
            assert arrived, f"after {timeout} s the sender has {len(self.feeds)} feeds open, not {count}"

    @property
    def pinned(self) -> int:
        """Blocks that feeds hold."""
        with self.changed:
            return self.store.stats.used

    def feed(self, subscription: Subscription) -> StoreFeed:
        """What a subscription is fed from; override it for one that misbehaves."""
        return StoreFeed(self, subscription)

    def open(self, subscription: Subscription) -> StoreFeed:
        if subscription.secret != SECRET:
            raise TransferError("the subscriber does not know this graph's secret")
        difference = subscription.layout.difference(self.layout)
        if difference is not None:
            raise LayoutError("the two sides lay out KV differently", where=difference)
        if subscription.epoch != self.epoch:
            raise TransferError(f"this worker's epoch is {self.epoch}, not {subscription.epoch}")
        if subscription.fingerprint != FINGERPRINT:
            raise TransferError(f"this worker's model is {FINGERPRINT}, not {subscription.fingerprint}")
        with self.changed:
            self.opened.append(subscription)
            self.feeds.append(self.feed(subscription))
            self.changed.notify_all()
            return self.feeds[-1]


class StoreFeed:
    """A `Feed` in the order asked for."""

    def __init__(self, source: StoreSource, subscription: Subscription) -> None:
        self._source, self._subscription = source, subscription
        self._until = now() + subscription.deadline
        self._next = 0
        self._pins: dict[int, int] = {}
        self._closed = False

    def next(self, timeout: float) -> Ready | Gone | None:
        source = self._source
        with source.changed:
            if self._next == len(self._subscription.blocks):
                return None
            if not self._ready():
                source.changed.wait(timeout)
            if source.error is not None:
                raise source.error
            if now() > self._until:
                raise DeadlineExceeded("the subscription")
            if self._next == len(self._subscription.blocks) or not self._ready():
                return None
            index, self._next = self._next, self._next + 1
            number = source.store.find(self._subscription.blocks[index].name)
            if number is None:
                return Gone(index)
            source.store.retain([number])
            self._pins[index] = number
            return Ready(index, source.store.memory(number))

    def sent(self, index: int) -> None:
        with self._source.changed:
            if not self._closed:
                self._source.store.release([self._pins.pop(index)])

    def close(self) -> None:
        with self._source.changed:
            if not self._closed:
                self._closed = True
                self._source.store.release(self._pins.values())
                self._source.feeds.remove(self)
                self._source.changed.notify_all()

    def _ready(self) -> bool:
        name = self._subscription.blocks[self._next].name
        return self._source.ended or self._source.error is not None or self._source.store.find(name) is not None


class StoreSink:
    """A `BlockSink` that looks at each block at the moment it is said to be done."""

    def __init__(
        self, blocks: Sequence[Block], layout: KvLayout = LAYOUT, on_done: Callable[[int], object] = lambda index: None
    ) -> None:
        self.layout, self.wanted, self._on_done = layout, blocks, on_done
        self.store = BlockStore(layout, max(1, len(blocks)))
        self._numbers = self.store.allocate(len(blocks))
        self._lock = threading.Lock()
        self.arrived: list[int] = []
        """The indices that were done, in order."""
        self.wrong: list[int] = []
        """Those whose bytes were not right when they were done."""

    def memory(self, index: int) -> memoryview:
        return self.store.memory(self._numbers[index])

    def done(self, index: int) -> None:
        right = self.right(index)
        with self._lock:
            self.arrived.append(index)
            if not right:
                self.wrong.append(index)
        self._on_done(index)

    def right(self, index: int) -> bool:
        """Its memory holds what its name says."""
        return bytes(self.memory(index)) == content(self.wanted[index].name, self.layout)

    @property
    def whole(self) -> bool:
        """Every block came once, right when it was done, and is right now."""
        every = sorted(self.arrived) == list(range(len(self.wanted)))
        return every and not self.wrong and all(map(self.right, range(len(self.wanted))))
