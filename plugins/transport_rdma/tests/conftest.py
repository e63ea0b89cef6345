from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

# What a test runs in a process of its own is also imported by it.
sys.path.insert(0, str(Path(__file__).parent))

from pdd_rdma.config import RdmaConfig
from pdd_rdma.transport import RdmaTransport

from pdd_runtime.kv import BlockStore
from pdd_runtime.testing.kv_parties import Context

Party = Callable[..., RdmaTransport]


@pytest.fixture(autouse=True)
def linux() -> None:
    if sys.platform != "linux":
        pytest.skip("NIXL is made for Linux alone")


@pytest.fixture
async def party() -> AsyncIterator[Party]:
    """Makes transports, closes them at the end, and holds that they leave no thread."""
    await asyncio.to_thread(lambda: None)
    async with AsyncExitStack() as stack:

        def make(cluster: str, store: BlockStore | None = None, **config: object) -> RdmaTransport:
            context = Context(cluster, memory=store.buffer() if store is not None else None)
            transport = RdmaTransport(RdmaConfig.model_validate({"tls": "all", "checksums": True, **config}), context)
            stack.push_async_callback(transport.close)
            return transport

        yield make
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("pdd-rdma")]
    assert left == []
