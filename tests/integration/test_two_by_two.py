"""Two clusters that prefill and two that decode, behind two frontends: `two-by-two.yaml` with the scripted engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from pdd_runtime.clock import now
from tests.integration.stack import Stack
from tests.waiting import PATIENCE

POOLS = ("prefill-a1", "relay-a1", "prefill-a2", "relay-a2", "main-b1", "main-b2")
ENGINE = {"token_bytes": 2048, "capacity_blocks": 2048, "batch_limit": 8, "prefill_rate": 4000, "token_time": 0.02}
LINKS = ("a1-b1", "a1-b2", "a2-b1", "a2-b2")
OVERRIDES = (
    "spec.model.source=toy",
    "spec.routing.config.budget=50ms",
    *(f"spec.pools.{pool}.engine.config.{key}={value}" for pool in POOLS for key, value in ENGINE.items()),
    # As good as each other, so that load alone decides.
    *(f"spec.links.{link}.bandwidth=100Mbit/s" for link in LINKS),
    *(f"spec.links.{link}.rtt=40ms" for link in LINKS),
)


@dataclass
class Answer:
    text: str
    timeline: dict[str, Any]

    @property
    def way(self) -> tuple[str, str]:
        """The pools that made the prompt's KV and that ended the answer."""
        workers = [event["worker"].partition("/")[0] for event in self.timeline["events"]]
        prefill = next(worker for worker in workers if worker.startswith("prefill"))
        return prefill, next(worker for worker in reversed(workers) if worker.startswith("main"))


def prompt(topic: int) -> str:
    return f"{topic}: " + " ".join(f"word{topic * i % 97}" for i in range(80))


async def ask(stack: Stack, text: str, tokens: int = 30, begun: asyncio.Event | None = None) -> Answer:
    """Over a connection of its own, so that either frontend may get it."""
    body = {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    said, line = "", ""
    async with (
        httpx.AsyncClient(timeout=2 * PATIENCE) as client,
        client.stream("POST", f"{stack.url}/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                said += "".join(choice["text"] for choice in event["choices"])
                if begun is not None:
                    begun.set()
    assert "[DONE]" in line or said
    return Answer(said, await asyncio.to_thread(stack.timeline, answer))


async def together(stack: Stack, topics: range, tokens: int = 30) -> list[Answer]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(stack, prompt(topic), tokens)) for topic in topics]
    return [task.result() for task in tasks]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack("two-by-two", tmp_path_factory.mktemp("state"), *OVERRIDES, engine="scripted") as stack:
        yield stack


def alive(stack: Stack, cluster: str) -> dict[str, int]:
    """The pids of a cluster's workers that are ready, by pool."""
    return {
        row["pool"]: row["pid"]
        for row in stack.ps()
        if row["cluster"] == cluster and row["role"] != "frontend" and row["state"] == "ready"
    }


async def test_load_spreads_over_all_four_ways(stack: Stack) -> None:
    ways = Counter(answer.way for answer in await together(stack, range(32)))
    assert len(ways) == 4, ways
    for pool in ("prefill-a1", "prefill-a2", "main-b1", "main-b2"):
        assert sum(count for way, count in ways.items() if pool in way) >= 8, ways
    await stack.idle()


async def test_conversations_stay_where_their_prefix_is(stack: Stack) -> None:
    for topic in range(100, 103):
        text, first = prompt(topic), None
        for _ in range(3):
            answer = await ask(stack, text)
            first = first or answer.way
            assert answer.way == first, answer.timeline["reason"]
            text += answer.text + " And then?"
        assert answer.timeline["cached"]["main"] > 400
        assert "cost least" in answer.timeline["reason"]
    await stack.idle()


@pytest.mark.parametrize(("cluster", "topics"), [("b1", range(200, 212)), ("a2", range(300, 312))])
async def test_a_cluster_that_dies_whole_loses_no_token_and_is_used_again_when_it_is_back(
    stack: Stack, cluster: str, topics: range
) -> None:
    died = alive(stack, cluster)
    begun = [asyncio.Event() for _ in topics]
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(ask(stack, prompt(t), 90, e)) for t, e in zip(topics, begun, strict=True)]
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(event.wait() for event in begun))
        for pid in died.values():
            os.kill(pid, signal.SIGKILL)
        fresh = [group.create_task(ask(stack, prompt(topic + 1000))) for topic in topics]
    answers = [stream.result() for stream in streams]
    assert any(answer.timeline["recoveries"] for answer in answers), "nobody was there"
    assert all(len(each.result().text) == 30 for each in fresh)
    assert [answer.text for answer in answers] == [answer.text for answer in await together(stack, topics, 90)]
    end = now() + PATIENCE
    while (back := await asyncio.to_thread(alive, stack, cluster)).keys() != died.keys() or back == died:
        assert now() < end, f"{cluster} does not come back"
    ends, used = {pool for pool in died if not pool.startswith("relay")}, set()
    for batch in range(8):
        first = topics[0] + 10_000 + 16 * batch
        used |= {pool for answer in await together(stack, range(first, first + 16)) for pool in answer.way}
        if used >= ends:
            break
    assert used >= ends
    await stack.idle()
