"""A worker that holds a server until it is killed: `python killed_worker.py DIRECTORY ARGUMENT…`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from pdd_runtime.server.launch import Launch
from pdd_runtime.server.process import ServerProcess


async def main() -> None:
    process = ServerProcess("stock", Path(sys.argv[1]))
    await process.start(Launch(tuple(sys.argv[2:])))
    await asyncio.Event().wait()


asyncio.run(main())
