"""A link between two other clusters that lets nothing through: the frontend reaches both ends of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pdd_runtime.clock import now
from pdd_runtime.pipeline import Driver
from pdd_runtime.plugins.messages import LineCut
from pdd_runtime.plugins.routing import LinkView
from pdd_runtime.rpc import Greeting, connect
from tests.pipeline.conftest import SECRET
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

CUT = 10.0
"""Seconds, most of which are left when the silence is noticed."""
GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: silent}
spec:
  model: {source: scripted}
  clusters: {dc-a: {}, dc-b: {}, dc-c: {}}
  links:
    near: {between: [dc-a, dc-b], bandwidth: 50Mbit/s, rtt: 10ms, emulate: true}
    far: {between: [dc-a, dc-c], bandwidth: 40Mbit/s, rtt: 20ms, emulate: true}
  pools:
    prefill: {role: prefill, cluster: dc-a, engine: &e {plugin: scripted, config: {token_bytes: 4096}}}
    main-b: {role: main, cluster: dc-b, engine: *e}
    main-c: {role: main, cluster: dc-c, engine: *e}
  edges:
    - {from: prefill, to: main-b, carries: kv, transport: {plugin: tcp}, link: near}
    - {from: prefill, to: main-c, carries: kv, transport: {plugin: tcp}, link: far}
"""


def near(driver: Driver) -> LinkView:
    return next(link for link in driver.links() if (link.name, link.source) == ("near", "dc-a"))


async def main_of(fleet: Any, driver: Driver, prompt: list[int]) -> str:
    answer = await fleet.ask(driver, prompt, 5)
    ends: str = next(edge["edge"] for edge in answer.timeline["kv"]).partition("->")[2]
    return ends


async def test_new_requests_take_another_way_until_something_gets_through_again(
    new_fleet: Callable[..., Any], prompt: Callable[[int], list[int]]
) -> None:
    fleet = new_fleet(text=GRAPH)
    await fleet.start()
    driver = await fleet.driver()
    assert await main_of(fleet, driver, prompt(600)) == "main-b", "it is the better link"
    await until(lambda: not any(link.queue for link in driver.links()))
    sender = next(member for member, _ in driver.workers() if member.role == "prefill")
    greeting = Greeting(graph=fleet.graph.name, secret=SECRET, cluster="dc-a", name="test")
    connection = await connect(sender.endpoint, greeting)
    back = now() + CUT
    await connection.call("line.cut", LineCut("dc-b", CUT), type(None), timeout=PATIENCE)
    stuck = asyncio.create_task(main_of(fleet, driver, prompt(600)))
    await until(lambda: near(driver).stalled > 1.0)
    assert not stuck.done()
    others = []
    while now() < back - 1.0 and len(others) < 3:
        others.append(await main_of(fleet, driver, prompt(600)))
    assert others
    assert set(others) == {"main-c"}
    # The cut is over, and what was stuck gets through.
    assert await stuck == "main-b"
    await until(lambda: near(driver).stalled == 0.0 and not any(link.queue for link in driver.links()))
    assert near(driver).rate > 2e6, "what was measured while nothing got through is not the link's"
    assert await main_of(fleet, driver, prompt(600)) == "main-b"
    await connection.close()
    await fleet.idle()
