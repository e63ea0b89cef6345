"""More than there is room for, over real workers: nobody is lost, and no worker has more than it may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio

from pdd_runtime.errors import Overloaded
from pdd_runtime.pipeline import Driver, SessionRequest
from pdd_runtime.plugins.engine import Sampling, Token
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

Prompt = Callable[[int], list[int]]
GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: admission-tests}
spec:
  model: {source: scripted}
  clusters: {dc-a: {}, dc-b: {}}
  links:
    wan: {between: [dc-a, dc-b], bandwidth: 20Mbit/s, rtt: 20ms, emulate: true}
  pools:
    prefill: {role: prefill, cluster: dc-a, engine: &e {plugin: scripted, config: {batch_limit: 2, token_time: 0.004}}}
    relay: {role: relay, cluster: dc-a, engine: *e}
    main: {role: main, cluster: dc-b, engine: *e}
    all: {role: aggregated, cluster: dc-a, engine: *e}
  edges:
    - {from: prefill, to: relay, carries: kv, transport: {plugin: tcp}}
    - {from: prefill, to: main, carries: kv, transport: {plugin: tcp}, link: wan}
    - {from: relay, to: main, carries: tokens, link: wan}
  routing: {plugin: always-relay}
"""
FINISHING = "spec.routing.config={finish_on_relay: {max_tokens: 100, requests: 1, slots: 1, hit_rate_gap: 1}}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(make_fleet: Callable[..., Any]) -> AsyncIterator[Any]:
    fleet = make_fleet(text=GRAPH)
    await fleet.start()
    yield fleet
    await fleet.close()


def metrics(driver: Driver) -> dict[str, float]:
    found = {}
    for collector in driver.collectors:
        for family in collector.collect():
            for sample in family.samples:
                found[f"{sample.name}{{{','.join(sample.labels.values())}}}"] = sample.value
    return found


def taken(driver: Driver) -> dict[str, tuple[float, float]]:
    """Requests and their limit, by pool."""
    now = metrics(driver)
    name = "pdd_pool_requests"
    pools = [key[len(name) + 1 : -1] for key in now if key.startswith(f"{name}{{")]
    return {pool: (now[f"{name}{{{pool}}}"], now[f"{name}_limit{{{pool}}}"]) for pool in pools}


async def test_a_flood_is_served_one_after_the_other_and_no_worker_has_more_than_it_may(
    fleet: Any, prompt: Prompt
) -> None:
    driver = await fleet.driver("spec.admission.pools.main.requests=4")
    seen: list[dict[str, tuple[float, float]]] = []

    async def look() -> None:
        while True:
            seen.append(taken(driver))
            await asyncio.sleep(0.005)

    looking = asyncio.create_task(look())
    # The aggregated pool takes what the others have no room for: it is part of the graph like them.
    answers = await asyncio.gather(*(fleet.ask(driver, prompt(40), 20) for _ in range(40)))
    looking.cancel()
    assert [len(answer.tokens) for answer in answers] == [20] * 40
    assert {answer.timeline["route"] for answer in answers} >= {"P-RLD-MD", "A"}
    for now in seen:
        assert all(requests <= limit for requests, limit in now.values()), now
    assert max(now["main"][0] for now in seen) >= 3
    queued = [answer for answer in answers if answer.timeline["events"][0]["what"].startswith("queued: behind ")]
    assert len(queued) > 10
    assert all(answer.timeline["events"][1]["what"].startswith("admitted: after ") for answer in queued)
    assert metrics(driver)["pdd_queue_wait_seconds_count{}"] == len(queued)
    assert metrics(driver)["pdd_queue_length{}"] == 0
    await fleet.idle()


async def test_two_frontends_leave_each_other_room(fleet: Any, prompt: Prompt) -> None:
    one, two = await fleet.driver(), await fleet.driver("spec.admission.queue=1000")
    answers = await asyncio.gather(
        *(fleet.ask(driver, prompt(40), 20) for _ in range(20) for driver in (one, two)),
    )
    assert [len(answer.tokens) for answer in answers] == [20] * 40
    await fleet.idle()


async def test_who_is_refused_or_goes_away_while_it_waits_has_begun_nothing(fleet: Any, prompt: Prompt) -> None:
    driver = await fleet.driver("spec.admission.queue=2")
    # Main takes four, and the aggregated worker three.
    long = [asyncio.create_task(fleet.ask(driver, prompt(40), 5000)) for _ in range(7)]
    await until(lambda: driver.sessions == 7)
    waiting = [asyncio.create_task(fleet.ask(driver, prompt(40), 5, id=f"waits-{number}")) for number in range(2)]
    await until(lambda: metrics(driver)["pdd_queue_length{}"] == 2)
    with pytest.raises(Overloaded, match="the queue is full, with 2") as caught:
        await fleet.ask(driver, prompt(40), 5)
    assert caught.value.retry_after >= 1
    waiting[0].cancel()
    await asyncio.wait({waiting[0]})
    assert metrics(driver)["pdd_queue_length{}"] == 1
    assert fleet.timelines.get("waits-0").body()["error"].startswith("cancelled")
    assert driver.sessions == 7
    long[0].cancel()
    assert len((await waiting[1]).tokens) == 5
    for task in long:
        task.cancel()
    await asyncio.wait(long)
    await fleet.idle()


