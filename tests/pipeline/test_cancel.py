"""A client that goes away, in whatever state its session is, leaves nothing on any worker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest

from pdd_runtime.errors import Cancelled
from pdd_runtime.pipeline import SessionRequest
from pdd_runtime.plugins.engine import Sampling
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

Prompt = Callable[[int], list[int]]
RELAY = "spec.routing={plugin: always-relay}"
ROUTES = {
    "one-shot": (RELAY, "spec.handoff={plugin: one-shot}"),
    "catch-up": (RELAY, "spec.handoff={plugin: catch-up}"),
    "none": (RELAY, "spec.handoff={plugin: none}"),
    "kv-transfer": (RELAY, "spec.handoff={plugin: kv-transfer}"),
    "direct": ("spec.routing={plugin: never-relay}",),
}


def request(prompt: list[int], max_tokens: int, id: str) -> SessionRequest:
    return SessionRequest(id=id, tokens=tuple(prompt), max_tokens=max_tokens, sampling=Sampling(temperature=0.0))


async def read(driver: Any, asked: SessionRequest, tokens: int) -> int:
    """Read so many tokens, then close."""
    seen = 0
    async with aclosing(driver.run(asked)) as answer:
        if tokens == 0:
            return 0
        async for _ in answer:
            seen += 1
            if seen == tokens:
                break
    return seen


@pytest.mark.parametrize("route", ROUTES)
async def test_sixty_sessions_cancelled_at_random_moments(fleet: Any, prompt: Prompt, route: str) -> None:
    driver = await fleet.driver(*ROUTES[route])
    randomness = random.Random(route)

    async def one(number: int) -> None:
        asked = request(prompt(randomness.randrange(1, 1200)), 150, f"{route}-{number}")
        reading = asyncio.create_task(read(driver, asked, 10_000))
        # From before the route is planned to after the end: such a session takes a few tenths of a second here.
        await asyncio.sleep(randomness.random() * 0.8 if number % 10 else 0)
        reading.cancel()
        await asyncio.wait({reading})

    await asyncio.gather(*(one(number) for number in range(60)))
    await fleet.idle()
    # And they still work.
    assert (await fleet.ask(driver, prompt(50), 10)).finish.reason == "length"
    await fleet.idle()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 30, 60, 99])
async def test_closing_after_n_tokens_frees_everything_before_the_answer_would_have_ended(
    fleet: Any, prompt: Prompt, route: str, tokens: int
) -> None:
    driver = await fleet.driver(*ROUTES[route])
    await read(driver, request(prompt(300), 7000, f"close-{route}-{tokens}"), tokens)
    assert driver.sessions == 0
    async with asyncio.timeout(10):  # the tokens alone would take 14 s
        await fleet.idle()
    timeline = fleet.timelines.get(f"close-{route}-{tokens}")
    assert tokens == 0 or timeline.body()["error"].startswith("cancelled")


async def test_closing_the_driver_ends_sessions_that_settle(fleet: Any, prompt: Prompt) -> None:
    driver = await fleet.driver(RELAY, "spec.handoff={plugin: none}", "spec.links.wan.rtt=22ms")
    await fleet.ask(driver, prompt(4000), 3)
    assert driver.sessions == 1
    await driver.close()
    assert driver.sessions == 0
    await fleet.idle()


async def test_closing_the_driver_tells_the_users(fleet: Any, prompt: Prompt) -> None:
    driver = await fleet.driver(RELAY, "spec.links.wan.rtt=23ms")
    asking = asyncio.create_task(fleet.ask(driver, prompt(100), 7000))
    await until(lambda: driver.sessions == 1)
    await driver.close()
    with pytest.raises(Cancelled, match="closing"):
        await asking
    assert driver.sessions == 0
    await fleet.idle()
