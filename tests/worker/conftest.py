"""Two sides in one process, joined by a transport that a test can hold, shuffle and break."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager

import pytest
from pydantic import BaseModel

from pdd_runtime.errors import TransferError
from pdd_runtime.kv import KvLayout, chain, seed
from pdd_runtime.plugins.engine import Capabilities, EngineInfo
from pdd_runtime.plugins.messages import Fetched, FetchEvent, Fetching, FetchRequest
from pdd_runtime.plugins.transport import (
    BlockSink,
    BlockSource,
    Feed,
    Gone,
    Line,
    Ready,
    Subscription,
    TransferReport,
    Transport,
)
from pdd_runtime.worker.activity import Activity
from pdd_runtime.worker.agent import Agent
from pdd_runtime.worker.source import Source
from pdd_runtime.worker.store import WorkerStore

SIZE = 4
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=4, dtype="float32", block_size=SIZE)


class Context:
    cluster = "here"

    def line_to(self, cluster: str) -> Line | None:
        return None


class NoConfig(BaseModel):
    pass


class Loopback(Transport):
    """From a source to a sink of the same process, in a thread per fetch."""

    name = "loopback"
    Config = NoConfig

    def __init__(self) -> None:
        super().__init__(NoConfig(), Context())
        self.source: BlockSource | None = None
        self.gate = threading.Semaphore(0)
        """One permit a block; opened wide unless `gated`."""
        self.gated = False
        self.linger = 0.0
        """Seconds for which a cancelled fetch goes on writing."""
        self.shuffle: random.Random | None = None
        """Gather all blocks, then deliver them in a random order."""
        self.break_after: int | None = None
        self.crash = False
        self.fetches = 0
        self.moved = 0
        """Blocks, over all fetches."""

    async def serve(self, source: BlockSource, host: str) -> str:
        self.source = source
        return "loopback"

    async def fetch(self, endpoint: str, subscription: Subscription, sink: BlockSink) -> TransferReport:
        assert self.source is not None
        self.fetches += 1
        if self.crash:
            raise KeyError("crash")
        feed = self.source.open(subscription)
        stop = threading.Event()
        work = asyncio.ensure_future(asyncio.to_thread(self._work, feed, len(subscription.blocks), sink, stop))
        try:
            return await asyncio.shield(work)
        finally:
            stop.set()
            await asyncio.wait({work})
            work.exception()

    async def close(self) -> None:
        pass

    def _work(self, feed: Feed, blocks: int, sink: BlockSink, stop: threading.Event) -> TransferReport:
        try:
            taken = list(self._take(feed, blocks, stop))
            return self._deliver(feed, taken, blocks, sink, stop)
        finally:
            feed.close()

    def _take(self, feed: Feed, blocks: int, stop: threading.Event) -> Iterator[Ready]:
        for _ in range(blocks) if self.shuffle else ():
            if isinstance(outcome := self._next(feed, stop), Ready):
                yield outcome

    def _deliver(
        self, feed: Feed, taken: list[Ready], blocks: int, sink: BlockSink, stop: threading.Event
    ) -> TransferReport:
        if self.shuffle:
            self.shuffle.shuffle(taken)
        come = gone = 0
        for number in range(len(taken) if self.shuffle else blocks):
            while self.gated and not self.gate.acquire(timeout=0.005):
                self._stopped(stop, sink)
            outcome = taken[number] if self.shuffle else self._next(feed, stop)
            if self.break_after is not None and self.moved >= self.break_after:
                raise TransferError("the line broke")
            if isinstance(outcome, Gone):
                gone += 1
                continue
            sink.memory(outcome.index)[:] = outcome.memory
            self.moved += 1
            come += 1
            sink.done(outcome.index)
            feed.sent(outcome.index)
        return TransferReport(bytes=come * LAYOUT.block_bytes, blocks=come, gone=blocks - come, seconds=0.01)

    def _next(self, feed: Feed, stop: threading.Event) -> Ready | Gone:
        while True:
            outcome = feed.next(0.005)
            if outcome is not None:
                return outcome
            self._stopped(stop, None)

    def _stopped(self, stop: threading.Event, sink: BlockSink | None) -> None:
        if not stop.is_set():
            return
        if self.linger and sink is not None:
            threading.Event().wait(self.linger)
            sink.memory(0)[:] = b"\xff" * LAYOUT.block_bytes
        raise TransferError("cancelled")


class Side:
    """One worker's agent and what it needs, without a process."""

    def __init__(
        self,
        blocks: int = 32,
        epoch: str = "e1",
        *,
        grace: float = 10.0,
        fingerprint: str = "model",
        layout: KvLayout = LAYOUT,
    ) -> None:
        self.info = EngineInfo(
            model="m",
            fingerprint=fingerprint,
            layout=layout,
            capacity_blocks=blocks,
            context_length=4096,
            batch_limit=4,
            capabilities=Capabilities(),
        )
        self.root = seed(fingerprint, layout.spec)
        self.store = WorkerStore(layout, blocks)
        self.activity = Activity()
        self.source = Source(self.store, self.info, epoch, self.activity, grace=grace)
        self.agent = Agent(self.store, self.info, "here", self.source)

    def publish(self, tokens: Sequence[int], first: int = 0, last: int | None = None) -> None:
        """What an engine does: commit blocks `first` to `last` of a sequence, and hold none."""
        for block in chain(self.root, tokens, SIZE)[first:last]:
            (number,) = self.store.allocate(1)
            self.store.memory(number)[:] = content(block.name)
            self.store.commit(block, number)
            self.store.release([number])

    def bytes_right(self, tokens: Sequence[int]) -> bool:
        """Every cached block of the sequence has the bytes that belong to its name."""
        for block in chain(self.root, tokens, SIZE):
            number = self.store.find(block.name)
            if number is not None and bytes(self.store.memory(number)) != content(block.name):
                return False
        return True

    def cached(self, tokens: Sequence[int]) -> int:
        return self.store.cached(self.root, tokens)

    async def unused(self) -> None:
        await until(lambda: self.store.stats.used == 0 and self.agent.sessions == 0)