async def test_those_who_wait_go_on_when_a_worker_that_was_lost_is_back(
    new_fleet: Callable[..., Any], prompt: Prompt
) -> None:
    fleet = new_fleet(text=GRAPH)
    await fleet.start("prefill", "relay", "main")
    driver = await fleet.driver(wait=False)
    await until(lambda: len(driver.workers()) == 3)
    asking = [asyncio.create_task(fleet.ask(driver, prompt(40), 200)) for _ in range(12)]
    await until(lambda: metrics(driver)["pdd_queue_length{}"] > 0)
    await fleet.kill("main")
    await until(lambda: len(driver.workers()) == 2)
    await fleet.spawn("main")
    answers = await asyncio.gather(*asking)
    assert [len(answer.tokens) for answer in answers] == [200] * 12


# On the relay to the end


async def test_a_request_that_ends_on_the_relay_is_the_same_and_main_never_hears_of_it(
    fleet: Any, prompt: Prompt
) -> None:
    driver, tokens = await fleet.driver(FINISHING), prompt(100)
    answer = await fleet.settled(await fleet.ask(driver, tokens, 60))
    same = await fleet.ask(await fleet.aggregated(), tokens, 60)
    assert answer.ids == same.ids
    body = answer.timeline
    assert body["route"] == "P-RLD"
    assert body["tokens"] == {"prefill": 1, "relay": 59, "main": 0}
    assert [transfer["edge"] for transfer in body["kv"]] == ["prefill->relay"]
    whats = [event["what"] for event in body["events"]]
    assert [what for what in whats if what.startswith(("relay", "finish"))] == [
        "relay starts",
        "finish: length",
        "relay stops: length",
    ]
    assert not any(event["worker"].startswith("main") for event in body["events"])
    # The next turn finds nothing on main, which is why there is a guard.
    again = await fleet.ask(driver, [*tokens, *answer.ids, 70], 101)
    assert again.timeline["route"] == "P-RLD-MD"
    assert again.timeline["cached"]["main"] == 0
    await fleet.idle()


async def test_one_that_stops_early_ends_there_too(fleet: Any, prompt: Prompt) -> None:
    driver, tokens = await fleet.driver(FINISHING), prompt(100)
    whole = await fleet.ask(driver, tokens, 60)
    stop = whole.ids[20]
    answer = await fleet.ask(driver, tokens, 60, stop_token_ids=(stop,))
    assert answer.finish.reason == "stop"
    assert answer.ids == whole.ids[: whole.ids.index(stop) + 1]
    assert answer.timeline["tokens"]["main"] == 0
    await fleet.idle()


async def test_a_relay_that_dies_before_such_a_request_ends_loses_no_token(
    new_fleet: Callable[..., Any], prompt: Prompt
) -> None:
    fleet = new_fleet(text=GRAPH)
    await fleet.start()
    driver, tokens = await fleet.driver(FINISHING.replace("100", "1000")), prompt(100)
    same = await fleet.ask(await fleet.aggregated(), tokens, 600)
    given: list[Token] = []
    request = SessionRequest(id="orphan", tokens=tuple(tokens), max_tokens=600, sampling=Sampling(temperature=0.0))
    asking = asyncio.create_task(driver.deliver(request, given.append))
    await until(lambda: len(given) > 10)
    assert fleet.timelines.get("orphan").body()["route"] == "P-RLD"
    await fleet.kill("relay")
    await asking
    assert [token.id for token in given[:-1]] == same.ids
    assert fleet.timelines.get("orphan").body()["recoveries"][0]["role"] == "relay"


# Handed over by the relay's load


@pytest.mark.parametrize(("busy", "rounds"), [(0.01, 0), (100, 1)], ids=["busy", "not busy"])
async def test_adaptive_hands_over_at_once_or_in_rounds_and_the_answer_is_the_same(
    fleet: Any, prompt: Prompt, busy: float, rounds: int
) -> None:
    handoff = f"spec.handoff={{plugin: adaptive, config: {{busy: {busy}, busy_tokens: 6000, min_relay_tokens: 70}}}}"
    driver, tokens = await fleet.driver(handoff), prompt(200)
    answer = await fleet.ask(driver, tokens, 150)
    same = await fleet.ask(await fleet.aggregated(), tokens, 150)
    assert answer.ids == same.ids
    assert answer.timeline["handoff"]["strategy"] == "adaptive"
    assert min(1, answer.timeline["handoff"]["rounds"]) == rounds
    await fleet.idle()
