"""A launcher that is told to stop before it has started anything."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from pdd_runtime.graph import loads
from pdd_runtime.launch import GraphState, Supervisor, leftovers, lineage
from pdd_runtime.launch.detached import Detached
from pdd_runtime.launch.identity import birth
from pdd_runtime.launch.state import Launcher, Recorded
from pdd_runtime.plugins import load_plugins
from tests.frontend.test_process import GRAPH
from tests.waiting import PATIENCE, until

EVER = 3600.0
NOWHERE = "spec.discovery={plugin: etcd, config: {endpoints: ['http://127.0.0.1:1']}}"


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    """Of a graph whose etcd is away."""
    graph = loads(GRAPH, [NOWHERE]).graph
    return Supervisor(graph, load_plugins(), GraphState(graph.name, tmp_path), "graph.yaml")


async def stopped(supervisor: Supervisor, running: asyncio.Task[None]) -> None:
    """It ends at once and has started nothing."""
    supervisor.stop()
    async with asyncio.timeout(PATIENCE):
        await running
    assert supervisor.crew.children == []


async def test_one_that_looks_for_the_others_ends_without_having_found_them(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lineage, "MEET", EVER)
    running = asyncio.create_task(supervisor.run())
    await until(lambda: "etcd is away" in caplog.text)
    await stopped(supervisor, running)
    assert supervisor.state.launcher() is None


async def test_one_that_waits_for_what_another_left_ends_and_leaves_it_to_the_next(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "_GRACE", EVER)
    left = await asyncio.create_subprocess_exec("sleep", "3600")
    try:
        processes = (Recorded("main", 0, left.pid, birth(left.pid)),)
        before = Launcher(pid=os.getpid(), birth="another", endpoint="h:1", secret="s", processes=processes)
        supervisor.state.make()
        supervisor.state.write_launcher(before)
        running = asyncio.create_task(supervisor.run())
        await until(lambda: (supervisor.state.directory / "lock").exists())
        await stopped(supervisor, running)
        assert supervisor.state.launcher() == before
    finally:
        left.kill()
        await left.wait()


async def test_one_in_the_background_that_was_stopped_so_early_has_not_failed(tmp_path: Path) -> None:
    ended = await asyncio.create_subprocess_exec("true", stdout=asyncio.subprocess.PIPE)
    failure = await Detached(GraphState("demo", tmp_path), ended).failure()
    assert str(failure) == "graph demo was stopped while it started"
