"""The processes of a graph may come in every order: each order ends ready, and no readiness is a lie."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.frontend.test_process import GRAPH, WORKERS, Fleet
from tests.waiting import PATIENCE

ALL = ("frontend", *WORKERS)
FIRST = [("frontend", "main", "relay", "prefill")]
BETWEEN = [("main", "frontend", "prefill", "relay"), ("relay", "prefill", "frontend", "main")]
LAST = [("prefill", "main", "relay", "frontend")]


class Client:
    """Asks all the while, and holds what it is told against what is there."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.answered = self.refused = 0

    async def ask(self, http: httpx.AsyncClient) -> None:
        ready = (await http.get("/ready")).is_success
        there = {member.key.pool for member in self.fleet._registry.members() if member.state == "ready"}
        if ready:
            assert there >= set(WORKERS), "it called itself ready without a whole route"
        body = {"model": "toy", "prompt": "hello", "max_tokens": 20, "temperature": 0}
        answer = await http.post("/v1/completions", json=body)
        if answer.is_success:
            assert len(answer.json()["choices"][0]["text"]) == 20
            self.answered += 1
        else:
            assert not ready, f"it called itself ready, and answered {answer.status_code}: {answer.text}"
            assert answer.status_code == 503, answer.text
            self.refused += 1

    async def until_answered(self) -> None:
        async with (
            asyncio.timeout(2 * PATIENCE),
            httpx.AsyncClient(base_url=self.fleet.url, timeout=PATIENCE, trust_env=False) as http,
        ):
            while self.answered < 3:
                await self.ask(http)
                await asyncio.sleep(0.02)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """The registry; no process yet."""
    fleet = Fleet(tmp_path, graph=GRAPH)
    await fleet.start()
    yield fleet
    await fleet.close()


@pytest.mark.parametrize("order", [*FIRST, *BETWEEN, *LAST], ids="-".join)
async def test_one_after_the_other_they_end_ready(fleet: Fleet, order: tuple[str, ...]) -> None:
    asking: asyncio.Task[None] | None = None
    client = Client(fleet)
    for name in order:
        await fleet.spawn(name)
        await fleet.member(name)
        if name == "frontend":
            asking = asyncio.create_task(client.until_answered())
    assert asking is not None
    await asking
    assert client.refused or order in LAST, "somebody asked before there was a route"


async def test_all_at_once_they_end_ready_too(fleet: Fleet) -> None:
    await asyncio.gather(*map(fleet.spawn, ALL))
    await fleet.member("frontend")
    await Client(fleet).until_answered()
