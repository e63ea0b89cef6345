"""Waiting for what is about to happen, on whatever machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE = 100.0
"""Seconds for what must happen at once. A slow and busy machine has them; what never happens is known by them."""


async def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Return when it is true. Raises `TimeoutError`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - any condition, with no event of its own
            await asyncio.sleep(0.005)
