from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdd_runtime.errors import DeadlineExceeded
from pdd_runtime.pipeline.legs import Leg
from pdd_runtime.pipeline.peers import Peer
from pdd_runtime.rpc import Greeting, RpcContext, RpcServer, connect
from tests.waiting import PATIENCE

GREETING = Greeting(graph="legs", secret="s", cluster="", name="legs")


async def test_each_event_has_its_own_patience_and_a_silent_worker_is_cancelled() -> None:
    ended = asyncio.Event()

    async def talk(pauses: tuple[float, ...], context: RpcContext) -> AsyncGenerator[float, None]:
        try:
            for pause in pauses:
                await asyncio.sleep(pause)
                yield pause
        finally:
            ended.set()

    server = RpcServer(GREETING)
    server.stream("talk", tuple[float, ...], talk)
    connection = await connect(await server.start("127.0.0.1"), GREETING)
    peer = cast(Peer, SimpleNamespace(member=None))
    pauses = (*[0.2] * 10, 3600.0)
    leg: Leg[Any] = Leg(peer, "talking", connection.stream("talk", pauses, float, timeout=None), 60.0)
    heard = []

    async def listen() -> None:
        async for event in leg:
            heard.append(event)
            # Longer than any pause but the last, shorter than all of them; and less than it was for the first.
            leg.patience = 1.5

    try:
        with pytest.raises(DeadlineExceeded, match=r"talking said nothing for 1\.5 s"):
            await listen()
        assert len(heard) == 10
        async with asyncio.timeout(PATIENCE):
            await ended.wait()
    finally:
        await leg.close()
        await connection.close()
        await server.close()
