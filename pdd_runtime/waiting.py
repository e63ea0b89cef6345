"""Waiting for what must not be left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def over(task: asyncio.Future[Any], on_cancel: Callable[[], object] = lambda: None) -> None:
    """Return when `task` has ended, in whatever way. Who is cancelled meanwhile waits for it all the same, after
    calling `on_cancel`, and is cancelled then."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
            on_cancel()
    if cancelled is not None:
        raise cancelled


async def to_its_end(task: asyncio.Future[T], on_cancel: Callable[[], object] = lambda: None) -> T:
    """What `task` comes to, awaited as `over` does."""
    try:
        await over(task, on_cancel)
    except asyncio.CancelledError:
        if not task.cancelled():
            task.exception()  # Asked for: it is no forgotten error.
        raise
    return task.result()
