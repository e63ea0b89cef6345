"""Who is in the view of a driver, and that two drivers over the same workers agree."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from pdd_runtime.clock import now
from pdd_runtime.pipeline import Driver
from pdd_runtime.plugins.engine import Load
from pdd_runtime.plugins.routing import WorkerKey
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: view-tests}
spec:
  model: {source: scripted}
  clusters: {dc: {}}
  pools:
    all: {role: aggregated, cluster: dc, engine: {plugin: scripted, config: {token_time: 0.02}}}
"""
FOUR = ONE.replace("cluster: dc, ", "cluster: dc, replicas: 4, ").replace("0.02}", "0.02, batch_limit: 8}")
ANOTHER = "spec.frontend.port=1"
"""A second driver for the same graph."""


def keys(driver: Driver) -> list[WorkerKey]:
    return [member.key for member, _ in driver.workers()]


def loads(driver: Driver) -> dict[int, Load]:
    """By the worker's index."""
    return {member.key.index: load for member, load in driver.workers()}


def running(driver: Driver) -> dict[int, int]:
    return {index: load.running for index, load in loads(driver).items()}


async def test_one_that_discovery_has_lost_stays_as_long_as_its_connection_holds(
    new_fleet: Callable[..., Any], prompt: Callable[[int], list[int]]
) -> None:
    fleet = new_fleet(text=ONE)
    await fleet.start()
    driver = await fleet.driver()
    before = keys(driver)
    fleet._registry.remove(before[0])
    await until(lambda: not driver._peers._members)
    await fleet.ask(driver, prompt(40), 5)
    assert keys(driver) == before
    assert driver.ready
    await fleet.kill("all")
    await until(lambda: not keys(driver))
    # And when it is there again, it is another one.
    await fleet.spawn("all")
    await until(lambda: bool(keys(driver)))
    assert keys(driver) != before
    await fleet.ask(driver, prompt(40), 5)


async def test_one_that_was_replaced_takes_no_session_however_well_it_is_connected(
    new_fleet: Callable[..., Any], prompt: Callable[[int], list[int]]
) -> None:
    fleet = new_fleet(text=ONE)
    await fleet.start()
    driver = await fleet.driver()
    old = keys(driver)
    first = fleet.processes["all", 0]
    await fleet.spawn("all")
    await until(lambda: keys(driver) not in (old, []))
    assert len(keys(driver)) == 1
    assert first.returncode is None
    await fleet.ask(driver, prompt(40), 5)
    first.stdin.close()
    await first.wait()


async def test_one_that_hangs_leaves_the_view_and_is_back_when_it_is_heard_again(
    new_fleet: Callable[..., Any], prompt: Callable[[int], list[int]]
) -> None:
    fleet = new_fleet("spec.pools.all.replicas=2", text=ONE)
    await fleet.start()
    driver = await fleet.driver()
    both = keys(driver)
    assert len(both) == 2
    process = fleet.processes["all", 1]
    process.send_signal(signal.SIGSTOP)
    try:
        await until(lambda: [key.index for key in keys(driver)] == [0])
        # That is long before it is given up.
        assert not any(peer.connection.closed for peer in driver._peers._peers.values())
        assert len(driver._peers._peers) == 2
        for _ in range(4):
            await fleet.ask(driver, prompt(40), 3)
    finally:
        process.send_signal(signal.SIGCONT)
    await until(lambda: sorted(keys(driver)) == sorted(both))


@pytest.mark.parametrize("order", [("main", "relay", "prefill"), ("prefill", "main", "relay")], ids="-".join)
async def test_in_whatever_order_pools_come_there_is_a_route_only_when_it_is_whole(
    new_fleet: Callable[..., Any], order: tuple[str, ...], prompt: Callable[[int], list[int]]
) -> None:
    fleet = new_fleet()
    await fleet.start(order[0])
    driver = await fleet.driver(wait=False)
    for pool in order[1:]:
        await until(lambda: len(keys(driver)) == len(fleet.processes))
        assert not driver.ready
        await fleet.spawn(pool)
    await until(lambda: len(keys(driver)) == 3)
    answer = await fleet.ask(driver, prompt(100), 20)
    assert answer.timeline["route"] == "P-RLD-MD"


async def test_pools_of_which_nothing_shows_itself_are_not_waited_for_for_ever(
    new_fleet: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a frontend starts while a cluster is away."""
    fleet = new_fleet()
    await fleet.start("all")
    driver = await fleet.driver(wait=False)
    await until(lambda: keys(driver) != [])
    assert driver.why_not_ready == "no worker is ready yet in: main, prefill, relay"
    monkeypatch.setattr("pdd_runtime.pipeline.driver.SHOWN", 0.0)
    assert driver.ready
    # Readiness once reached is kept, whoever is still to come.
    await fleet.spawn("prefill")
    await until(lambda: len(keys(driver)) == 2)
    assert driver.ready


# Several frontends


async def test_two_drivers_use_what_the_other_leaves_idle(
    new_fleet: Callable[..., Any], prompt: Callable[[int], list[int]]
) -> None:
    """Each has half of what there is to do. Had one of them only its own requests in view, it would often choose a
    worker that the other keeps busy."""
    fleet = new_fleet(text=FOUR)
    await fleet.start()
    drivers = [await fleet.driver(), await fleet.driver(ANOTHER)]

    async def all_know(requests: int) -> None:
        await until(lambda: all(sum(running(driver).values()) == requests for driver in drivers))

    for turn in range(4):
        first, second = drivers if turn % 2 else drivers[::-1]
        asked = [asyncio.create_task(fleet.ask(first, prompt(30), 4000)) for _ in range(2)]
        await all_know(2)
        asked += [asyncio.create_task(fleet.ask(second, prompt(30), 4000)) for _ in range(2)]
        await all_know(4)
        assert running(second) == dict.fromkeys(range(4), 1)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await all_know(0)
    await fleet.idle()


async def test_two_drivers_at_once_leave_nobody_idle_while_another_queues(
    new_fleet: Callable[..., Any], prompt: Callable[[int], list[int]]
) -> None:
    fleet = new_fleet(text=FOUR)
    await fleet.start()
    drivers = [await fleet.driver(), await fleet.driver(ANOTHER)]
    over, served = asyncio.Event(), Counter[str]()
    idle, end = 0.0, now() + PATIENCE

    async def client(driver: Driver) -> None:
        while not over.is_set():
            answer = await fleet.ask(driver, prompt(30), 20)
            served[next(event["worker"] for event in reversed(answer.timeline["events"]) if event["worker"])] += 1

    clients = [asyncio.create_task(client(driver)) for driver in drivers for _ in range(16)]
    try:
        # 32 requests for the 32 places of four batches.
        while sum(served.values()) < 200 and now() < end:
            seen = list(loads(drivers[0]).values())
            unjust = any(load.waiting for load in seen) and not all(load.running for load in seen)
            idle += 0.02 * unjust
            await asyncio.sleep(0.02)
    finally:
        over.set()
        await asyncio.gather(*clients)
    assert idle < 0.5
    assert len(served) == 4
    assert min(served.values()) > 0.6 * sum(served.values()) / 4, served
    await fleet.idle()
