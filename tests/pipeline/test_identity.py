"""Token for token the same answer, whatever the route and wherever the handoff."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")

STRATEGIES = ["one-shot", "catch-up", "none", "kv-transfer"]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "seeded": {"temperature": 0.8, "seed": 1234, "logprobs": 2},
}
Prompt = Callable[[int], list[int]]


def relayed(strategy: str, n: int | None = None) -> tuple[str, ...]:
    config = f"{{min_relay_tokens: {n}, max_relay_tokens: {n}}}" if n else "{}"
    return (
        "spec.routing={plugin: always-relay}",
        f"spec.handoff={{plugin: {strategy}, config: {config}}}",
    )


async def alone(fleet: Any, prompt: list[int], max_tokens: int, **sampling: Any) -> Any:
    """The answer of a single engine."""
    answer = await fleet.ask(await fleet.aggregated(), prompt, max_tokens, **sampling)
    assert answer.timeline["route"] == "A"
    return answer


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("n", [1, 2, 7, 63, 64, 65])
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_handed_off_after_exactly_n_relay_tokens(
    fleet: Any, prompt: Prompt, strategy: str, n: int, sampling: str
) -> None:
    tokens = prompt(150)
    expected = await alone(fleet, tokens, n + 20, **SAMPLINGS[sampling])
    answer = await fleet.ask(await fleet.driver(*relayed(strategy, n)), tokens, n + 20, **SAMPLINGS[sampling])
    assert answer.tokens == expected.tokens
    assert answer.finish.reason == expected.finish.reason == "length"
    timeline = answer.timeline
    assert timeline["route"] == "P-RLD-MD"
    assert timeline["tokens"] == {"prefill": 1, "relay": n, "main": 19}
    assert timeline["handoff"]["sealed_at"] == n + 1
    assert timeline["handoff"]["strategy"] == strategy
    await fleet.idle()


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_handed_off_wherever_the_strategy_says(fleet: Any, prompt: Prompt, strategy: str, sampling: str) -> None:
    tokens = prompt(500)
    expected = await alone(fleet, tokens, 100, **SAMPLINGS[sampling])
    # However slowly the KV comes: the relay leaves something to main.
    bound = "spec.handoff.config.max_relay_tokens=90"
    overrides = relayed(strategy) if strategy == "none" else (*relayed(strategy), bound)
    answer = await fleet.ask(await fleet.driver(*overrides), tokens, 100, **SAMPLINGS[sampling])
    assert answer.tokens == expected.tokens
    counts = answer.timeline["tokens"]
    assert counts["relay"] > 1
    assert (counts["main"] == 0) == (strategy == "none")
    assert sum(counts.values()) == 100
    await fleet.idle()


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_without_a_relay(fleet: Any, prompt: Prompt, sampling: str) -> None:
    tokens = prompt(150)
    expected = await alone(fleet, tokens, 40, **SAMPLINGS[sampling])
    answer = await fleet.ask(
        await fleet.driver("spec.routing={plugin: never-relay}"), tokens, 40, **SAMPLINGS[sampling]
    )
    assert answer.tokens == expected.tokens
    assert answer.timeline["route"] == "P-MD"
    assert answer.timeline["tokens"] == {"prefill": 1, "relay": 0, "main": 39}
    await fleet.idle()


@pytest.mark.parametrize("strategy", [*STRATEGIES, None])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 128])
async def test_prompts_around_the_bounds_of_blocks(
    fleet: Any, prompt: Prompt, length: int, strategy: str | None
) -> None:
    tokens = prompt(length)
    overrides = relayed(strategy, 3) if strategy else ("spec.routing={plugin: never-relay}",)
    expected = await alone(fleet, tokens, 20)
    answer = await fleet.ask(await fleet.driver(*overrides), tokens, 20)
    assert answer.tokens == [*expected.tokens]
    await fleet.idle()


@pytest.mark.parametrize("strategy", [*STRATEGIES, None])
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_short_answers(fleet: Any, prompt: Prompt, max_tokens: int, strategy: str | None) -> None:
    tokens = prompt(100)
    overrides = relayed(strategy) if strategy else ("spec.routing={plugin: never-relay}",)
    expected = await alone(fleet, tokens, max_tokens)
    answer = await fleet.ask(await fleet.driver(*overrides), tokens, max_tokens)
    assert answer.tokens == expected.tokens
    assert answer.finish.reason == "length"
    await fleet.idle()


@pytest.mark.parametrize("strategy", [*STRATEGIES, None])
@pytest.mark.parametrize(("length", "tier"), [(128, "prefill"), (127, "relay"), (122, "relay"), (100, "main")])
async def test_the_end_token_ends_it_on_every_tier(
    fleet: Any, prompt: Prompt, length: int, tier: str, strategy: str | None
) -> None:
    # The scripted engine says END at position 128; the relay may make 7 tokens.
    end = 257
    tokens = prompt(length)
    overrides = relayed(strategy, 7) if strategy else ("spec.routing={plugin: never-relay}",)
    expected = await alone(fleet, tokens, 100, stop_token_ids=(end,))
    answer = await fleet.ask(await fleet.driver(*overrides), tokens, 100, stop_token_ids=(end,))
    assert answer.tokens == expected.tokens
    assert answer.ids[-1] == end
    assert len(answer.tokens) == 129 - length
    assert answer.finish.reason == "stop"
    counts = answer.timeline["tokens"]
    assert counts[tier if strategy or tier == "prefill" else "main"] > 0
    if tier == "relay" and strategy:
        assert counts["main"] == 0
    await fleet.idle()


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_sixteen_at_once(fleet: Any, prompt: Prompt, strategy: str) -> None:
    driver = await fleet.driver(*relayed(strategy))
    prompts = [prompt(40 + 23 * i) for i in range(16)]
    sampling = [{"temperature": 0.8, "seed": i, "logprobs": 1} if i % 2 else {} for i in range(16)]
    expected = await asyncio.gather(*(alone(fleet, prompts[i], 30 + i, **sampling[i]) for i in range(16)))
    answers = await asyncio.gather(*(fleet.ask(driver, prompts[i], 30 + i, **sampling[i]) for i in range(16)))
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    await fleet.idle()
