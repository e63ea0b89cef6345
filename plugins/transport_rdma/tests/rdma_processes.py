"""Starts `rdma_peer.py`."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def peer(*arguments: object) -> AsyncIterator[tuple[Process, str]]:
    """A process and its first line; it is gone afterwards."""
    script = str(Path(__file__).parent / "rdma_peer.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, *map(str, arguments), stdin=PIPE, stdout=PIPE
    )
    try:
        yield process, await line(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line(process: Process) -> str:
    """The next one of our own: UCX writes there, too."""
    assert process.stdout is not None
    while text := (await process.stdout.readline()).decode():
        if "UCX" not in text and "NIXL" not in text:
            return text.strip()
    raise AssertionError(f"the process ended with {await process.wait()}")