def content(name: bytes) -> bytes:
    return random.Random(name).randbytes(LAYOUT.block_bytes)


async def until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - threads have no event of this loop
            await asyncio.sleep(0.002)


def request(tokens: Sequence[int], request_id: str = "r", timeout: float = 5.0, epoch: str = "e1") -> FetchRequest:
    return FetchRequest(
        id=request_id, tokens=tuple(tokens), transport="loopback", endpoint="loopback", epoch=epoch, timeout=timeout
    )


class Pair:
    """A sending and a receiving side."""

    def __init__(self, here: Side, there: Side, transport: Loopback) -> None:
        self.here, self.there, self.transport = here, there, transport

    @asynccontextmanager
    async def fetching(
        self, tokens: Sequence[int], request_id: str = "r", timeout: float = 5.0
    ) -> AsyncIterator[list[FetchEvent]]:
        """A fetch up to `Fetched`; held inside the `async with`."""
        seen: list[FetchEvent] = []
        async with aclosing(self.here.agent.fetch(request(tokens, request_id, timeout), self.transport)) as events:
            async for event in events:
                seen.append(event)
                if isinstance(event, Fetched):
                    break
            assert isinstance(seen[0], Fetching)
            yield seen

    async def unused(self) -> None:
        await self.here.unused()
        await self.there.unused()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    here, there, transport = Side(), Side(), Loopback()
    await transport.serve(there.source, "")
    yield Pair(here, there, transport)
    await here.agent.close()
    await there.agent.close()
    await until(lambda: here.store.stats.used == 0 and there.store.stats.used == 0)


@pytest.fixture
def make_side() -> type[Side]:
    return Side


@pytest.fixture
def make_request() -> Callable[..., FetchRequest]:
    return request


@pytest.fixture
def eventually() -> Callable[..., object]:
    return until
