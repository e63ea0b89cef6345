"""Faults in a graph of real processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from resource import RLIMIT_FSIZE, prlimit

import pytest

from pdd_runtime.errors import DeadlineExceeded
from pdd_runtime.launch import GraphState, NotRunningError
from pdd_runtime.observe import Vitals
from pdd_runtime.plugins.messages import Empty
from pdd_runtime.rpc import Greeting, connect
from pdd_runtime.testing.faults import FaultError, Faults, Process, RunningGraph
from tests.cli.shell import Cli
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.timeout(300)
GRAPH = """\
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: struck}
spec:
  model: {source: toy}
  clusters: {dc-a: {}, dc-b: {}}
  links:
    wan: {between: [dc-a, dc-b], bandwidth: 1Gbit/s, rtt: 2ms, emulate: true}
  pools:
    prefill: {role: prefill, cluster: dc-a, engine: {plugin: scripted}}
    main: {role: main, cluster: dc-b, replicas: 2, engine: {plugin: scripted}}
  edges:
    - {from: prefill, to: main, carries: kv, transport: {plugin: tcp}, link: wan}
  frontend: {port: 0}
"""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GraphState]:
    cli = Cli(tmp_path_factory.mktemp("faults"))
    up = cli("up", cli.write(GRAPH, "struck.yaml"), "-d", "--wait", "--wait-timeout", "60")
    assert up.code == 0, up.err
    yield GraphState("struck", cli.directory / "state")
    cli("down", "struck", "--timeout", "0")


@pytest.fixture
async def running(state: GraphState) -> AsyncIterator[RunningGraph]:
    async with RunningGraph(state) as graph:
        await until(lambda: len(graph.members) == 4 and all(member.state == "ready" for member in graph.members))
        yield graph


def process(running: RunningGraph, name: str) -> Process:
    found = running.find(name)
    assert found is not None
    return found


async def test_a_killed_worker_is_gone_and_its_launcher_starts_another(running: RunningGraph) -> None:
    before = process(running, "main/1")
    assert [str(one) for one in await Faults(running).kill("main/1")] == ["main/1"]
    assert not before.alive
    await until(lambda: running.find("main/1"))
    assert process(running, "main/1").pid != before.pid


async def test_by_role_and_index_one_worker_is_meant(running: RunningGraph) -> None:
    faults = Faults(running)
    assert str(faults.choose(role="main")) == "main/0"
    assert str(faults.choose(role="main", index=1)) == "main/1"
    assert str(faults.choose("prefill")) == "prefill/0"
    assert str(faults.choose("frontend")) == "frontend/0"
    assert faults.choose("main/7") is None
    with pytest.raises(FaultError, match="no worker relay"):
        faults.choose(role="relay")


async def test_a_hung_worker_does_not_answer_and_goes_on_later(running: RunningGraph) -> None:
    member = next(member for member in running.members if member.key.pool == "prefill")
    hanging = asyncio.create_task(Faults(running).hang("prefill/0", PATIENCE))
    await until(lambda: stopped(member.pid))
    with pytest.raises(DeadlineExceeded):
        await running.ask(member, "process.vitals", Empty(), Vitals)
    hanging.cancel()
    await asyncio.wait([hanging])
    await until(lambda: not stopped(member.pid))
    assert (await running.ask(member, "process.vitals", Empty(), Vitals)).tasks > 0


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


async def test_over_a_cut_link_nobody_is_heard_and_inside_a_cluster_all_are(running: RunningGraph) -> None:
    main = next(member for member in running.members if member.key.pool == "main")
    secret = running.launchers[0].secret

    async def greet(cluster: str, seconds: float) -> None:
        greeting = Greeting(graph="struck", secret=secret, cluster=cluster, name="somebody")
        connection = await connect(main.endpoint, greeting, timeout=seconds)
        await connection.close()

    await greet("dc-a", PATIENCE)
    cut = asyncio.create_task(Faults(running).cut("wan", 5.0))
    await until(lambda: "is cut" in running.states[0].log("main", main.key.index).read_text())
    with pytest.raises(DeadlineExceeded):
        await greet("dc-a", 0.2)
    await greet("dc-b", PATIENCE)
    await cut
    await greet("dc-a", PATIENCE)


async def test_with_a_full_disk_what_runs_goes_on_unlogged(running: RunningGraph) -> None:
    log, (launcher,) = running.states[0].log("main", 0), running.launchers
    filling = asyncio.create_task(Faults(running).fill_disk(PATIENCE))
    await until(lambda: prlimit(launcher.pid, RLIMIT_FSIZE)[0] == 0)
    size = log.stat().st_size
    before = process(running, "prefill/0")
    member = next(member for member in running.members if member.key.pool == "main" and member.key.index == 0)
    # It logs that it refuses this greeting.
    with pytest.raises(Exception, match="secret"):
        await connect(member.endpoint, Greeting(graph="struck", secret="wrong", cluster="dc-b", name="x"))
    assert (await running.ask(member, "process.vitals", Empty(), Vitals)).tasks > 0
    assert log.stat().st_size == size
    filling.cancel()
    await asyncio.wait([filling])
    assert process(running, "prefill/0") == before
    for pid in (launcher.pid, before.pid):
        assert prlimit(pid, RLIMIT_FSIZE)[0] != 0


async def test_a_cluster_dies_whole_and_no_other(running: RunningGraph) -> None:
    before = {str(one): one for one in running.processes}
    struck = await Faults(running).kill_cluster("dc-b")
    assert {str(one) for one in struck} == {"main/0", "main/1"}
    assert not any(one.alive for one in struck)
    assert before["prefill/0"].alive
    assert before["frontend/0"].alive


async def test_faults_that_cannot_be_made_say_why(running: RunningGraph) -> None:
    faults = Faults(running)
    with pytest.raises(FaultError, match="emulate"):
        await faults.cut("lan", 1.0)
    with pytest.raises(FaultError, match="no etcd"):
        await faults.lose_etcd(1.0)
    with pytest.raises(FaultError, match="no cluster"):
        await faults.kill_cluster("dc-c")


def test_a_graph_that_does_not_run_cannot_be_struck(tmp_path: Path) -> None:
    with pytest.raises(NotRunningError):
        RunningGraph(GraphState("struck", tmp_path))
