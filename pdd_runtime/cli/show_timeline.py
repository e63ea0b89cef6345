"""`pdd-runtime timeline`."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import quote

from pdd_runtime.cli.ask import fetch_timeline
from pdd_runtime.cli.console import Consoles
from pdd_runtime.cli.find import find
from pdd_runtime.cli.front import front_of
from pdd_runtime.cli.timeline import axis_width, draw
from pdd_runtime.launch import GraphState


def show_timeline(request: str, graph: str | None, as_json: bool, consoles: Consoles) -> None:
    body = asyncio.run(_fetch(find(graph), request))
    if as_json:
        consoles.json(body)
    else:
        consoles.out.print(draw(body, axis_width(consoles.out.width)))


async def _fetch(state: GraphState, request: str) -> dict[str, Any]:
    async with (await front_of(state)).client(admin=True) as http:
        return await fetch_timeline(http, quote(request, safe=""))
