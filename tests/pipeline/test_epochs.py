"""Who answers in a worker's place is not taken for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from pydantic import BaseModel

from pdd_runtime.graph import loads
from pdd_runtime.pipeline.peers import Peers
from pdd_runtime.plugins.discovery import Discovery, Member
from pdd_runtime.plugins.lines import Lines
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.rpc import Greeting, RpcServer
from tests.waiting import until

GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: g}
spec:
  model: {source: scripted}
  clusters: {dc-a: {}}
  pools: {main: {role: aggregated, cluster: dc-a, engine: {plugin: scripted}}}
"""


def greeting(name: str, epoch: str) -> Greeting:
    return Greeting(graph="g", secret="hush-hush", cluster="dc-a", name=name, epoch=epoch)


class Settings(BaseModel):
    """None."""


class Fixed(Discovery):
    """One that knows one member."""

    name = "fixed"
    Config = Settings
    member: Member

    async def register(self, member: Member) -> None: ...
    async def renew(self, member: Member) -> None: ...
    async def unregister(self, key: WorkerKey) -> None: ...
    async def close(self) -> None: ...

    async def watch(self) -> AsyncGenerator[tuple[Member, ...], None]:
        yield (self.member,)
        await asyncio.Event().wait()


async def test_a_process_of_another_epoch_is_left_out_and_told_of(caplog: pytest.LogCaptureFixture) -> None:
    server = RpcServer(greeting("main/0", "epoch-2"))
    endpoint = await server.start("127.0.0.1")
    key = WorkerKey("main", 0, "epoch-1")
    discovery = Fixed(Settings(), "", "hush-hush")
    discovery.member = Member(key=key, role="aggregated", cluster="dc-a", state="ready", pid=1, endpoint=endpoint)
    peers = Peers(discovery, greeting("frontend/0", "epoch-9"), Lines(loads(GRAPH).graph, "dc-a"))
    await peers.start()
    await until(lambda: key in peers.troubles)
    assert peers.troubles[key] == "a process of another epoch answers in its place"
    assert peers.ready == []
    assert "it is main/0 of epoch epoch-2, not of epoch-1" in caplog.text
    await peers.close()
    await server.close()
