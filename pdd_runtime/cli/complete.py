"""What the shell completes: names that exist. A fault here must never disturb a prompt, and nothing slow is imported
before it is needed: a TAB waits for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path

import typer

from pdd_runtime.errors import PddError

_FILES = (".yaml", ".yml")


def _quiet(complete: Callable[[typer.Context, str], list[str]]) -> Callable[[typer.Context, str], list[str]]:
    @wraps(complete)
    def guarded(ctx: typer.Context, incomplete: str) -> list[str]:
        with suppress(OSError, ValueError, PddError):
            return [name for name in complete(ctx, incomplete) if name.startswith(incomplete)]
        return []

    return guarded


@_quiet
def graph_files(ctx: typer.Context, incomplete: str) -> list[str]:
    """Graphs, and directories in which there may be some."""
    directory, slash, _ = incomplete.rpartition("/")
    here = Path(f"{directory}{slash}" or ".").expanduser()
    found = []
    for path in sorted(here.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            found.append(f"{directory}{slash}{path.name}/")
        elif path.suffix in _FILES:
            found.append(f"{directory}{slash}{path.name}")
    return found


@_quiet
def pools(ctx: typer.Context, incomplete: str) -> list[str]:
    """Pools of the graph whose file was given."""
    from pdd_runtime.graph import load

    return list(load(Path(ctx.params["graph"])).graph.spec.pools)


@_quiet
def clusters(ctx: typer.Context, incomplete: str) -> list[str]:
    """Clusters of the graph whose file was given."""
    from pdd_runtime.graph import load

    return list(load(Path(ctx.params["graph"])).graph.spec.clusters)


@_quiet
def graph_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Graphs that run, or whose launcher died."""
    return _names()


@_quiet
def names_and_files(ctx: typer.Context, incomplete: str) -> list[str]:
    """Both."""
    return [*_names(), *graph_files(ctx, incomplete)]


@_quiet
def logged_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Graphs that have logs."""
    return _names(stopped=True)


@_quiet
def processes(ctx: typer.Context, incomplete: str) -> list[str]:
    """Pools of the graph that the command is about, `POOL/INDEX` of those with several, `frontend` and `launcher`."""
    from pdd_runtime.launch import GraphState

    graph = ctx.params.get("graph")
    states = [GraphState(graph)] if isinstance(graph, str) else GraphState.all() or GraphState.all(stopped=True)
    names: list[str] = []
    for state in states:
        pools = json.loads(state.graph.read_bytes())["spec"]["pools"]
        for name, pool in pools.items():
            replicas = pool.get("replicas", 1)
            names += [name, *(f"{name}/{index}" for index in range(replicas) if replicas > 1)]
    return sorted({*names, "frontend", "launcher"})


@_quiet
def distributions(ctx: typer.Context, incomplete: str) -> list[str]:
    """Those that bring plugins."""
    from importlib.metadata import entry_points

    from pdd_runtime.plugins.manager import GROUP

    return sorted({point.dist.name for point in entry_points(group=GROUP) if point.dist})


def _names(*, stopped: bool = False) -> list[str]:
    from pdd_runtime.launch import GraphState

    return [state.name for state in GraphState.all(stopped=stopped)]
