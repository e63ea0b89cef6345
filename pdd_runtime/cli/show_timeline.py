"""`pdd-runtime timeline`."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

from pdd_runtime.cli.ask import client, fetch_timeline
from pdd_runtime.cli.console import Consoles
from pdd_runtime.cli.find import find
from pdd_runtime.cli.timeline import axis_width, draw
from pdd_runtime.errors import LaunchError
from pdd_runtime.launch import GraphState, ps


def show_timeline(request: str, graph: str | None, as_json: bool, consoles: Consoles) -> None:
    body = asyncio.run(_fetch(find(graph), request))
    if as_json:
        consoles.json(body)
    else:
        consoles.out.print(draw(body, axis_width(consoles.out.width)))


async def _fetch(state: GraphState, request: str) -> dict[str, Any]:
    status = await ps(state)
    if not status.url:
        raise LaunchError(f"the frontend of {state.name} is not up", why=status.why_not_ready)
    async with client(status.url) as http:
        return await fetch_timeline(http, quote(request, safe=""))
