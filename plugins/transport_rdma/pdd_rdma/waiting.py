"""Waiting for what must not be left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(task: asyncio.Future[T], on_cancel: Callable[[], object] = lambda: None) -> T:
    """What `task` comes to. Who is cancelled meanwhile waits for it all the same, after calling `on_cancel`."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # Asked for: it is no forgotten error.
        raise cancelled
    return task.result()
