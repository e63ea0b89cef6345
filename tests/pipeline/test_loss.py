"""What is left when workers die, and when they come: who is asked then, and what a user is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pdd_runtime.errors import NoRoute, WorkerLost
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

Prompt = Callable[[int], list[int]]
RELAY = "spec.routing={plugin: always-relay}"
NEVER = "spec.routing={plugin: never-relay}"
# Slow enough to be killed in the middle.
SLOW = (
    "spec.pools.prefill.engine.config={prefill_rate: 2000, token_time: 0.01}",
    *(f"spec.pools.{pool}.engine.config={{token_time: 0.01}}" for pool in ("relay", "main", "all")),
)


def events(timeline: dict[str, Any]) -> list[str]:
    return [event["what"].partition(":")[0] for event in timeline["events"]]


async def when(fleet: Any, id: str, condition: Callable[[dict[str, Any]], bool]) -> None:
    """Return when the session's timeline is so."""

    def so() -> bool:
        timeline = fleet.timelines.get(id)
        return timeline is not None and condition(timeline.body())

    await until(so)


Condition = Callable[[dict[str, Any]], bool]
MOMENTS: dict[str, tuple[tuple[str, ...], str, Condition, str]] = {
    "prefill, prefilling": ((RELAY,), "prefill", lambda t: "prefill starts" in events(t), "prefilling|sending KV"),
    "main, decoding": ((RELAY,), "main", lambda t: t["tokens"]["main"] > 3, "decoding"),
    "main, decoding, no relay": ((NEVER,), "main", lambda t: t["tokens"]["main"] > 3, "decoding"),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
async def test_without_recovery_a_killed_worker_ends_its_sessions_with_its_name_and_no_others(
    new_fleet: Callable[..., Any], prompt: Prompt, moment: str
) -> None:
    overrides, pool, condition, doing = MOMENTS[moment]
    fleet = new_fleet(*SLOW, "spec.links.wan.bandwidth=512kbit/s", "spec.recovery.attempts=0")
    await fleet.start()
    driver, alone = await fleet.driver(*overrides), await fleet.aggregated()
    other = asyncio.create_task(fleet.ask(alone, prompt(50), 120))
    asking = asyncio.create_task(fleet.ask(driver, prompt(1500), 1000, id="doomed"))
    await when(fleet, "doomed", condition)
    await fleet.kill(pool)
    with pytest.raises(WorkerLost, match=rf"worker {pool}/0 \({pool}\) was lost while ({doing})"):
        await asking
    assert driver.sessions == 0
    assert f"{pool}/0" in fleet.timelines.get("doomed").body()["error"]
    # The others' blocks come back, and they go on.
    assert (await other).finish.reason == "length"
    await fleet.idle()
    # Nobody is sent to the dead worker any more.
    answer = await fleet.ask(driver, prompt(50), 5)
    assert answer.timeline["route"] == "A"
    await fleet.idle()
    for gone in {"main", "all"} - {pool}:
        await fleet.kill(gone)
    await until(lambda: not driver.ready)
    with pytest.raises(NoRoute, match=r"no (prefill|main|aggregated) worker is ready"):
        await fleet.ask(driver, prompt(50), 5)


async def test_a_relay_that_dies_after_it_has_given_all_is_not_missed(
    new_fleet: Callable[..., Any], prompt: Prompt
) -> None:
    fleet = new_fleet(*SLOW, "spec.links.wan.bandwidth=512kbit/s")
    await fleet.start("prefill", "relay", "main", "all")
    config = "{min_relay_tokens: 5, max_relay_tokens: 5}"
    driver = await fleet.driver(RELAY, f"spec.handoff={{plugin: catch-up, config: {config}}}")
    tokens = prompt(1500)
    asking = asyncio.create_task(fleet.ask(driver, tokens, 20, id="lucky"))
    await when(fleet, "lucky", lambda t: "relay stops" in events(t))
    await fleet.kill("relay")
    answer = await asking
    assert answer.timeline["tokens"] == {"prefill": 1, "relay": 5, "main": 14}
    assert answer.ids == (await fleet.ask(await fleet.aggregated(), tokens, 20)).ids
    await fleet.idle()


@pytest.mark.slow
async def test_a_worker_that_comes_back_serves_again(new_fleet: Callable[..., Any], prompt: Prompt) -> None:
    fleet = new_fleet()
    await fleet.start()
    driver = await fleet.driver(RELAY)
    for pool in ("main", "prefill", "relay"):
        assert (await fleet.ask(driver, prompt(50), 20)).timeline["route"] == "P-RLD-MD"
        await fleet.idle()
        await fleet.kill(pool)
        await until(lambda: len(driver._peers.ready) == 3)
        await fleet.spawn(pool)
        await until(lambda: len(driver._peers.ready) == 4)
    assert (await fleet.ask(driver, prompt(50), 20)).timeline["route"] == "P-RLD-MD"
    await fleet.idle()


async def test_tiers_may_start_in_any_order(new_fleet: Callable[..., Any], prompt: Prompt) -> None:
    fleet = new_fleet()
    await fleet.start("main")
    driver = await fleet.driver(RELAY, wait=False)
    assert driver.why_not_ready == "no worker is ready yet in: all, main, prefill, relay"
    await until(lambda: bool(driver._peers.ready))
    for pool, missing in (("all", "prefill, relay"), ("relay", "prefill")):
        await fleet.spawn(pool)
        await until(lambda missing=missing: driver.why_not_ready.endswith(f": {missing}"))
        assert not driver.ready
    await fleet.spawn("prefill")
    await until(lambda: driver.ready)
    answer = await fleet.ask(driver, prompt(50), 20)
    assert answer.timeline["route"] == "P-RLD-MD"
    await fleet.idle()


async def test_equal_load_spreads_over_the_workers_of_a_pool(new_fleet: Callable[..., Any], prompt: Prompt) -> None:
    fleet = new_fleet("spec.pools.main.replicas=2", "spec.pools.prefill.replicas=2")
    await fleet.start("prefill", "relay", "main", "all")
    driver = await fleet.driver(RELAY)
    # All at once: no worker's own report can be there in time.
    answers = await asyncio.gather(*(fleet.ask(driver, prompt(100), 60) for _ in range(12)))
    for pool, event in (("main", "KV from prefill starts"), ("prefill", "prefill starts")):
        happened = [(e["worker"], e["what"]) for answer in answers for e in answer.timeline["events"]]
        taken = [worker for worker, what in happened if what == event and worker.startswith(pool)]
        assert sorted(taken) == [f"{pool}/0"] * 6 + [f"{pool}/1"] * 6
    await fleet.idle()
