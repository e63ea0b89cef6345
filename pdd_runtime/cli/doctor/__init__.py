"""`pdd-runtime doctor`: what keeps graphs from running, or from running well."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table
from rich.text import Text

from pdd_runtime.cli.console import FAILED, OK, Consoles, plain
from pdd_runtime.cli.doctor.certificates import certificates
from pdd_runtime.cli.doctor.check import Check, Status
from pdd_runtime.cli.doctor.declared import declared
from pdd_runtime.cli.doctor.host import host
from pdd_runtime.cli.doctor.network import network
from pdd_runtime.cli.doctor.running import edges, processes
from pdd_runtime.cli.find import is_file
from pdd_runtime.cli.front import front_at
from pdd_runtime.graph import Graph, LoadedGraph, load
from pdd_runtime.launch import GraphState, not_running, ps
from pdd_runtime.plugins import PluginManager, load_plugins
from pdd_runtime.plugins.preflight import preflight

_MARKS: dict[Status, tuple[str, str]] = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "bold red")}


def doctor(name: str | None, overrides: Sequence[str], probe: bool, as_json: bool, consoles: Consoles) -> int:
    """Look at this host, at the graph called so or in that file, and at its processes where it runs. Returns the exit
    code: 1 when a check fails. Raises `GraphError`, and `NotRunningError` for the name of a graph that does not run."""
    with consoles.busy("looking at this host"):
        plugins = load_plugins()
        checks = list(host(plugins))
    loaded = load(name, overrides) if name is not None and is_file(name) else None
    state = GraphState(loaded.graph.name) if loaded else GraphState(name) if name else None
    running = state is not None and state.running() is not None
    if state and running:
        graph = Graph.model_validate_json(state.graph.read_bytes())
        checks += [*network(graph.spec.links), *certificates(graph)]
        with consoles.busy("asking the graph, and sending it a request"):
            checks += asyncio.run(_running(graph, state, probe))
    elif loaded:
        checks += [*network(loaded.graph.spec.links), *certificates(loaded.graph)]
        checks += _checked(loaded, plugins)
    elif state:
        raise not_running(state)
    else:
        checks += network({})
    failed = any(check.status == "fail" for check in checks)
    if as_json:
        graph_name = state.name if state else None
        consoles.json({"graph": graph_name, "ok": not failed, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks, consoles)
    return FAILED if failed else OK


def _checked(loaded: LoadedGraph, plugins: PluginManager) -> list[Check]:
    faults = preflight(loaded, plugins)
    if faults:
        return [Check("graph", fault.where, "fail", fault.what, fault.fix) for fault in faults]
    about = f"{Path(loaded.path).name} is right"
    return [Check("graph", "YAML", "ok", about), *declared(loaded, plugins)]


async def _running(graph: Graph, state: GraphState, probe: bool) -> list[Check]:
    status = await ps(state)
    checks = list(processes(status))
    if status.ready and probe:
        checks += await edges(graph, front_at(state, status))
    return checks


def _print(checks: Sequence[Check], consoles: Consoles) -> None:
    group = ""
    table = Table.grid(padding=(0, 1))
    for check in checks:
        if check.group != group:
            group = check.group
            table.add_row("", Text(group.upper(), "dim"), "")
        mark, style = _MARKS[check.status]
        found = Text(plain(check.found))
        if check.fix:
            found.append("\nfix: ", "green").append(plain(check.fix))
        table.add_row(Text(mark, style), Text(check.name), found)
    consoles.out.print(table)
    count = {status: sum(check.status == status for check in checks) for status in ("ok", "warn", "fail")}
    consoles.out.print(f"{count['ok']} ok, {count['warn']} to improve, {count['fail']} wrong", style="bold")
