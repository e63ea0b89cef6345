"""The two ends of a transfer, as small as they can be on a real block store."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pdd_runtime.clock import now
from pdd_runtime.errors import DeadlineExceeded, LayoutError, TransferError
from pdd_runtime.kv import Block, BlockStore, KvLayout, chain, seed
from pdd_runtime.plugins.transport import Gone, Ready, Subscription, Wanted
from pdd_runtime.testing.kv_parties import Context as Context

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=32, dtype="float32", block_size=16)
FINGERPRINT, EPOCH = "model", "epoch-1"


def sequence(blocks: int, layout: KvLayout = LAYOUT, salt: str = "") -> list[Block]:
    """The blocks of a sequence; the last is partial."""
    tokens = range(blocks * layout.block_size - layout.block_size // 2)
    return chain(seed(FINGERPRINT, layout.spec, salt=salt), tokens, layout.block_size)


def content(name: bytes, layout: KvLayout = LAYOUT) -> bytes:
    """What a block of that name holds."""
    return (name * (layout.block_bytes // len(name) + 1))[: layout.block_bytes]


def subscription(
    blocks: list[Block],
    *,
    layout: KvLayout = LAYOUT,
    request_id: str = "req-1",
    cluster: str = "dc-b",
    epoch: str = EPOCH,
    fingerprint: str = FINGERPRINT,
    deadline: float = 20.0,
) -> Subscription:
    return Subscription(
        request_id=request_id,
        blocks=tuple(Wanted(block.name, block.tokens) for block in blocks),
        layout=layout,
        fingerprint=fingerprint,
        epoch=epoch,
        cluster=cluster,
        secret="shared",
        deadline=deadline,
    )


class Source:
    """A block source for any thread: one lock around a store, which stands for the worker's event loop."""

    feed_class: type[SourceFeed]

    def __init__(self, layout: KvLayout = LAYOUT, blocks: int = 64, epoch: str = EPOCH) -> None:
        self.layout, self.epoch = layout, epoch
        self.store = BlockStore(layout, blocks)
        self.changed = threading.Condition()
        self.feeds: list[SourceFeed] = []
        self.opened = 0
        self.ended = False
        self.error: Exception | None = None

    def make(self, blocks: list[Block]) -> None:
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
        with self.changed:
            self.error = error
            self.changed.notify_all()

    def wait_for_feeds(self, count: int) -> None:
        """Blocks until so many are open."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.feeds) == count, timeout=10)

    @property
    def pinned(self) -> int:
        with self.changed:
            return self.store.stats.used

    def open(self, subscription: Subscription) -> SourceFeed:
        difference = subscription.layout.difference(self.layout)
        if difference is not None:
            raise LayoutError(
                "KV layouts differ", where=difference, why=f"receiver {subscription.layout}, sender {self.layout}"
            )
        if subscription.epoch != self.epoch:
            raise TransferError(f"this worker's epoch is {self.epoch}, not {subscription.epoch}")
        if subscription.fingerprint != FINGERPRINT:
            raise TransferError(f"this worker's model is {FINGERPRINT}, not {subscription.fingerprint}")
        with self.changed:
            self.opened += 1
            self.feeds.append(self.feed_class(self, subscription))
            self.changed.notify_all()
            return self.feeds[-1]


class SourceFeed:
    def __init__(self, source: Source, subscription: Subscription) -> None:
        self._source, self._subscription = source, subscription
        self._until = now() + subscription.deadline
        self._next = 0
        self._pins: dict[int, int] = {}
        self.closed = False

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

    def _ready(self) -> bool:
        name = self._subscription.blocks[self._next].name
        return self._source.ended or self._source.error is not None or self._source.store.find(name) is not None

    def sent(self, index: int) -> None:
        with self._source.changed:
            if not self.closed:
                self._source.store.release([self._pins.pop(index)])

    def close(self) -> None:
        with self._source.changed:
            if not self.closed:
                self.closed = True
                self._source.store.release(self._pins.values())
                self._source.feeds.remove(self)
                self._source.changed.notify_all()


Source.feed_class = SourceFeed


class Sink:
    def __init__(
        self, blocks: list[Block], layout: KvLayout = LAYOUT, on_done: Callable[[int], object] = lambda index: None
    ) -> None:
        self.layout, self.wanted, self.on_done = layout, blocks, on_done
        self.store = BlockStore(layout, max(1, len(blocks)))
        self.numbers = self.store.allocate(len(blocks))
        self.arrived: list[int] = []
        self.lock = threading.Lock()

    def memory(self, index: int) -> memoryview:
        return self.store.memory(self.numbers[index])

    def done(self, index: int) -> None:
        with self.lock:
            self.arrived.append(index)
        self.on_done(index)

    def right(self, index: int) -> bool:
        return bytes(self.memory(index)) == content(self.wanted[index].name, self.layout)

    @property
    def whole(self) -> bool:
        """Every block came once and is what its name says."""
        return sorted(self.arrived) == list(range(len(self.wanted))) and all(map(self.right, self.arrived))
