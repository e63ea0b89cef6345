"""From a process that was started to a server that makes tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from pdd_runtime.errors import EngineError
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.process import ServerProcess

_EVERY = 0.2
"""Seconds between two looks."""


async def wait_ready(
    http: HttpClient,
    process: ServerProcess | None,
    health: str,
    probe: Callable[[], Awaitable[object]],
    timeout: float,
) -> None:
    """Return when the server says at the path `health` that it is well, and then `probe`, which has it make a token,
    has returned: many say so before they can.

    `process` is None for a server that others started. Raises `EngineError` at once when the process ends, with what
    it said last, or the probe fails, and after `timeout` seconds, with the last trouble.
    """
    waiting = asyncio.create_task(_Wait(http, process).until_probed(health, probe, timeout), name=f"wait {http.url}")
    watched: list[asyncio.Future[Any]] = [waiting] if process is None else [waiting, process.ended]
    try:
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        if process is not None and process.ended.done():
            raise process.ended.result()
        await waiting
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])


class _Wait:
    def __init__(self, http: HttpClient, process: ServerProcess | None) -> None:
        self._http, self._process = http, process
        self._trouble = "it has not answered yet"

    async def until_probed(self, health: str, probe: Callable[[], Awaitable[object]], timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._healthy(health)
                self._trouble = "it says that it is well, but has made no token"
                await probe()
        except TimeoutError as error:
            raise self._late(timeout) from error

    async def _healthy(self, path: str) -> None:
        while True:
            try:
                await self._http.get_text(path)
            except EngineError as error:
                self._trouble = error.why or error.what
                await asyncio.sleep(_EVERY)
            else:
                return

    def _late(self, timeout: float) -> EngineError:
        said = self._process.last_lines[-1:] if self._process is not None else ()
        return EngineError(
            f"the server is not ready after {timeout:g} s",
            where=self._http.url,
            why=" — ".join((self._trouble, *(f"it said last: {line}" for line in said))),
            fix="its log is the worker's: `pdd-runtime logs`; start_timeout gives it more time",
        )
