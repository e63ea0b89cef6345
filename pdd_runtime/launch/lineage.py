"""What a graph was before it was changed, and that its processes find those of other launchers."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

from pdd_runtime.discovery.mark import mark_of
from pdd_runtime.graph import Graph
from pdd_runtime.plugins.discovery import Discovery

MARKS = 64
"""Digests that are remembered."""
MEET = 3.0
"""Seconds for discovery's servers to answer before processes are started all the same."""


def grown(marks: tuple[str, ...], graph: Graph) -> tuple[str, ...]:
    """With the digest of `graph` as the last."""
    digest = mark_of(graph).digest
    return (*(mark for mark in marks if mark != digest), digest)[-MARKS:]


async def meet(discovery: Discovery) -> None:
    """Ask once who is there, so that what keeps this launcher from ever finding the others is told before it starts
    anything. Servers that are only away are no hindrance."""
    async with aclosing(discovery.watch()) as views:
        with suppress(TimeoutError):
            async with asyncio.timeout(MEET):
                await anext(views)
