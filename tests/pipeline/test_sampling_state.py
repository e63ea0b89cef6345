"""What sampling remembers of a request's tokens passes the handoff, or the route has no worker that cannot carry it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pdd_runtime.errors import RequestError
from pdd_runtime.plugins.engine import Guide
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

Prompt = Callable[[int], list[int]]
STRATEGIES = ["one-shot", "catch-up", "kv-transfer"]
STOPS = tuple(range(40, 80))
"""Nearly half of what the scripted engine says: without `min_tokens` its answers would be short."""
SAMPLINGS: dict[str, dict[str, Any]] = {
    "frequency": {"temperature": 1.0, "seed": 1, "frequency_penalty": 1.5},
    "presence": {"temperature": 1.0, "seed": 2, "presence_penalty": 2.0},
    "repetition": {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.8},
    "greedy": {"frequency_penalty": 1.0, "presence_penalty": 1.0, "repetition_penalty": 1.3},
    "logit_bias": {"temperature": 1.0, "seed": 4, "logit_bias": tuple((token, 3.0) for token in range(60, 75))},
    "min_tokens": {"temperature": 1.5, "seed": 5, "min_tokens": 24, "stop_token_ids": STOPS},
    "all": {
        "temperature": 1.2,
        "top_p": 0.98,
        "seed": 6,
        "logprobs": 2,
        "frequency_penalty": 0.8,
        "repetition_penalty": 1.2,
        "logit_bias": ((65, 2.0), (90, -5.0)),
        "min_tokens": 30,
        "stop_token_ids": STOPS,
    },
}


def relayed(strategy: str, n: int) -> tuple[str, ...]:
    config = f"{{min_relay_tokens: {n}, max_relay_tokens: {n}}}"
    return "spec.routing={plugin: always-relay}", f"spec.handoff={{plugin: {strategy}, config: {config}}}"


def engine(**switches: str) -> str:
    config = ", ".join(f"{key}: [{value}]" for key, value in switches.items())
    return f"engine={{plugin: scripted, config: {{{config}}}}}"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("n", [1, 2, 3, 15, 16, 17])
async def test_handed_off_after_n_tokens_it_is_the_run_without_a_handoff(
    fleet: Any, prompt: Prompt, strategy: str, n: int
) -> None:
    tokens = prompt(120)
    alone, driver = await fleet.aggregated(), await fleet.driver(*relayed(strategy, n))

    async def check(name: str) -> None:
        expected = await fleet.ask(alone, tokens, 40, **SAMPLINGS[name])
        answer = await fleet.ask(driver, tokens, 40, **SAMPLINGS[name])
        assert answer.tokens == expected.tokens, name
        assert answer.finish.reason == expected.finish.reason
        assert answer.timeline["route"] == "P-RLD-MD"
        assert answer.timeline["tokens"]["relay"] == n
        assert answer.timeline["tokens"]["main"] > 0

    await asyncio.gather(*(check(name) for name in SAMPLINGS))
    await fleet.idle()


@pytest.mark.parametrize("n", [2, 30])
async def test_min_tokens_are_counted_from_the_first_one(fleet: Any, prompt: Prompt, n: int) -> None:
    sampling = SAMPLINGS["min_tokens"]
    answer = await fleet.ask(await fleet.driver(*relayed("catch-up", n)), prompt(100), 200, **sampling)
    assert len(answer.tokens) > 24
    assert answer.finish.reason == "stop"
    assert [token in STOPS for token in answer.ids] == [False] * (len(answer.ids) - 1) + [True]
    await fleet.idle()


async def test_a_penalty_is_felt(fleet: Any, prompt: Prompt) -> None:
    tokens, alone = prompt(100), await fleet.aggregated()
    free = await fleet.ask(alone, tokens, 60)
    penalised = await fleet.ask(alone, tokens, 60, presence_penalty=100.0)
    assert len(set(free.ids)) < 60
    assert len(set(penalised.ids)) == 60


async def test_a_relay_that_cannot_is_avoided_and_the_timeline_says_so(
    new_fleet: Callable[..., Any], prompt: Prompt
) -> None:
    fleet = new_fleet(
        f"spec.pools.relay.{engine(lacks='penalties')}",
        f"spec.pools.prefill.{engine(claims='guided')}",
        f"spec.pools.main.{engine(claims='guided')}",
    )
    await fleet.start("prefill", "relay", "main")
    driver = await fleet.driver("spec.routing={plugin: always-relay}", wait=False)
    await until(lambda: len(driver.workers()) == 3)
    for sampling, cannot in (
        ({"presence_penalty": 1.0}, "penalties"),
        ({"guide": Guide(kind="json_object"), "repetition_penalty": 1.1}, "penalties, guided"),
        ({"guide": Guide(kind="json_object")}, "guided"),
    ):
        answer = await fleet.ask(driver, prompt(80), 12, **sampling)
        assert answer.timeline["route"] == "P-MD"
        assert answer.timeline["reason"] == f"relay cannot: {cannot}, though the policy is to relay always"
        assert answer.timeline["tokens"] == {"prefill": 1, "relay": 0, "main": 11}
    for sampling in ({}, {"min_tokens": 3}, {"logit_bias": ((65, 1.0),)}, {"logprobs": 1}):
        answer = await fleet.ask(driver, prompt(80), 12, **sampling)
        assert answer.timeline["route"] == "P-RLD-MD"
    await fleet.idle()


async def test_what_no_worker_can_do_is_refused_before_anything_runs(fleet: Any, prompt: Prompt) -> None:
    driver = await fleet.driver("spec.routing={plugin: always-relay}")
    with pytest.raises(RequestError) as caught:
        await fleet.ask(driver, prompt(80), 12, id="unservable", guide=Guide(kind="json_object"))
    assert caught.value.what == "pool main cannot: guided; pool prefill cannot: guided"
    timeline = fleet.timelines.get("unservable")
    assert timeline is not None
    assert "cannot: guided" in timeline.body()["error"]
    assert driver.sessions == 0
    await fleet.idle()
