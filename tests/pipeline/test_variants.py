"""Requests of several variants: each with its own policy and workers, and what happens when those are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pdd_runtime.clock import now
from pdd_runtime.observe import Timeline
from pdd_runtime.pipeline import Driver, Finish, SessionRequest
from pdd_runtime.plugins.engine import Sampling, Token
from tests.pipeline.conftest import Fleet
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

Prompt = Callable[[int], list[int]]
SHARING = (
    "spec.variants={relayed: {pools: [prefill, relay, main], routing: {plugin: always-relay}}, "
    "direct: {pools: [prefill, relay, main], routing: {plugin: never-relay}}, whole: {pools: [all]}}"
)
APART = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: variants-apart}
spec:
  model: {source: scripted}
  clusters: {dc-a: {}}
  pools:
    a: {role: aggregated, cluster: dc-a, engine: &e {plugin: scripted, config: {token_time: 0.02}}}
    b: {role: aggregated, cluster: dc-a, engine: *e}
  variants: {a: {pools: [a]}, b: {pools: [b]}}
  admission: {pools: {b: {requests: 1}}}
"""


class Asked:
    """A request of a variant, under way."""

    def __init__(self, fleet: Fleet, driver: Driver, prompt: list[int], variant: str, tokens: int = 24) -> None:
        self.ids: list[int] = []
        self.id, self._fleet = f"{variant}-{now()}", fleet
        request = SessionRequest(
            id=self.id,
            tokens=tuple(prompt),
            max_tokens=tokens,
            sampling=Sampling(temperature=0.0),
            variant=variant,
        )
        self.task = asyncio.create_task(driver.deliver(request, self._put))

    def _put(self, item: Token | Finish) -> None:
        if isinstance(item, Token):
            self.ids.append(item.id)

    @property
    def timeline(self) -> Timeline:
        timeline = self._fleet.timelines.get(self.id)
        assert timeline is not None
        return timeline

    @property
    def events(self) -> str:
        """Empty: it has not begun."""
        timeline = self._fleet.timelines.get(self.id)
        return "; ".join(event["what"] for event in timeline.body()["events"]) if timeline else ""

    async def ended(self) -> Asked:
        async with asyncio.timeout(PATIENCE):
            await self.task
        return self


async def test_each_has_its_policy_and_its_pools(fleet: Fleet, prompt: Prompt) -> None:
    driver, text = await fleet.driver(SHARING), prompt(40)
    # One that the graph does not have any more is served as the control.
    names = ("relayed", "direct", "whole", "gone")
    asked = {name: await Asked(fleet, driver, text, name).ended() for name in names}
    bodies = {name: each.timeline.body() for name, each in asked.items()}
    assert [body["route"] for body in bodies.values()] == ["P-RLD-MD", "P-MD", "A", "P-RLD-MD"]
    assert [body["variant"] for body in bodies.values()] == list(names)
    assert len({tuple(each.ids) for each in asked.values()}) == 1
    assert not any(each.timeline.elsewhere for each in asked.values())
    await fleet.idle()


async def test_variants_apart(new_fleet: Callable[..., Fleet], prompt: Prompt) -> None:
    fleet = new_fleet(text=APART)
    await fleet.start()
    driver, text = await fleet.driver(), prompt(40)
    alone = await Asked(fleet, driver, text, "a", tokens=100).ended()

    # One that is full does not hold up another, and has no more than its own.
    busy = Asked(fleet, driver, prompt(40), "b", tokens=400)
    await until(lambda: len(busy.ids) > 0)
    waits = Asked(fleet, driver, text, "b")
    await until(lambda: "queued" in waits.events)
    assert (await Asked(fleet, driver, text, "a").ended()).ids == alone.ids[:24]
    assert not waits.ids
    busy.task.cancel()
    assert (await waits.ended()).ids == alone.ids[:24]
    assert waits.timeline.elsewhere == ""
    await fleet.idle()

    # One whose workers die is served by the others, token for token: what has begun, and what comes.
    dying = Asked(fleet, driver, text, "b", tokens=100)
    await until(lambda: len(dying.ids) > 10)
    await fleet.kill("b")
    assert (await dying.ended()).ids == alone.ids
    late = await Asked(fleet, driver, text, "b", tokens=100).ended()
    assert late.ids == alone.ids
    assert "leaves its variant: a serves it, b cannot: no aggregated worker is ready" in late.events
    for asked in (dying, late):
        assert asked.timeline.body()["variant"] == "b"
        assert asked.timeline.elsewhere == "failed"

    # When they are back, so is it.
    await fleet.spawn("b")
    await until(lambda: len(driver.workers()) == 2, PATIENCE)
    back = await Asked(fleet, driver, text, "b").ended()
    assert back.timeline.elsewhere == ""
    await fleet.idle()
