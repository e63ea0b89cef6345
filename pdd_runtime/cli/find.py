"""Which graph a command means."""

from __future__ import annotations

from pathlib import Path

from pdd_runtime.cli.console import SeveralGraphsError
from pdd_runtime.errors import LaunchError
from pdd_runtime.graph.document import read
from pdd_runtime.launch import GraphState, NotRunningError


def find(name: str | None, *, running: bool = True) -> GraphState:
    """The graph of that name or file; without one, the only one that runs (or, with `running` false, else the only
    one that ever ran). Raises `NotRunningError` and `SeveralGraphsError`."""
    if name is not None:
        return _part(GraphState(_name_in(Path(name)) if is_file(name) else name), running=running)
    known = GraphState.all()
    states = [state for state in known if state.running()] or known
    if not states and not running:
        states = GraphState.all(stopped=True)
    if not states:
        raise NotRunningError("no graph is running", fix="start one with `pdd-runtime up GRAPH`")
    if len(states) > 1:
        names = ", ".join(state.name for state in states)
        raise SeveralGraphsError(f"several graphs are there: {names}", fix="name one of them")
    return states[0]


def _part(state: GraphState, *, running: bool) -> GraphState:
    """The graph itself, or the only part of it that is here."""
    if state.name != state.graph_name:
        return state
    parts = state.parts() or ([] if running else state.parts(stopped=True))
    here = [part for part in parts if part.running()] or parts
    if not here or state.running() or (not running and state.graph.exists() and not here[0].running()):
        return state
    if len(here) > 1:
        names = ", ".join(part.name for part in here)
        raise SeveralGraphsError(f"several parts of graph {state.name} are here: {names}", fix="name one of them")
    return here[0]


def is_file(name: str) -> bool:
    """It means a graph's file, not a running graph."""
    return name.endswith((".yaml", ".yml", ".json")) or "/" in name


def _name_in(path: Path) -> str:
    """The name in a graph's file, be the rest of it right or wrong: it may have been edited since it was started."""
    document = read(path)
    metadata = document.data.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str):
        raise LaunchError("the graph has no name", where=document.locate(("metadata",)), fix="name a running graph")
    return name
