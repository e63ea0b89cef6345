"""Real worker processes with the scripted engine, found through a registry in the test's process."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pdd_runtime.clock import now
from pdd_runtime.discovery import LocalDiscovery, RegistryServer
from pdd_runtime.graph import Graph, loads
from pdd_runtime.ids import new_id
from pdd_runtime.observe import Timelines
from pdd_runtime.pipeline import Driver, Finish, SessionRequest
from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.engine import Load, Sampling, Token
from pdd_runtime.plugins.lines import Lines
from pdd_runtime.plugins.messages import Empty
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.rpc import Greeting, RpcServer, connect
from tests.waiting import PATIENCE, until

SECRET = "only-for-tests"
START = 100.0
"""Seconds for processes that start all at once, on a machine that has other work."""
GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: pipeline-tests}
spec:
  model: {source: scripted}
  clusters: {dc-a: {}, dc-b: {}}
  links:
    wan: {between: [dc-a, dc-b], bandwidth: 20Mbit/s, rtt: 20ms, streams: 2, emulate: true}
  pools:
    prefill: {role: prefill, cluster: dc-a, engine: &e {plugin: scripted, config: {eos_every: 128, token_time: 0.002}}}
    relay: {role: relay, cluster: dc-a, engine: *e}
    main: {role: main, cluster: dc-b, engine: *e}
    all: {role: aggregated, cluster: dc-a, engine: *e}
  edges:
    - {from: prefill, to: relay, carries: kv, transport: {plugin: tcp}}
    - {from: prefill, to: main, carries: kv, transport: {plugin: tcp}, link: wan}
    - {from: relay, to: main, carries: tokens, link: wan}
    - {from: relay, to: main, carries: kv, transport: {plugin: tcp}, link: wan}
"""


