from __future__ import annotations

import asyncio
import json
from typing import Any

from pdd_runtime.experiments.client import Client
from pdd_runtime.experiments.load import Load
from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.experiments.prompts import Prompts
from pdd_runtime.planner import read_workload
from tests.experiments.server import SSE, event, send, server


class Slow:
    """Answers with two tokens after a while, one request after the other or all at once."""

    def __init__(self, seconds: float, *, at_once: int) -> None:
        self.seconds, self.places = seconds, asyncio.Semaphore(at_once)
        self.asked: list[dict[str, Any]] = []
        self.running = self.most = 0

    async def __call__(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        self.asked.append(json.loads(body))
        self.running += 1
        self.most = max(self.most, self.running)
        async with self.places:
            await asyncio.sleep(self.seconds)
        self.running -= 1
        writer.write(SSE)
        await send(writer, event(901, 902) + b"data: [DONE]\n\n")
        await send(writer, b"")


async def drive(slow: Slow, spec: str, requests: int) -> list[Outcome]:
    workload = read_workload(spec)
    ended: list[Outcome] = []
    async with server(slow) as url, Client(url, 30, "") as client:
        load = Load(workload, Prompts(workload, 1), client, ended.append)
        await load.run(workload.sessions(requests, 1))
    assert ended == load.outcomes
    assert [outcome.error for outcome in ended] == [None] * requests
    return sorted(ended, key=lambda outcome: outcome.due)


async def test_open_loop_does_not_wait_for_answers_and_counts_what_waiting_costs() -> None:
    slow = Slow(0.05, at_once=1)
    outcomes = await drive(slow, "prompt=5,rate=100", 20)
    # 100 a second are asked of a server that does 20: the queue is the server's, and so is the time spent in it.
    assert slow.most > 5
    waits = [outcome.metric("e2e") or 0.0 for outcome in outcomes]
    assert waits[-1] > 5 * 0.05
    arrivals = read_workload("prompt=5,rate=100").sessions(20, 1)
    planned = [(session.start or 0) - (arrivals[0].start or 0) for session in arrivals]
    due = [outcome.due - outcomes[0].due for outcome in outcomes]
    assert all(abs(a - b) < 1e-6 for a, b in zip(planned, due, strict=True))


async def test_closed_loop_has_so_many_at_once_and_no_more() -> None:
    slow = Slow(0.02, at_once=100)
    await drive(slow, "prompt=5,concurrency=3", 12)
    assert slow.most == 3


async def test_a_turn_carries_what_was_really_answered_and_is_due_after_the_think_time() -> None:
    slow = Slow(0.0, at_once=1)
    first, second = await drive(slow, "prompt=10,output=2,turns=2,new=3,think=0.2", 2)
    prompts = [asked["prompt"] for asked in slow.asked]
    assert prompts[1][:12] == [*prompts[0], 901, 902]
    assert [len(prompt) for prompt in prompts] == [10, 15]
    assert second.due - first.ended >= 0.2 - 1e-6
    assert all(asked["max_tokens"] == 2 and asked["ignore_eos"] for asked in slow.asked)
