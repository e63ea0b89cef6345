"""`pdd-runtime cancel`."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

from pdd_runtime.cli.ask import delete
from pdd_runtime.cli.console import Consoles
from pdd_runtime.cli.find import find
from pdd_runtime.cli.front import front_of
from pdd_runtime.launch import GraphState


def cancel(request: str, graph: str | None, as_json: bool, consoles: Consoles) -> None:
    """Raises `RequestError` where no such request is running."""
    asyncio.run(_cancel(find(graph), request))
    if as_json:
        consoles.json({"id": request, "cancelled": True})
    else:
        consoles.out.print(f"{request} is cancelled; its client is told", markup=False)


async def _cancel(state: GraphState, request: str) -> None:
    async with (await front_of(state)).client(admin=True) as http:
        await delete(http, f"/pdd/requests/{quote(request, safe='')}")
