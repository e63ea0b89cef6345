"""Two sides in one process, joined by a transport that a test can hold, shuffle and break."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path

import pytest
from pydantic import BaseModel

from pdd_runtime.discovery import RegistryServer
from pdd_runtime.errors import TransferError
from pdd_runtime.graph import loads
from pdd_runtime.kv import Block, KvLayout, chain, seed
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.plugins.engine import Capabilities, EngineInfo, Load
from pdd_runtime.plugins.messages import Empty, Fetched, FetchEvent, Fetching, FetchRequest
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.plugins.transport import (
    BlockSink,
    BlockSource,
    Feed,
    Gone,
    Ready,
    Subscription,
    TransferReport,
    Transport,
)
from pdd_runtime.rpc import Greeting, RpcConnection, RpcServer, connect
from pdd_runtime.testing.kv_parties import Context
from pdd_runtime.testing.toy_model import ToyModel
from pdd_runtime.worker.activity import Activity
from pdd_runtime.worker.agent import Agent
from pdd_runtime.worker.source import Source
from pdd_runtime.worker.store import WorkerStore
from tests.waiting import PATIENCE, until

SIZE = 4
LAYOUT = KvLayout(layers=1, kv_heads=2, head_dim=4, dtype="float32", block_size=SIZE)
OTHER = KvLayout(layers=1, kv_heads=2, head_dim=4, dtype="bfloat16", block_size=SIZE, axes="lkhtd", tp_size=2)
"""The same blocks, which lie otherwise."""


class NoConfig(BaseModel):
    pass


class Loopback(Transport):
    """From a source to a sink of the same process, in a thread per fetch."""

    name = "loopback"
    Config = NoConfig

    def __init__(self) -> None:
        super().__init__(NoConfig(), Context("here"))
        self.source: BlockSource | None = None
        self._threads = ThreadPoolExecutor(64)
        self.gate = threading.Semaphore(0)
        """One permit a block; opened wide unless `gated`."""
        self.gated = False
        self.linger: threading.Event | None = None
        """A cancelled fetch goes on writing until it is set."""
        self.lingering = threading.Event()
        self.shuffle: random.Random | None = None
        """Gather all blocks, then deliver them in a random order."""
        self.break_after: int | None = None
        self.crash = False
        self.fetches = 0
        self.moved = 0
        """Blocks, over all fetches."""
        self.asked: list[Subscription] = []

    async def serve(self, source: BlockSource, host: str) -> str:
        self.source = source
        return "loopback"

    async def fetch(self, endpoint: str, subscription: Subscription, sink: BlockSink) -> TransferReport:
        assert self.source is not None
        self.fetches += 1
        if self.crash:
            raise KeyError("crash")
        self.asked.append(subscription)
        feed = self.source.open(subscription)
        stop = threading.Event()
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, self._work, feed, subscription, sink, stop)
        try:
            return await asyncio.shield(work)
        finally:
            stop.set()
            await asyncio.wait({work})
            work.exception()

    async def close(self) -> None:
        self._threads.shutdown()

    def _work(self, feed: Feed, subscription: Subscription, sink: BlockSink, stop: threading.Event) -> TransferReport:
        blocks = len(subscription.blocks)
        try:
            taken = list(self._take(feed, blocks, stop))
            come = self._deliver(feed, taken, blocks, sink, stop)
            size = come * subscription.layout.block_bytes
            return TransferReport(bytes=size, blocks=come, gone=blocks - come, seconds=0.01)
        finally:
            feed.close()

    def _take(self, feed: Feed, blocks: int, stop: threading.Event) -> Iterator[Ready]:
        for _ in range(blocks) if self.shuffle else ():
            if isinstance(outcome := self._next(feed, stop), Ready):
                yield outcome

    def _deliver(self, feed: Feed, taken: list[Ready], blocks: int, sink: BlockSink, stop: threading.Event) -> int:
        """How many came."""
        if self.shuffle:
            self.shuffle.shuffle(taken)
        come = 0
        for number in range(len(taken) if self.shuffle else blocks):
            while self.gated and not self.gate.acquire(timeout=0.005):
                self._stopped(stop, sink)
            outcome = taken[number] if self.shuffle else self._next(feed, stop)
            if self.break_after is not None and self.moved >= self.break_after:
                raise TransferError("the line broke")
            if isinstance(outcome, Gone):
                continue
            sink.memory(outcome.index)[:] = outcome.memory
            self.moved += 1
            come += 1
            sink.done(outcome.index)
            feed.sent(outcome.index)
        return come

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
            self.lingering.set()
            self.linger.wait(PATIENCE)
            memory = sink.memory(0)
            memory[:] = b"\xff" * len(memory)
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
        staging: int = 1 << 20,
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
        self.toy = ToyModel("m", layout, (), 0, None)
        self.store = WorkerStore(layout, blocks)
        self.activity = Activity()
        self.source = Source(self.store, self.info, epoch, self.activity, secret="shared", grace=grace)
        self.agent = Agent(self.store, self.info, "here", self.source, secret="shared", staging=staging)

    def publish(self, tokens: Sequence[int], first: int = 0, last: int | None = None) -> None:
        """What an engine does: commit blocks `first` to `last` of a sequence, and hold none."""
        for block in self.blocks(tokens)[first:last]:
            (number,) = self.store.allocate(1)
            self.store.memory(number)[:] = self.content(tokens, block)
            self.store.commit(block, number)
            self.store.release([number])

    def blocks(self, tokens: Sequence[int]) -> list[Block]:
        return chain(self.root, tokens, self.info.layout.block_size)

    def content(self, tokens: Sequence[int], block: Block) -> bytes:
        """The KV of these tokens as this side lays it out: the same numbers in every layout."""
        memory = bytearray(self.info.layout.block_bytes)
        states = self.toy.states(self.toy.start, tokens[: block.start + block.tokens])[block.start :]
        self.info.layout.elements(memoryview(memory))[:, :, : block.tokens] = self.toy.rows(states)
        return bytes(memory)

    def bytes_right(self, tokens: Sequence[int]) -> bool:
        """Every cached block of the sequence has the bytes that belong to its name."""
        for block in self.blocks(tokens):
            number = self.store.find(block.name)
            if number is not None and bytes(self.store.memory(number)) != self.content(tokens, block):
                return False
        return True

    def cached(self, tokens: Sequence[int]) -> int:
        return self.store.cached(self.root, tokens)

    async def unused(self) -> None:
        await until(lambda: self.store.stats.used == 0 and self.agent.sessions == 0)


class Pair:
    """A sending and a receiving side."""

    def __init__(self, here: Side, there: Side, transport: Loopback) -> None:
        self.here, self.there, self.transport = here, there, transport

    def request(
        self, tokens: Sequence[int], request_id: str = "r", timeout: float = PATIENCE, epoch: str = "e1"
    ) -> FetchRequest:
        return FetchRequest(
            id=request_id,
            tokens=tuple(tokens),
            transport="loopback",
            endpoint="loopback",
            epoch=epoch,
            layout=self.there.info.layout,
            timeout=timeout,
        )

    @asynccontextmanager
    async def fetching(
        self, tokens: Sequence[int], request_id: str = "r", timeout: float = PATIENCE
    ) -> AsyncIterator[list[FetchEvent]]:
        """A fetch up to `Fetched`; held inside the `async with`."""
        seen: list[FetchEvent] = []
        asked = self.request(tokens, request_id, timeout)
        async with aclosing(self.here.agent.fetch(asked, self.transport)) as events:
            async for event in events:
                seen.append(event)
                if isinstance(event, Fetched):
                    break
            assert isinstance(seen[0], Fetching)
            yield seen

    async def bring(self, tokens: Sequence[int], request_id: str = "r") -> int:
        """Fetch, let go at once, and return how many tokens came to be here."""
        async with self.fetching(tokens, request_id) as events:
            assert isinstance(events[-1], Fetched)
            return events[-1].cached_tokens

    async def close_at_random(self, dice: random.Random, rounds: int, longest: int) -> None:
        """Fetches of up to `longest` tokens, four at a time, each perhaps closed at some moment while its blocks are
        made. What is here in the end is right."""

        async def one(number: int) -> None:
            start = dice.randrange(4) * 1000
            tokens = range(start, start + dice.randrange(1, longest))
            with self.there.activity.publishing(f"r{number}"):
                fetch = asyncio.create_task(self.bring(tokens, f"r{number}"))
                for index in range(len(self.there.blocks(tokens))):
                    self.there.publish(tokens, index, index + 1)
                    await asyncio.sleep(dice.random() * 0.004)
                    if dice.random() < 0.2:
                        fetch.cancel()
            if dice.random() < 0.5:
                fetch.cancel()
            await asyncio.wait({fetch})
            if not fetch.cancelled() and fetch.exception() is None:
                assert fetch.result() == len(tokens)
            assert self.here.bytes_right(tokens)

        for _ in range(rounds):
            await asyncio.gather(*(one(number) for number in range(4)))

    async def unused(self) -> None:
        await self.here.unused()
        await self.there.unused()


@asynccontextmanager
async def paired(here: Side, there: Side) -> AsyncIterator[Pair]:
    """The two, joined until the end of a test, and then closed with nothing in use."""
    transport = Loopback()
    await transport.serve(there.source, "")
    yield Pair(here, there, transport)
    await here.agent.close()
    await there.agent.close()
    await transport.close()
    await until(lambda: here.store.stats.used == 0 and there.store.stats.used == 0)


@pytest.fixture(params=[LAYOUT, OTHER], ids=["alike", "converted"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with paired(Side(), Side(layout=request.param)) as pair:
        yield pair


@pytest.fixture
def make_pair() -> Callable[[Side, Side], AbstractAsyncContextManager[Pair]]:
    return paired


@pytest.fixture
def make_side() -> type[Side]:
    return Side


# Real workers


GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: tested}
spec:
  model: {source: script}
  clusters: {dc-a: {}, dc-b: {}}
  links:
    wan: {between: [dc-a, dc-b], bandwidth: 10Gbit/s, rtt: 2ms, streams: 2}
  pools:
    prefill: {role: prefill, cluster: dc-a, engine: {plugin: scripted, config: {}}}
    main: {role: main, cluster: dc-b, engine: {plugin: scripted, config: {}}}
  edges:
    - {from: prefill, to: main, carries: kv, transport: {plugin: tcp}, link: wan}
"""
SECRET = "a secret of this test"
FRONT = Greeting(graph="tested", secret=SECRET, cluster="dc-a", name="frontend/0")


