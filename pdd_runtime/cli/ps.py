"""`pdd-runtime ps`."""

from __future__ import annotations

import asyncio

from rich.table import Table
from rich.text import Text

from pdd_runtime.cli.console import Consoles, plain
from pdd_runtime.cli.find import find
from pdd_runtime.cli.live import STATE_STYLE
from pdd_runtime.cli.picture import ROLE_STYLE
from pdd_runtime.launch import GraphState, GraphStatus
from pdd_runtime.launch import ps as status_of

KEYS = ("pool", "index", "role", "cluster", "pid", "epoch", "state", "endpoint")
"""Of each process in `--format json`, in this order; they are part of the API."""


def ps(name: str | None, as_json: bool, consoles: Consoles) -> None:
    if as_json:
        status = asyncio.run(status_of(find(name)))
        consoles.json([{key: getattr(process, key) for key in KEYS} for process in status.processes])
        return
    running = [state for state in GraphState.all() if state.running()] if name is None else []
    for state in running or [find(name)]:
        _print(asyncio.run(status_of(state)), consoles)


def _print(status: GraphStatus, consoles: Consoles) -> None:
    head = Text.assemble((status.name, "bold"), f"  {status.url or 'no URL yet'}  ")
    if status.stopping:
        head.append("stopping", "yellow")
    else:
        head.append(*(("ready", "green") if status.ready else (f"not ready: {status.why_not_ready}", "yellow")))
    consoles.out.print(head)
    if status.admin:
        consoles.out.print(f"operators are answered at {status.admin}", style="dim", markup=False)
    if status.changing:
        consoles.out.print(f"being changed: {plain(status.changing)}", style="yellow", markup=False, soft_wrap=True)
    for words in filter(None, (status.failed, status.trouble)):
        consoles.out.print(plain(words), style="yellow", markup=False, soft_wrap=True)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("POOL", "ROLE", "CLUSTER", "PID", "STATE", "RESTARTS", "ENDPOINT", "NOTE"):
        table.add_column(column, no_wrap=column != "NOTE")
    for process in status.processes:
        table.add_row(
            Text(f"{process.pool}/{process.index}", ROLE_STYLE[process.role]),
            process.role,
            process.cluster,
            str(process.pid or "–"),
            Text(process.state, STATE_STYLE[process.state]),
            str(process.restarts),
            process.endpoint or "–",
            Text(plain(process.note) if process.state == "backoff" else ""),
        )
    consoles.out.print(table)