@dataclass
class Answer:
    """What a user got, and when, in seconds from asking."""

    tokens: list[Token] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish: Finish | None = None
    timeline: dict[str, Any] = field(default_factory=dict)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def transfer(self, edge: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = [transfer for transfer in self.timeline["kv"] if transfer["edge"] == edge]
        assert len(found) == 1
        return found[0]


class Fleet:
    """The processes of one graph, and drivers over them."""

    def __init__(self, directory: Path, overrides: tuple[str, ...] = (), text: str = GRAPH) -> None:
        """`text`: the graph's YAML."""
        self.directory, self.overrides, self.text = directory, overrides, text
        self.graph = self.graph_with()
        self.timelines = Timelines()
        self.processes: dict[tuple[str, int], asyncio.subprocess.Process] = {}
        self._drivers: dict[tuple[str, ...], tuple[Driver, LocalDiscovery]] = {}

    def graph_with(self, *overrides: str) -> Graph:
        return loads(self.text, [*self.overrides, *overrides]).graph

    async def start(self, *pools: str, patience: float = START) -> None:
        self._server = RpcServer(Greeting(graph=self.graph.name, secret=SECRET, cluster="dc-a", name="launcher"))
        self._registry = RegistryServer(self._server)
        self.address = await self._server.start("127.0.0.1")
        for pool in pools or self.graph.spec.pools:
            for index in range(self.graph.spec.pools[pool].replicas):
                await self.spawn(pool, index)
        await until(lambda: self.ready() >= len(self.processes), patience)

    def ready(self) -> int:
        return sum(member.state == "ready" for member in self._registry.members())

    async def spawn(self, pool: str, index: int = 0) -> None:
        """Start a worker process; it is ready a moment later."""
        epoch = new_id("epoch")
        path = self.directory / "graph.json"
        path.write_text(self.graph.model_dump_json(by_alias=True))
        command = ["-m", "pdd_runtime.worker", "--graph", str(path), "--pool", pool, "--index", str(index)]
        with (self.directory / f"{pool}-{index}-{epoch}.log").open("wb") as log:
            self.processes[pool, index] = await asyncio.create_subprocess_exec(
                *(sys.executable, *command, "--epoch", epoch, "--discovery", self.address),
                stdin=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PDD_SECRET": SECRET, "OMP_NUM_THREADS": "1"},
            )

    async def kill(self, pool: str, index: int = 0) -> None:
        """Without a chance to say goodbye. Its lease is left to expire."""
        process = self.processes.pop((pool, index))
        process.kill()
        await process.wait()

    async def close(self) -> None:
        for driver, discovery in self._drivers.values():
            await driver.close()
            await discovery.close()
        for process in self.processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes.values():
            async with asyncio.timeout(PATIENCE):
                await process.wait()
        self._registry.close()
        await self._server.close()

    async def driver(self, *overrides: str, wait: bool = True) -> Driver:
        """A driver for this graph, changed by `overrides`, over the same workers: all that are ready, unless it is not
        waited for."""
        return await self._driver(overrides, self.graph_with(*overrides), wait)

    async def aggregated(self) -> Driver:
        """A driver that knows only the aggregated pool."""
        spec = self.graph.spec.model_copy(update={"edges": (), "pools": {"all": self.graph.spec.pools["all"]}})
        return await self._driver(("aggregated",), self.graph.model_copy(update={"spec": spec}), True)

    async def _driver(self, key: tuple[str, ...], graph: Graph, wait: bool) -> Driver:
        if key not in self._drivers:
            discovery = LocalDiscovery(LocalDiscovery.Config(), self.address, SECRET)
            greeting = Greeting(
                graph=graph.name, secret=SECRET, cluster="dc-a", name="frontend/0", epoch=new_id("epoch")
            )
            driver = Driver(graph, load_plugins(), discovery, greeting, Lines(graph, "dc-a"), self.timelines)
            await driver.start()
            self._drivers[key] = driver, discovery
        driver = self._drivers[key][0]
        if wait:
            await until(lambda: driver.ready and self._present(graph) <= {member.key for member, _ in driver.workers()})
        return driver

    def _present(self, graph: Graph) -> set[WorkerKey]:
        """The workers of that graph which are ready."""
        pools = graph.spec.pools
        return {each.key for each in self._registry.members() if each.key.pool in pools and each.state == "ready"}

    async def ask(
        self,
        driver: Driver,
        prompt: list[int],
        max_tokens: int,
        salt: str = "",
        id: str = "",
        beside: str = "",
        **sampling: Any,
    ) -> Answer:
        """One request to its end."""
        answer, asked = Answer(), now()
        id = id or new_id("req")
        request = SessionRequest(
            id=id,
            tokens=tuple(prompt),
            max_tokens=max_tokens,
            sampling=Sampling(**({"temperature": 0.0} | sampling)),
            salt=salt,
            beside=beside,
        )

        def put(item: Token | Finish) -> None:
            if isinstance(item, Finish):
                answer.finish = item
            else:
                answer.tokens.append(item)
                answer.times.append(now() - asked)

        await driver.deliver(request, put)
        timeline = self.timelines.get(id)
        assert timeline is not None
        answer.timeline = timeline.body()
        assert [token.position for token in answer.tokens] == list(range(len(prompt), len(prompt) + len(answer.tokens)))
        assert answer.finish is not None
        return answer

    async def settled(self, answer: Answer) -> Answer:
        """With its timeline as it is when its session has ended: it may outlive the answer."""
        await self.idle()
        timeline = self.timelines.get(answer.timeline["id"])
        assert timeline is not None
        answer.timeline = timeline.body()
        return answer

    async def loads(self) -> list[Load]:
        """What every worker says of itself."""
        found = []
        greeting = Greeting(graph=self.graph.name, secret=SECRET, cluster="dc-a", name="test")
        alive = {process.pid for process in self.processes.values()}
        for member in self._registry.members():
            if member.pid in alive:
                connection = await connect(member.endpoint, greeting)
                found.append(await connection.call("engine.load", Empty(), Load, timeout=PATIENCE))
                await connection.close()
        return found

    async def idle(self) -> None:
        """Return when no session is left, and no worker holds anything. That is what every test must end with."""
        await until(lambda: all(driver.sessions == 0 for driver, _ in self._drivers.values()))
        end = now() + PATIENCE
        while busy := [load for load in await self.loads() if load.blocks_used or load.sessions or load.running]:
            assert now() < end, busy
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def make_fleet(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Fleet]:
    """A fleet with these overrides; to be started and closed by who makes it."""
    return lambda *overrides, text=GRAPH: Fleet(tmp_path_factory.mktemp("fleet"), overrides, text)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(make_fleet: Callable[..., Fleet]) -> AsyncIterator[Fleet]:
    """One worker of each pool, for all tests of a module: whatever they leave behind shows in the next."""
    fleet = make_fleet()
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.close()


@pytest_asyncio.fixture(loop_scope="module")
async def new_fleet(make_fleet: Callable[..., Fleet]) -> AsyncIterator[Callable[..., Fleet]]:
    """Makes fleets for one test, which may kill what it likes; to be started by it."""
    fleets: list[Fleet] = []

    def make(*overrides: str, text: str = GRAPH) -> Fleet:
        fleets.append(make_fleet(*overrides, text=text))
        return fleets[-1]

    yield make
    for fleet in fleets:
        await fleet.close()


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Callable[[int], list[int]]:
    """Makes prompts that nobody has asked before, the same ones in every run of a test."""
    randomness = random.Random(request.node.nodeid)
    return lambda tokens: [randomness.randrange(32, 127) for _ in range(tokens)]
