"""A worker that drains finishes what it has begun, and gives what others still need of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.pipeline import test_native
from tests.pipeline.conftest import GRAPH
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

Prompt = Callable[[int], list[int]]
PDD = ("spec.routing={plugin: always-relay}", "spec.handoff={plugin: catch-up, config: {min_relay_tokens: 40}}")
KINDS = {"portable": (GRAPH, ()), "assisted": (test_native.GRAPH, test_native.ASSISTED)}


@pytest.mark.parametrize(
    ("kind", "pool"),
    [("portable", "main"), ("assisted", "prefill")],
)
async def test_a_drain_in_the_middle_of_answers_costs_none_of_them(
    new_fleet: Callable[..., Any], prompt: Prompt, kind: str, pool: str
) -> None:
    text, overrides = KINDS[kind]
    pools = ("prefill", "relay", "main", "all")
    slow = (f"spec.pools.{each}.engine.config.token_time=0.01" for each in ("relay", "main"))
    fleet = new_fleet(*overrides, *slow, f"spec.pools.{pool}.replicas=2", text=text)
    await fleet.start(*pools)
    driver, alone = await fleet.driver(*PDD), await fleet.aggregated()
    prompts = [prompt(60 + 20 * i) for i in range(6)]
    expected = await asyncio.gather(*(fleet.ask(alone, tokens, 90) for tokens in prompts))
    answers = [asyncio.create_task(fleet.ask(driver, tokens, 90, id=f"req-{i}")) for i, tokens in enumerate(prompts)]

    def begun() -> bool:
        timelines = [fleet.timelines.get(f"req-{i}") for i, _ in enumerate(prompts)]
        return all(timeline is not None and timeline.body()["tokens"]["relay"] > 1 for timeline in timelines)

    await until(begun)
    # Relays decode, and main will still have to get the KV of what they have said.
    process = fleet.processes.pop((pool, 0))
    process.stdin.write(f"drain {PATIENCE}\n".encode())
    await until(lambda: f"{pool}/0" not in {str(member.key) for member, _ in driver.workers()})
    late = await fleet.ask(driver, prompts[0], 90)
    answers_got = await asyncio.gather(*answers)
    async with asyncio.timeout(PATIENCE):
        assert await process.wait() == 0
    assert [answer.tokens for answer in answers_got] == [answer.tokens for answer in expected]
    assert late.tokens == expected[0].tokens
    for answer in (*answers_got, late):
        assert answer.timeline["recoveries"] == []
        assert not [event for event in answer.timeline["events"] if "failed" in event["what"]]
    used = {event["worker"] for answer in answers_got for event in answer.timeline["events"]}
    assert f"{pool}/0" in used, "it had something to finish"
    assert f"{pool}/0" not in {event["worker"] for event in late.timeline["events"]}
    assert driver.ready
    await fleet.idle()


@pytest.mark.parametrize("pool", ["relay", "main"])
async def test_what_a_drain_has_no_patience_for_goes_on_elsewhere(
    new_fleet: Callable[..., Any], prompt: Prompt, pool: str
) -> None:
    slow = (f"spec.pools.{each}.engine.config.token_time=0.01" for each in ("relay", "main"))
    fleet = new_fleet(*slow, f"spec.pools.{pool}.replicas=2")
    await fleet.start()
    # The one tier decodes long enough to be stopped in its middle.
    length = 200 if pool == "relay" else 10
    handoff = f"spec.handoff={{plugin: one-shot, config: {{min_relay_tokens: {length}, max_relay_tokens: {length}}}}}"
    driver, alone = await fleet.driver(PDD[0], handoff), await fleet.aggregated()
    prompts = [prompt(60 + 20 * i) for i in range(4)]
    expected = await asyncio.gather(*(fleet.ask(alone, tokens, 220) for tokens in prompts))
    answers = [asyncio.create_task(fleet.ask(driver, tokens, 220, id=f"r-{i}")) for i, tokens in enumerate(prompts)]

    def begun() -> bool:
        timelines = [fleet.timelines.get(f"r-{i}") for i, _ in enumerate(prompts)]
        return all(timeline is not None and timeline.body()["tokens"][pool] > 1 for timeline in timelines)

    await until(begun)
    process = fleet.processes.pop((pool, 0))
    process.stdin.write(b"drain 0.05\n")
    answered = await asyncio.gather(*answers)
    async with asyncio.timeout(PATIENCE):
        assert await process.wait() == 0
    assert [answer.tokens for answer in answered] == [answer.tokens for answer in expected]
    recoveries = [recovery for answer in answered for recovery in answer.timeline["recoveries"]]
    assert recoveries, "there was something to cut off"
    assert {recovery["worker"] for recovery in recoveries} == {f"{pool}/0"}
    assert any(f"worker {pool}/0 stops" in recovery["why"] for recovery in recoveries)
    await fleet.idle()
