"""The PDD graph as its users meet it: the command line, HTTP, and the `openai` client."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from pdd_llamacpp.testing import build_tiny_gguf

from tests.integration.stack import Stack
from tests.waiting import PATIENCE, until

BLOCK = 16
SLOW = "spec.links.wan.bandwidth=4Mbit/s"
"""So that 3,000 of the tiny model's tokens take a second and a half, and the relay has its time."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("state")
    tiny = build_tiny_gguf(state / "tiny.gguf", seed=7, context=16384)
    with Stack("quickstart", state, f"spec.model.source={tiny}", "spec.links.wan.rtt=10ms", SLOW) as stack:
        yield stack


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def at_rest(stack: Stack, within: float = PATIENCE) -> None:
    """Return when no worker holds anything, and the frontend counts no session."""
    await stack.idle(within)
    async with httpx.AsyncClient(timeout=PATIENCE) as client, asyncio.timeout(PATIENCE):
        while "pdd_sessions 0.0" not in (await client.get(f"{stack.url}/metrics")).text:  # noqa: ASYNC110 - elsewhere
            await asyncio.sleep(0.05)


async def completion(stack: Stack, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """One request, not streamed; returns its timeline when main has settled as well."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    async with httpx.AsyncClient(timeout=60) as client:
        response = (await client.post(f"{stack.url}/v1/completions", json=body)).raise_for_status()
    await at_rest(stack)
    return stack.timeline(response)


def kv(timeline: dict[str, Any], edge: str) -> dict[str, Any]:
    return next(row for row in timeline["kv"] if row["edge"] == edge)


async def test_sixteen_streams_at_once_through_the_openai_client(stack: Stack, client: AsyncOpenAI) -> None:
    async def ask(i: int) -> tuple[str, str]:
        question = [{"role": "user", "content": f"Question {i}: " + "why? " * i}]
        whole = await client.chat.completions.create(
            model="tiny", messages=question, max_tokens=40, temperature=0.8, seed=i
        )
        text, reason = "", None
        stream = await client.chat.completions.create(
            model="tiny", messages=question, max_tokens=40, temperature=0.8, seed=i, stream=True
        )
        async for chunk in stream:
            if chunk.choices:
                text += chunk.choices[0].delta.content or ""
                reason = chunk.choices[0].finish_reason or reason
        assert reason in ("length", "stop")
        return text, whole.choices[0].message.content or ""

    answers = await asyncio.gather(*(ask(i) for i in range(16)))
    assert all(text for text, _ in answers)
    await at_rest(stack)


async def test_a_second_turn_sends_only_its_suffix_over_the_wan(stack: Stack) -> None:
    rng = random.Random("second turn")
    first = [rng.randrange(32, 127) for _ in range(400)]
    cold = await completion(stack, first, 20)
    assert cold["route"] == "P-RLD-MD"
    assert cold["cached"] == {"prefill": 0, "main": 0}
    assert kv(cold, "prefill->main")["blocks_sent"] == 400 // BLOCK
    second = first + [rng.randrange(32, 127) for _ in range(160)]
    warm = await completion(stack, second, 20)
    wan = kv(warm, "prefill->main")
    block_bytes = kv(cold, "prefill->main")["bytes"] // kv(cold, "prefill->main")["blocks_sent"]
    assert wan["blocks_sent"] == 160 // BLOCK
    assert wan["bytes"] == 160 // BLOCK * block_bytes
    assert wan["blocks_cached"] == 400 // BLOCK
    assert warm["cached"] == {"prefill": 400, "main": 400}
    # All but everything is there now: the relay has nothing to hide, and the timeline says why.
    third = await completion(stack, [*second, 65, 66, 67], 20)
    assert third["route"] == "P-MD"
    assert "99%" in third["reason"]


async def test_two_hundred_mixed_requests_a_third_of_them_cancelled_leave_nothing(stack: Stack) -> None:
    rng = random.Random("two hundred")
    url, limit = stack.url, asyncio.Semaphore(24)
    shared = [rng.randrange(32, 127) for _ in range(300)]

    async def one(client: httpx.AsyncClient, i: int) -> str:
        prompt = shared[: rng.randrange(0, 300)] if i % 4 == 0 else []
        prompt = prompt + [rng.randrange(32, 127) for _ in range(rng.randrange(1, 300))]
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": rng.choice((1, 2, 17, 60, 120)),
            "temperature": rng.choice((0, 0.8)),
            "stream": i % 2 == 0,
        }
        patience = rng.choice((0.0, 0.01, 0.05, 0.1, 0.2, 0.4)) if i % 3 == 0 else None
        async with limit:
            try:
                async with asyncio.timeout(patience):
                    response = await client.post(f"{url}/v1/completions", json=body)
                    response.raise_for_status()
                    return "error" if '"error"' in response.text else "done"
            except TimeoutError:
                return "cancelled"

    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_keepalive_connections=0)) as client:
        ends = await asyncio.gather(*(one(client, i) for i in range(200)))
    assert ends.count("error") == 0
    assert ends.count("cancelled") >= 40
    # Answers that were complete before their KV had crossed are settled one after another, at the line's speed.
    await at_rest(stack, 3 * PATIENCE)


@pytest.mark.parametrize("role", ["prefill", "relay", "main"])
async def test_a_killed_worker_is_replaced_its_sessions_go_on_and_the_others_live_on(stack: Stack, role: str) -> None:
    before = {row["pool"]: row for row in stack.ps()}
    assert len({row["pid"] for row in before.values()}) == 4
    rng = random.Random(role)
    body = {
        "model": "tiny",
        "prompt": [rng.randrange(32, 127) for _ in range(12_000 if role == "prefill" else 500)],
        "max_tokens": 1_000,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with httpx.AsyncClient(timeout=60) as client:
        # The relay is needed as long as main cannot take over.
        with paused(before["main"]["pid"]) if role == "relay" else nullcontext():
            asked = asyncio.create_task(client.post(f"{stack.url}/v1/completions", json=body))
            while not (newest := await busy_with(client, stack, f"{role} starts")):
                assert not asked.done(), asked.result().text
                await asyncio.sleep(0.01)
            os.kill(before[role]["pid"], signal.SIGKILL)
        response = await asked
    assert "[DONE]" in response.text
    assert response.headers["x-pdd-request-id"] == newest
    timeline = stack.timeline(response)
    assert (timeline["error"], sum(timeline["tokens"].values())) == (None, body["max_tokens"])
    assert (role, "worker-lost") in {(lost["role"], lost["reason"]) for lost in timeline["recoveries"]}

    def restarted() -> bool:
        rows = {row["pool"]: row for row in stack.ps()}
        return rows[role]["state"] == "ready" and rows[role]["epoch"] != before[role]["epoch"]

    await until(restarted, 2 * PATIENCE)
    after = {row["pool"]: row for row in stack.ps()}
    assert all(after[pool]["pid"] == before[pool]["pid"] for pool in before if pool != role)
    await until(lambda: httpx.get(f"{stack.url}/ready", timeout=PATIENCE).status_code == 200)
    assert (await completion(stack, [65, 66, 67], 5))["finish_reason"] in ("length", "stop")


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Meanwhile the process does nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def busy_with(client: httpx.AsyncClient, stack: Stack, what: str) -> str:
    """The id of the newest request, once `what` stands on its timeline and it is not over."""
    recent = (await client.get(f"{stack.url}/pdd/requests")).json()["requests"]
    newest = str(recent[0]["id"]) if recent else ""
    # One that has only just come has no timeline yet.
    found = await client.get(f"{stack.url}/pdd/requests/{newest}")
    timeline = found.json() if found.is_success else {"events": [], "finish_reason": None, "error": None}
    begun = any(event["what"].startswith(what) for event in timeline["events"])
    return newest if begun and not timeline["finish_reason"] and not timeline["error"] else ""
