"""What `up` does with a graph that runs, and `restart`: processes are replaced while it serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from pdd_runtime.cli.console import OK, Consoles, raise_first
from pdd_runtime.cli.find import find
from pdd_runtime.errors import LaunchError, PddError
from pdd_runtime.graph import LoadedGraph
from pdd_runtime.launch import Apply, Change, GraphState, Manner, Part, Restart, Wanted, change, plan

_SIGN = {"add": ("+", "green"), "replace": ("~", "yellow"), "remove": ("-", "red")}


def runs(loaded: LoadedGraph, part: Part) -> bool:
    """Whether that graph, or that part of it, is up already."""
    return GraphState(part.name(loaded.graph)).running() is not None


def planned(loaded: LoadedGraph, part: Part) -> tuple[Change, ...]:
    """What makes the graph that runs the one in the file. Raises `LaunchError` where that cannot be done, and
    `NotRunningError`."""
    state = GraphState(part.name(loaded.graph))
    launcher = state.running()
    if launcher is not None and part.secret not in ("", launcher.secret):
        raise LaunchError(
            f"graph {state.name} runs with another secret",
            why="its processes know each other by it, in all clusters",
            fix=f"give the one that it was started with, or end it in every cluster, here with "
            f"`pdd-runtime down {state.name}`",
        )
    made = asyncio.run(plan(state, _wanted(loaded)))
    raise_first([PddError.from_wire(refused) for refused in made.refused], Consoles())
    return made.changes


async def apply(
    loaded: LoadedGraph, part: Part, manner: Manner, *, wait: bool, consoles: Consoles, console: Console
) -> None:
    """Make the changes, and return when they are made, or, without `wait`, when the first is begun; the steps are told
    on `console`. Raises `LaunchError` where one cannot be made."""
    steps = change(GraphState(part.name(loaded.graph)), Apply(_wanted(loaded), manner))
    await _follow(steps, wait, consoles, console)


def tell(changes: Sequence[Change], console: Console) -> None:
    """A line for each, as in a diff, and why."""
    for one in changes:
        sign, style = _SIGN[one.kind]
        why = f"  {'; '.join(one.why)}" if one.why else ""
        console.print(Text.assemble((f"{sign} {one.slot}", style), (why, "dim")), soft_wrap=True)


def as_json(changes: Sequence[Change]) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(one) for one in changes]


def restart(graph: str | None, process: str | None, manner: Manner, json: bool, consoles: Consoles) -> int:
    """`pdd-runtime restart`. Returns the exit code."""
    state = find(graph)
    pool, index = _process(process)
    steps = change(state, Restart(pool, index, manner))
    made = asyncio.run(_follow(steps, True, consoles, consoles.err if json else consoles.out))
    if json:
        consoles.json({"name": state.name, "steps": made})
    return OK


def _process(name: str | None) -> tuple[str, int | None]:
    """`main/1`, `main`, or None for all."""
    pool, slash, index = (name or "").partition("/")
    if slash and not index.isdecimal():
        raise LaunchError(f'"{name}" is no process', fix="name a pool, or POOL/INDEX as `pdd-runtime ps` shows it")
    return pool, int(index) if slash else None


async def _follow(steps: AsyncGenerator[str, None], wait: bool, consoles: Consoles, console: Console) -> list[str]:
    """Tell each step on `console`; all are returned. Ctrl-C leaves them to the launcher."""
    made: list[str] = []
    try:
        async with aclosing(steps):
            async for step in steps:
                made.append(step)
                if not wait:
                    break
                console.print(Text(step), soft_wrap=True)
    except asyncio.CancelledError:
        consoles.err.print("the launcher goes on with it; `pdd-runtime ps` shows how far it is", style="yellow")
        raise
    return made


def _wanted(loaded: LoadedGraph) -> Wanted:
    return Wanted(loaded.graph.model_dump(mode="json", by_alias=True), str(loaded.path))
