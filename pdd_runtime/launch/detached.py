"""A launcher in the background: what `up -d` starts."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import msgspec

from pdd_runtime.errors import LaunchError, PddError
from pdd_runtime.graph import Graph
from pdd_runtime.launch.part import Part
from pdd_runtime.launch.state import GraphState

_START = 30.0
"""Seconds a launcher may take until its processes are being started."""


class Order(msgspec.Struct, frozen=True):
    """What the launcher reads from stdin."""

    graph: dict[str, Any]
    source: str
    part: Part


class Said(msgspec.Struct, frozen=True):
    """A line that the launcher writes to stdout: once that it has begun, or why it ended."""

    error: dict[str, str] | None = None


class Detached:
    """A launcher that was started here and lives on when this process ends."""

    def __init__(self, state: GraphState, process: asyncio.subprocess.Process) -> None:
        self.state, self._process = state, process

    async def failure(self) -> PddError:
        """Why it ended. Waits until it has."""
        said = await self._read()
        await self._process.wait()
        if said is not None and said.error is not None:
            return PddError.from_wire(said.error)
        if self._process.returncode == 0:
            return LaunchError(f"graph {self.state.name} was stopped while it started")
        return LaunchError(
            f"the launcher of {self.state.name} ended",
            why=f"exit code {self._process.returncode}",
            fix=f"its log is {self.state.launcher_log}",
        )

    async def begun(self) -> None:
        """Return when its processes are being started. Raises what kept it from that."""
        try:
            async with asyncio.timeout(_START):
                said = await self._read()
        except TimeoutError:
            raise LaunchError(
                f"the launcher of {self.state.name} did not begin in {_START:g} s",
                fix=f"its log is {self.state.launcher_log}",
            ) from None
        if said is None:
            raise await self.failure()
        if said.error is not None:
            raise PddError.from_wire(said.error)

    async def _read(self) -> Said | None:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        return msgspec.json.decode(line, type=Said) if line else None


async def start_detached(graph: Graph, source: str, state: GraphState, part: Part) -> Detached:
    """Start a launcher in a session of its own, so that no terminal ends it. Raises `LaunchError`, and
    `AlreadyRunningError` where another one holds the graph."""
    state.check_free()
    try:
        state.make()
        state.launcher_log.touch(mode=0o600)
        os.truncate(state.launcher_log, 0)
        log = state.launcher_log.open("ab")
    except OSError as error:
        raise LaunchError(
            "the state directory cannot be used", where=str(state.directory), why=error.strerror or str(error)
        ) from error
    with log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pdd_runtime.launch"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdin is not None
    order = Order(graph.model_dump(mode="json", by_alias=True), source, part)
    process.stdin.write(msgspec.json.encode(order))
    process.stdin.close()
    detached = Detached(state, process)
    await detached.begun()
    return detached