class WorkerProcess:
    """One worker and a connection to it, as a driver has it."""

    def __init__(
        self, key: WorkerKey, process: asyncio.subprocess.Process, log: Path, registry: RegistryServer
    ) -> None:
        self.key, self.process, self.log, self._registry = key, process, log, registry
        self._connections: list[RpcConnection] = []

    @property
    def member(self) -> Member | None:
        return next((member for member in self._registry.members() if member.key == self.key), None)

    async def state(self, state: str) -> Member:
        """Wait until it shows itself in this state."""
        async with asyncio.timeout(PATIENCE):
            while True:
                version = self._registry.version
                member = self.member
                if member is not None and member.state == state:
                    return member
                if self.process.returncode is not None:
                    raise AssertionError(f"{self.key} ended with {self.process.returncode}:\n{self.log.read_text()}")
                try:
                    async with asyncio.timeout(0.1):
                        await self._registry.changed(version)
                except TimeoutError:
                    pass

    async def connect(self) -> RpcConnection:
        member = await self.state("ready")
        connection = await connect(member.endpoint, FRONT)
        self._connections.append(connection)
        return connection

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()

    async def load(self) -> Load:
        return await self._connections[0].call("engine.load", Empty(), Load, timeout=PATIENCE)

    async def unused(self) -> None:
        """No block in use, no session left; with patience for what is just being cancelled."""
        async with asyncio.timeout(PATIENCE):
            while (load := await self.load()).blocks_used or load.sessions or load.running or load.waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def stop(self) -> None:
        for connection in self._connections:
            await connection.close()
        if self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                await self.ended()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
                raise AssertionError(f"{self.key} did not end at EOF:\n{self.log.read_text()}") from None
        log = self.log.read_text()
        assert "still in use" not in log, log
        assert "Traceback" not in log, log


