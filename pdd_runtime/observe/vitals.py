"""What a process holds of its host: what grows where something leaks."""

from __future__ import annotations

import asyncio
import resource
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec

from pdd_runtime.plugins.messages import Empty
from pdd_runtime.rpc import RpcContext, RpcServer


class Vitals(msgspec.Struct, frozen=True):
    """Of one process, now."""

    tasks: int
    """Of its event loop."""
    files: int
    """Open ones, sockets among them."""
    threads: int
    """Python's own."""
    memory: int
    """Resident bytes; where the kernel does not tell, the most that there ever were."""


def vitals() -> Vitals:
    """Of this process. On its event loop."""
    return Vitals(
        len(asyncio.all_tasks()), sum(1 for _ in Path("/dev/fd").iterdir()), threading.active_count(), _resident()
    )


def serve_vitals(server: RpcServer) -> None:
    """Let those who have the graph's secret ask for them: `process.vitals`."""

    async def answer(params: Empty, context: RpcContext) -> Vitals:
        return vitals()

    server.unary("process.vitals", Empty, answer)


def _resident() -> int:
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    # macOS counts it in bytes, others in kilobytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
