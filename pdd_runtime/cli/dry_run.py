"""`pdd-runtime up --dry-run`: what would be started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from pdd_runtime.cli import change, wording
from pdd_runtime.cli.console import Consoles
from pdd_runtime.cli.picture import ROLE_STYLE, picture
from pdd_runtime.graph import LoadedGraph
from pdd_runtime.launch import GraphState, Part


def dry_run(loaded: LoadedGraph, part: Part, as_json: bool, consoles: Consoles) -> None:
    graph, state = loaded.graph, GraphState(part.name(loaded.graph))
    processes = list(_processes(loaded, part))
    if as_json:
        consoles.json(
            {"name": state.name, "path": str(loaded.path), "state": str(state.directory), "processes": processes}
        )
        return
    consoles.out.print(picture(graph))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("PROCESS", "ROLE", "CLUSTER", "RUNS", "SETTINGS"):
        table.add_column(column, no_wrap=column != "SETTINGS")
    for process in processes:
        settings = ", ".join(f"{key}: {json.dumps(value)}" for key, value in process["config"].items())
        table.add_row(
            Text(f"{process['pool']}/{process['index']}", ROLE_STYLE[process["role"]]),
            *(process["role"], process["cluster"], process["runs"], settings),
        )
    consoles.out.print(table)
    consoles.out.print(f"state and logs: {state.directory}", style="dim", markup=False)
    consoles.out.print("This was a dry run: nothing was started.", style="green")


def dry_change(loaded: LoadedGraph, part: Part, as_json: bool, consoles: Consoles) -> None:
    """The same of a graph that runs: what would be changed."""
    state, changes = GraphState(part.name(loaded.graph)), change.planned(loaded, part)
    if as_json:
        consoles.json(
            {
                "name": state.name,
                "path": str(loaded.path),
                "state": str(state.directory),
                "changes": change.as_json(changes),
            }
        )
        return
    consoles.out.print(picture(loaded.graph))
    change.tell(changes, consoles.out)
    if not changes:
        consoles.out.print(f"graph {state.name} runs as {loaded.path} says", markup=False)
    consoles.out.print("This was a dry run: nothing was changed.", style="green")


def _processes(loaded: LoadedGraph, part: Part) -> Iterator[dict[str, Any]]:
    graph = loaded.graph
    for name, pool in graph.spec.pools.items():
        if not part.has(pool.cluster):
            continue
        for index in range(pool.replicas):
            runs = f"engine {pool.engine.plugin}, model {graph.model_of(name).source}"
            yield _process(name, index, pool.role, pool.cluster, runs, pool.engine.config)
    for index, cluster in enumerate(graph.frontends):
        if part.has(cluster):
            runs = f"OpenAI API on {wording.address(graph)}"
            yield _process("frontend", index, "frontend", cluster, runs, {})


def _process(pool: str, index: int, role: str, cluster: str, runs: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"pool": pool, "index": index, "role": role, "cluster": cluster, "runs": runs, "config": config}
