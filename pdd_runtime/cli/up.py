"""`pdd-runtime up`: in the foreground, or detached."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from pdd_runtime.cli import change
from pdd_runtime.cli.ask import ask, curl, model_name
from pdd_runtime.cli.console import FAILED, OK, Consoles, plain
from pdd_runtime.cli.front import front_at
from pdd_runtime.cli.live import LiveStatus
from pdd_runtime.cli.picture import ROLE_STYLE, picture
from pdd_runtime.errors import ConnectionLost, LaunchError, PddError
from pdd_runtime.graph import Graph, LoadedGraph
from pdd_runtime.launch import (
    Change,
    ChildSpec,
    GraphState,
    GraphStatus,
    Manner,
    Part,
    Supervisor,
    start_detached,
    stopped_by_signals,
    watch,
)
from pdd_runtime.launch.logs import LauncherLog
from pdd_runtime.plugins import PluginManager


@dataclass(frozen=True)
class UpOptions:
    """What `up` was asked for, beside the graph."""

    wait: bool
    wait_timeout: float | None
    """Seconds; None: as long as it takes."""
    question: str | None
    max_tokens: int
    quiet: bool
    as_json: bool = False
    """Detached only: say what runs as JSON, and how it starts on stderr."""


async def up_detached(loaded: LoadedGraph, part: Part, options: UpOptions, consoles: Consoles) -> int:
    """Start a launcher in the background; wait for it where asked to. Returns the exit code."""
    state = GraphState(part.name(loaded.graph))
    detached = await start_detached(loaded.graph, str(loaded.path), state, part)
    if not options.wait:
        if options.as_json:
            consoles.json(_started(state))
            return OK
        consoles.out.print(f"graph {state.name} is starting; `pdd-runtime ps {state.name}` shows how far it is")
        return OK
    if not options.as_json:
        consoles.out.print(picture(loaded.graph))
    try:
        async with asyncio.timeout(options.wait_timeout):
            with LiveStatus(consoles.err if options.as_json else consoles.out) as live:
                status = await live.until_ready(watch(state))
    except TimeoutError:
        raise await _late(state, options, "starting") from None
    except (ConnectionLost, LaunchError):
        raise await detached.failure() from None
    if status is None:
        raise LaunchError(f"graph {state.name} was stopped while it started")
    await _announce_and_ask(loaded.graph, state, status, options, consoles)
    return OK


async def _announce_and_ask(
    graph: Graph, state: GraphState, status: GraphStatus, options: UpOptions, consoles: Consoles
) -> None:
    if options.as_json:
        consoles.json(_started(state))
        return
    await _announce(consoles, graph, state, status)
    if options.question is not None:
        await ask(consoles.out, front_at(state, status), options.question, options.max_tokens)


async def _late(state: GraphState, options: UpOptions, doing: str) -> LaunchError:
    return LaunchError(
        f"graph {state.name} is not ready after {options.wait_timeout:g} s",
        why=await _missing(state),
        fix=f"it goes on {doing}: see `pdd-runtime ps` and `logs`, end it with `down`",
    )


async def up_again(
    loaded: LoadedGraph,
    part: Part,
    changes: Sequence[Change],
    manner: Manner,
    options: UpOptions,
    consoles: Consoles,
) -> int:
    """Make a graph that runs the one in the file; wait for it where asked to. Returns the exit code."""
    state = GraphState(part.name(loaded.graph))
    console = consoles.err if options.as_json else consoles.out
    change.tell(changes, console)
    if not changes:
        console.print(f"graph {state.name} runs as {loaded.path} says", markup=False)
    status: GraphStatus | None = None
    try:
        async with asyncio.timeout(options.wait_timeout):
            # Also where nothing is to be done: a launcher whose last change failed is to forget that graph.
            await change.apply(
                loaded, part, manner, wait=options.wait or not changes, consoles=consoles, console=console
            )
            if options.wait:
                with LiveStatus(console) as live:
                    status = await live.until_ready(watch(state))
    except TimeoutError:
        raise await _late(state, options, "changing") from None
    except ConnectionLost:
        raise LaunchError(f"graph {state.name} was stopped while it was changed") from None
    if status is not None:
        await _announce_and_ask(loaded.graph, state, status, options, consoles)
    elif options.wait:
        raise LaunchError(f"graph {state.name} was stopped while it was changed")
    elif options.as_json:
        consoles.json(_started(state))
    elif changes:
        console.print(f"graph {state.name} is being changed; `pdd-runtime ps {state.name}` shows how far it is")
    return OK


def _started(state: GraphState) -> dict[str, Any]:
    """For `-d --format json`."""
    launcher = state.launcher()
    return {
        "name": state.name,
        "pid": launcher.pid if launcher else None,
        "url": (launcher.url if launcher else "") or None,
        "state": str(state.directory),
    }


async def up_attached(
    loaded: LoadedGraph, part: Part, plugins: PluginManager, options: UpOptions, consoles: Consoles
) -> int:
    """Be the launcher until Ctrl-C. Returns the exit code."""
    state = GraphState(part.name(loaded.graph))
    supervisor = Supervisor(loaded.graph, plugins, state, str(loaded.path), _echo(consoles, options), part=part)
    state.check_free()
    consoles.out.print(picture(loaded.graph))

    def on_signal(count: int) -> None:
        consoles.err.print(
            "draining: running requests may end; Ctrl-C again kills" if count == 1 else "killing", style="yellow"
        )

    with stopped_by_signals(supervisor, on_signal):
        running = asyncio.create_task(supervisor.run(), name="supervisor")
        talking = asyncio.create_task(_talk(supervisor, options, consoles), name="conversation")
        try:
            await asyncio.wait([running, talking], return_when=asyncio.FIRST_COMPLETED)
            if talking.done() and talking.exception() is not None:
                supervisor.stop()
            await running
        finally:
            talking.cancel()
            await asyncio.wait([talking])
    if not talking.cancelled():
        return talking.result()
    return OK


async def _talk(supervisor: Supervisor, options: UpOptions, consoles: Consoles) -> int:
    """What the user sees while the supervisor works. Returns the exit code for a stop in order."""
    code = OK
    try:
        async with asyncio.timeout(options.wait_timeout):
            with LiveStatus(consoles.out) as live:
                status = await live.until_ready(supervisor.watch())
    except TimeoutError:
        raise LaunchError(
            f"graph {supervisor.state.name} is not ready after {options.wait_timeout:g} s",
            why=supervisor.status().missing,
            fix="see `pdd-runtime logs`; --wait-timeout gives it longer",
        ) from None
    if status is not None:
        await _announce(consoles, supervisor.graph, supervisor.state, status)
        if options.question is not None:
            code = await _ask_unless_stopped(supervisor, status, options, consoles)
        if not supervisor.status().stopping and not consoles.out.is_terminal:
            consoles.out.print("Ctrl-C stops it.", style="dim")
    with LiveStatus(consoles.out) as live:
        async for now in supervisor.watch():
            # Elsewhere than on a terminal the logs tell of restarts, and the end is told here.
            if now.stopping or consoles.out.is_terminal:
                live.show(now)
    return code


async def _ask_unless_stopped(
    supervisor: Supervisor, status: GraphStatus, options: UpOptions, consoles: Consoles
) -> int:
    """A question that fails leaves the graph up, so that it can be looked at."""
    assert options.question is not None
    front = front_at(supervisor.state, status)
    asking = asyncio.create_task(ask(consoles.out, front, options.question, options.max_tokens), name="ask")
    stopping = asyncio.create_task(_until_stopping(supervisor.watch()), name="stopping")
    try:
        await asyncio.wait([asking, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (asking, stopping):
            task.cancel()
        await asyncio.wait([asking, stopping])
    try:
        if not asking.cancelled():
            asking.result()
    except PddError as error:
        consoles.error(error)
        return FAILED
    return OK


async def _until_stopping(statuses: AsyncIterator[GraphStatus]) -> None:
    async for status in statuses:
        if status.stopping:
            return


async def _announce(consoles: Consoles, graph: Graph, state: GraphState, status: GraphStatus) -> None:
    out = consoles.out
    if not status.url:
        where = f"{status.name}; users ask the frontend in {' or '.join(graph.frontend_clusters)}"
        out.print(Text.assemble(("ready: ", "bold green"), where))
        return
    out.print(Text.assemble(("ready: ", "bold green"), (status.url, "bold underline")))
    front = front_at(state, status)
    out.print(curl(front, await model_name(front)), soft_wrap=True, markup=False)


def _echo(consoles: Consoles, options: UpOptions) -> Callable[[ChildSpec, str], None]:
    """Every line of every process, with a prefix; none where a question's answer is to be read."""

    def echo(spec: ChildSpec, line: str) -> None:
        prefix = f"{spec!s:>{width}} | "
        consoles.out.print(Text.assemble((prefix, ROLE_STYLE[spec.role]), plain(line)), soft_wrap=True)

    width = 12
    return (lambda spec, line: None) if options.quiet or options.question is not None else echo


async def _missing(state: GraphState) -> str:
    async for status in watch(state):
        return status.missing
    return ""


def log_to(state: GraphState) -> None:
    """What this process itself has to say goes to the launcher's log, not between the lines of the terminal."""
    with suppress(OSError):  # `up` is about to say so itself
        state.make()
        logging.basicConfig(level=logging.WARNING, handlers=[LauncherLog(state.launcher_log)])
