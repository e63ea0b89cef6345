from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import httpx
import pytest

from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import EngineHost, EngineInfo, ModelSpec
from pdd_runtime.server.launch import Launch
from pdd_runtime.server.process import free_port
from pdd_runtime.testing.running_server import RunningServer
from pdd_runtime.testing.scripted import ScriptedEngine
from tests.waiting import PATIENCE

RUNS = Launch((sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(3600)"))
FAILS = Launch((sys.executable, "-c", "print('no such flag'); raise SystemExit(3)"))


class Worker(ScriptedEngine):
    """Knows whether its start, which ends only when it is told, and its close have been."""

    def __init__(self) -> None:
        super().__init__(self.Config(), ModelSpec(source="script"))
        self.may_start, self.said = asyncio.Event(), list[str]()

    async def start(self, host: EngineHost) -> EngineInfo:
        await self.may_start.wait()
        self.said.append("started")
        return await super().start(host)

    async def close(self) -> None:
        self.said.append("closed")
        await super().close()


def test_it_is_well_as_long_as_the_with_and_gone_behind_it(tmp_path: Path) -> None:
    port = free_port()
    launch = Launch((sys.executable, "-m", "http.server", "-b", "127.0.0.1", str(port)), files={"page": "text"})
    url = f"http://127.0.0.1:{port}/page"
    with RunningServer(launch, tmp_path) as server:
        server.until_well(url, PATIENCE)
        assert httpx.get(url, timeout=PATIENCE).text == "text"
        server.check()
    with pytest.raises(EngineError, match="the server ended"):
        server.check()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, timeout=PATIENCE)


def test_one_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    with (
        RunningServer(FAILS, tmp_path) as server,
        pytest.raises(EngineError, match=r"(?s)the server ended: exit code 3.*no such flag"),
    ):
        server.until_well(f"http://127.0.0.1:{free_port()}", 3600)


def test_one_that_is_not_well_in_time_is_told_with_its_last_words(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with RunningServer(RUNS, tmp_path) as server, pytest.raises(EngineError, match="not well after 0 s"):
        server.until_well(url, 0)


async def test_the_first_worker_comes_and_goes(tmp_path: Path) -> None:
    worker = Worker()
    worker.may_start.set()
    with RunningServer(RUNS, tmp_path) as server:
        await server.until_served(worker)
        server.check()
    assert worker.said == ["started", "closed"]


async def test_a_server_that_ends_is_not_waited_for_by_its_first_worker(tmp_path: Path) -> None:
    worker = Worker()
    with RunningServer(FAILS, tmp_path) as server, pytest.raises(EngineError, match="exit code 3"):
        await server.until_served(worker)
    assert worker.said == ["closed"]
