"""Whether a graph answers requests, asked as a load balancer would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import httpx

from pdd_runtime.graph import Graph
from pdd_runtime.launch.trust import trusted

READY_EVERY = 0.25
HEALTHY_EVERY = 2.0
"""Seconds from answer to answer, until it is ready and after that."""


async def reasons(graph: Graph, url: Callable[[], str]) -> AsyncGenerator[str, None]:
    """Why the frontend at that URL (empty: there is none yet) does not answer requests, again and again; empty: it
    does. Raises `GraphError` where its certificate cannot be read."""
    # Each time over a new connection: an old one ends with the process behind it, and others share its port.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=5.0, trust_env=False, limits=limits, verify=trusted(graph)) as client:
        while True:
            why = await _why_not_ready(client, url())
            yield why
            await asyncio.sleep(READY_EVERY if why else HEALTHY_EVERY)


async def _why_not_ready(client: httpx.AsyncClient, url: str) -> str:
    if not url:
        return "the frontend is not there yet"
    try:
        answer = await client.get(f"{url}/ready")
    except httpx.HTTPError as error:
        return f"the frontend does not answer: {error}"
    return "" if answer.is_success else _reason(answer)


def _reason(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the frontend answers {answer.status_code}"
