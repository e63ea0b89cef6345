"""The other side of a launcher: `ps`, the live status and `down` of a running graph."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from pdd_runtime.clock import now
from pdd_runtime.errors import LaunchError, PddError
from pdd_runtime.graph import nearest
from pdd_runtime.launch.identity import send
from pdd_runtime.launch.leftovers import end_left
from pdd_runtime.launch.orders import Apply, Down, Plan, Progress, Restart, Wanted
from pdd_runtime.launch.state import AlreadyRunningError, GraphState, Recorded
from pdd_runtime.launch.status import GraphStatus
from pdd_runtime.launch.supervisor import PATIENCE, WORKER_PATIENCE
from pdd_runtime.plugins.messages import Empty
from pdd_runtime.rpc import Greeting, RpcConnection, connect

_TIMEOUT = 3.0
_POLL = 0.1
_WEDGED = 2.0
"""Seconds that a launcher which does not answer gets to end, in case it was about to."""


class NotRunningError(LaunchError):
    """No launcher holds the graph."""

    code = "not-running"


def not_running(state: GraphState) -> NotRunningError:
    """The error, with why its last launcher ended, where that is known."""
    left = state.launcher()
    reasons = [f"its launcher, process {left.pid}, is dead"] if left else []
    # Of what the last launcher logged, an error at the end.
    with suppress(OSError):
        _, failed, error = state.launcher_log.read_text(errors="replace").rpartition(" ERROR ")
        if failed:
            reasons.append(f"it ended with: {' — '.join(line.strip() for line in error.splitlines())}")
    names = [known.name for known in GraphState.all() if known.running()]
    fix = nearest(state.name, names) or (
        f"these run: {', '.join(names)}" if names else "start it with `pdd-runtime up`"
    )
    if left:
        fix = f"`pdd-runtime down {state.name}` clears what is left"
    return NotRunningError(f"graph {state.name} is not running", why="; ".join(reasons), fix=fix)


async def ps(state: GraphState) -> GraphStatus:
    """How the graph is now. Raises `NotRunningError`."""
    async with _connected(state) as connection:
        return await connection.call("launch.ps", Empty(), GraphStatus, timeout=_TIMEOUT)


async def watch(state: GraphState) -> AsyncGenerator[GraphStatus, None]:
    """The same, now and after each change. Raises `NotRunningError`, and `ConnectionLost` when the launcher ends."""
    async with (
        _connected(state) as connection,
        connection.stream("launch.watch", Empty(), GraphStatus, timeout=None) as statuses,
    ):
        async for status in statuses:
            yield status


async def plan(state: GraphState, wanted: Wanted) -> Plan:
    """What applying a changed graph would do. Raises `NotRunningError`, and `GraphError` where it is none."""
    async with _connected(state) as connection:
        return await connection.call("launch.plan", wanted, Plan, timeout=_TIMEOUT)


async def change(state: GraphState, order: Apply | Restart) -> AsyncGenerator[str, None]:
    """Have processes replaced; gives each step as it is made, first what will be done. It goes on when this is closed.
    Raises `LaunchError` and `GraphError`."""
    method = "launch.apply" if isinstance(order, Apply) else "launch.restart"
    async with (
        _connected(state) as connection,
        connection.stream(method, order, Progress, timeout=None) as steps,
    ):
        async for step in steps:
            yield step.what


async def down(
    state: GraphState, patience: float = PATIENCE, on_status: Callable[[GraphStatus], None] = lambda status: None
) -> tuple[Recorded, ...]:
    """Stop the graph and return when none of its processes is left, whether its launcher lives or not. The
    processes that had to be ended by force are returned. Raises `NotRunningError`."""
    launcher = state.launcher()
    if launcher is None:
        raise not_running(state)
    if launcher.alive:
        stops = await _ask_down(state, patience, on_status)
        deadline = now() + (patience + 2 * WORKER_PATIENCE if stops else _WEDGED)
        while launcher.alive and now() < deadline:
            # Its record of processes changes while it lives; the last one counts when it must be killed.
            launcher = state.launcher() or launcher
            await asyncio.sleep(_POLL)
        send(launcher.pid, launcher.birth, signal.SIGKILL)
    forced = await end_left(launcher)
    with suppress(AlreadyRunningError), state.hold():
        state.forget_launcher()
    return forced


async def _ask_down(state: GraphState, patience: float, on_status: Callable[[GraphStatus], None]) -> bool:
    """Whether the launcher took it; if so, shows how it goes until the launcher hangs up."""
    stops = False
    with suppress(PddError):
        async with _connected(state) as connection:
            await connection.call("launch.down", Down(patience), type(None), timeout=_TIMEOUT)
            stops = True
            limit = patience + WORKER_PATIENCE
            async with connection.stream("launch.watch", Empty(), GraphStatus, timeout=limit) as statuses:
                async for status in statuses:
                    on_status(status)
    return stops


@asynccontextmanager
async def _connected(state: GraphState) -> AsyncIterator[RpcConnection]:
    launcher = state.running()
    if launcher is None:
        raise not_running(state)
    greeting = Greeting(graph=state.graph_name, secret=launcher.secret, cluster="", name="pdd-runtime")
    connection = await connect(launcher.endpoint, greeting, tls=state.tls(), timeout=_TIMEOUT)
    try:
        yield connection
    finally:
        await connection.close()
