"""Waiting for what must not be left alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


def watched(task: asyncio.Task[T], lost: str) -> asyncio.Task[T]:
    """`task`, which runs beside others until it is cancelled: should it fail, nobody waits for it, so the log says at
    once why, and what is `lost` by it."""

    def say(task: asyncio.Task[T]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s", lost, exc_info=error)

    task.add_done_callback(say)
    return task


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
