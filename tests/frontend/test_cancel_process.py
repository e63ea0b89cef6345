"""Wherever a request is, what ends it early ends it everywhere: real processes, and no worker keeps anything of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.frontend.test_process import WORKERS, Fleet, ask
from tests.waiting import PATIENCE

pytestmark = pytest.mark.asyncio(loop_scope="module")

OVERRIDES = (
    "spec.links.wan.bandwidth=2Mbit/s",
    *(f"spec.pools.{pool}.engine.config={{token_time: 0.004, token_bytes: 2048, batch_limit: 2}}" for pool in WORKERS),
    "spec.pools.prefill.engine.config.prefill_rate=500",
    "spec.pools.main.engine.config.prefill_rate=20",
    "spec.handoff={plugin: one-shot}",
)
"""A prompt takes its time to be computed, to cross the link, and its handoff does, too."""
STATES: dict[str, tuple[int, str, str]] = {
    # Tokens of the prompt; the event with which the state begins, and one that it must not have come to.
    "prefilling": (6000, "prefill starts", "first token"),
    "transferring and relaying": (900, "relay starts", "seal"),
    "draining": (60, "seal", "commit"),
    "main": (60, "commit", "main stops"),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), *OVERRIDES)
    try:
        await fleet.start("frontend", *WORKERS)
        await fleet.until_ready()
        yield fleet
    finally:
        await fleet.close()


async def begun(fleet: Fleet, sessions: int, event: str) -> str:
    """The id of the last request, when so many sessions run and its first one has come so far."""
    async with asyncio.timeout(PATIENCE), httpx.AsyncClient(base_url=fleet.url, timeout=PATIENCE) as client:
        while True:
            listed = (await client.get("/pdd/requests")).json()["requests"]
            ids = [line["id"] for line in listed if line["status"] is None]
            if len(ids) == sessions:
                first = min((id for id in ids if id.startswith(ids[0][:20])), key=len)
                timeline = (await client.get(f"/pdd/requests/{first}")).json()
                if not event or any(one["what"].startswith(event) for one in timeline.get("events", ())):
                    return str(first)
            await asyncio.sleep(0.01)


async def ended(fleet: Fleet, id: str, never: str) -> dict[str, Any]:
    """Its timeline, once no worker and no frontend has anything of it any more."""
    await fleet.until_idle()
    timeline: dict[str, Any] = (await fleet.get(f"/pdd/requests/{id}")).json()
    assert not any(event["what"].startswith(never) for event in timeline["events"])
    return timeline


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("how", ["client", "operator"])
async def test_it_ends_everywhere(fleet: Fleet, state: str, how: str) -> None:
    prompt, first, never = STATES[state]
    # No other prompt has its first block, so nothing of it is cached.
    text = f"{state} {how} ".ljust(prompt, "x")[:prompt]
    choices = 2 if how == "operator" else 1
    body = {"prompt": text, "max_tokens": 2000, "n": choices, "stream": state != "draining"}
    reader, writer = await ask(fleet.url, body)
    id = await begun(fleet, choices, first)
    if how == "client":
        writer.transport.abort()
        why = "cancelled: the client went away before the answer was complete"
    else:
        async with httpx.AsyncClient(base_url=fleet.url, timeout=PATIENCE) as client:
            assert (await client.delete(f"/pdd/requests/{id}")).status_code == 200
        why = "cancelled: the request was cancelled by an operator"
        assert b"[DONE]" not in await said(reader, b"cancelled_by_operator")
        writer.close()
    timeline = await ended(fleet, id, never)
    assert timeline["error"] == why
    assert sum(timeline["tokens"].values()) < 2000


async def test_at_its_deadline_it_ends_everywhere(fleet: Fleet) -> None:
    text = "deadline ".ljust(900)
    reader, writer = await ask(fleet.url, {"prompt": text, "max_tokens": 2000, "stream": True, "timeout": 3})
    answer = await said(reader, b'"code":"deadline"')
    writer.close()
    (id,) = (line[17:].strip() for line in answer.splitlines() if line.startswith(b"x-pdd-request-id:"))
    timeline = await ended(fleet, id.decode(), "commit")
    assert timeline["error"] == "cancelled: the answer was not complete within its deadline of 3 s"


async def test_one_that_waits_its_turn_leaves_without_having_had_it(fleet: Fleet) -> None:
    body = {"max_tokens": 2000, "stream": True}
    _, ahead = await ask(fleet.url, body | {"prompt": "ahead ".ljust(3000)})
    await begun(fleet, 1, "prefill starts")
    _, writer = await ask(fleet.url, body | {"prompt": "waits ".ljust(3000)})
    # There is no room for its KV on the link.
    waits = await begun(fleet, 2, "queued")
    writer.transport.abort()
    await begun(fleet, 1, "")
    ahead.transport.abort()
    timeline = await ended(fleet, waits, "admitted")
    assert timeline["error"] == "cancelled: the client went away before the answer was complete"


async def said(reader: asyncio.StreamReader, what: bytes) -> bytes:
    """All that comes, up to this."""
    answer = b""
    async with asyncio.timeout(PATIENCE):
        while what not in answer:
            more = await reader.read(2**20)
            assert more, answer
            answer += more
    return answer