class Cluster:
    """A registry in this process, and workers that find it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.workers: list[WorkerProcess] = []
        self.server = RpcServer(Greeting(graph="tested", secret=SECRET, cluster="", name="launcher"))
        self.registry = RegistryServer(self.server)
        self.address = ""
        self._started = 0

    async def start(
        self, pool: str, *overrides: str, connect: bool = True, index: int | None = None, replaces: bool = False
    ) -> WorkerProcess:
        """A worker of the graph, with `--set`; ready and connected to unless told otherwise."""
        number, self._started = self._started, self._started + 1
        key = WorkerKey(pool, number if index is None else index, f"epoch-{number}")
        graph = self.directory / f"graph-{number}.json"
        graph.write_text(loads(GRAPH, overrides).to_json())
        log = self.directory / f"{number}.log"
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "pdd_runtime.worker", "--graph", str(graph), "--pool", pool, "--index", str(key.index)),
                *("--epoch", key.epoch, "--discovery", self.address, *(["--replaces"] if replaces else [])),
                stdin=asyncio.subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "PDD_SECRET": SECRET, "PDD_PLUGINS": "local-discovery,scripted,tcp"},
            )
        worker = WorkerProcess(key, process, log, self.registry)
        self.workers.append(worker)
        if connect:
            await worker.connect()
        return worker


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    cluster.address = await cluster.server.start("127.0.0.1")
    try:
        yield cluster
    finally:
        results = await asyncio.gather(*(worker.stop() for worker in cluster.workers), return_exceptions=True)
        cluster.registry.close()
        await cluster.server.close()
        for result in results:
            if isinstance(result, BaseException):
                raise result
