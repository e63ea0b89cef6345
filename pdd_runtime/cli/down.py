"""`pdd-runtime down`."""

from __future__ import annotations

import asyncio

from pdd_runtime.cli.console import Consoles
from pdd_runtime.cli.find import find
from pdd_runtime.cli.live import LiveStatus
from pdd_runtime.launch import down as stop


def down(name: str | None, timeout: float, as_json: bool, consoles: Consoles) -> None:
    state = find(name)
    with LiveStatus(consoles.err if as_json else consoles.out) as live:
        forced = asyncio.run(stop(state, timeout, live.show))
    if as_json:
        ended = [{"pool": process.pool, "index": process.index, "pid": process.pid} for process in forced]
        consoles.json({"name": state.name, "forced": ended})
        return
    for process in forced:
        consoles.err.print(f"{process.pool}/{process.index} (pid {process.pid}) had to be ended", style="yellow")
    consoles.out.print(f"graph {state.name} is down")
