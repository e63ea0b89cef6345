"""A graph brought up by the command line, as a user would, and drivers over its workers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from pdd_runtime.clock import now
from pdd_runtime.discovery import LocalDiscovery
from pdd_runtime.graph import load
from pdd_runtime.ids import new_id
from pdd_runtime.observe import Timelines
from pdd_runtime.pipeline import Driver, Finish, SessionRequest
from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.engine import Sampling, Token
from pdd_runtime.plugins.lines import Lines
from pdd_runtime.rpc import Greeting
from tests.waiting import PATIENCE

GRAPHS = Path(__file__).resolve().parents[2] / "graphs"


class Stack:
    """`up` in the background, `down` at the end; nothing is left behind."""

    command_time = 180.0
    """Seconds in which a command ends, `up --wait` too."""

    def __init__(self, graph: str, state: Path, *overrides: str, engine: str | None = None) -> None:
        """`engine`: of all pools, instead of the graph's."""
        self.file, self.name = GRAPHS / f"{graph}.yaml", graph
        pools = load(self.file).graph.spec.pools if engine else ()
        engines = [f"spec.pools.{pool}.engine.plugin={engine}" for pool in pools]
        self.overrides = (*engines, *overrides, "spec.frontend.port=0")
        self.state = state
        self.env = {**os.environ, "PDD_STATE_DIR": str(state)}
        self.timelines = Timelines()
        self.url = ""

    def cli(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pdd_runtime.cli", *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=self.command_time)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def __enter__(self) -> Stack:
        sets = [part for override in self.overrides for part in ("--set", override)]
        self.cli("up", str(self.file), *sets, "-d", "--wait")
        self.url = str(next(row["endpoint"] for row in self.ps() if row["role"] == "frontend"))
        return self

    def __exit__(self, *_: object) -> None:
        self.cli("down", self.name)

    def ps(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.cli("ps", self.name, "--format", "json").stdout)
        return rows

    def loads(self) -> dict[str, dict[str, int]]:
        """What each worker says of its load, by `pool/index`."""
        workers = httpx.get(f"{self.url}/pdd/workers", timeout=PATIENCE).raise_for_status().json()["workers"]
        return {worker["worker"]: worker["load"] for worker in workers}

    async def idle(self, within: float = PATIENCE) -> None:
        """Return when no worker holds anything: every pool's accounting comes to zero, and no session is left."""
        until = now() + within
        while busy := {k: v for k, v in self.loads().items() if v["blocks_used"] or v["sessions"] or v["running"]}:
            assert now() < until, busy
            await asyncio.sleep(0.05)

    def timeline(self, response: httpx.Response | Any) -> dict[str, Any]:
        request_id = response.headers["x-pdd-request-id"]
        body: dict[str, Any] = (
            httpx.get(f"{self.url}/pdd/requests/{request_id}", timeout=PATIENCE).raise_for_status().json()
        )
        return body

    @asynccontextmanager
    async def driver(self, *overrides: str) -> AsyncIterator[Driver]:
        """A session driver over the same workers, for a graph changed by `overrides`."""
        graph = load(self.file, [*self.overrides, *overrides]).graph
        launcher = json.loads((self.state / self.name / "launcher.json").read_text())
        discovery = LocalDiscovery(LocalDiscovery.Config(), launcher["endpoint"], launcher["secret"])
        greeting = Greeting(graph=graph.metadata.name, secret=launcher["secret"], cluster="dc-a", name="test")
        driver = Driver(graph, load_plugins(), discovery, greeting, Lines(graph, "dc-a"), self.timelines)
        await driver.start()
        try:
            async with asyncio.timeout(PATIENCE):
                while not driver.ready:  # noqa: ASYNC110 - readiness has no event of its own
                    await asyncio.sleep(0.02)
            yield driver
            async with asyncio.timeout(60):
                while driver.sessions:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        finally:
            await driver.close()
            await discovery.close()

    async def ask(
        self,
        driver: Driver,
        prompt: tuple[int, ...],
        max_tokens: int,
        sampling: Sampling,
        at: Mapping[int, Callable[[], None]] | None = None,
    ) -> tuple[list[Token], dict[str, Any]]:
        """The tokens of one request, and its timeline. `at`: what to do when so many tokens are there."""
        request = SessionRequest(id=new_id("req"), tokens=prompt, max_tokens=max_tokens, sampling=sampling)
        tokens: list[Token] = []
        async for item in driver.run(request):
            if not isinstance(item, Finish):
                tokens.append(item)
                if at and len(tokens) in at:
                    at[len(tokens)]()
        timeline = self.timelines.get(request.id)
        assert timeline is not None
        return tokens, timeline.body()
