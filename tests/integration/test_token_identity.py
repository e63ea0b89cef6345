"""Whatever the graph, the strategy and the moment of the handoff: the tokens are those of one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from pdd_runtime.frontend.language import Language
from pdd_runtime.pipeline import Driver
from pdd_runtime.plugins.engine import Sampling, Token
from tests.integration.prompts import PROMPTS
from tests.integration.stack import Stack

EXACT = "spec.model.mode=exact"
FAST_LINE = "spec.links.wan.rtt=4ms"
HANDOFFS = (1, 2, 7, 63, 64, 65)
LONG = 63
MOVES_TOKENS = ("catch-up", "one-shot")
RELAY_KV = "spec.edges.3={from: relay, to: main, carries: kv, transport: {plugin: tcp}, link: wan}"
BEHIND = 6
"""Output tokens after the handoff."""
SHORT = 17
"""Output tokens where nothing is handed off: one more than a block has, so each answer goes on into another."""

Key = tuple[str, bool]
"""Prompt by name, seeded or greedy."""
Tokens = dict[Key, list[Token]]
Plan = dict[tuple[str, int], list[Key]]
"""What is asked, by the strategy and how many tokens the relay makes."""


def sampling(name: str, seeded: bool) -> Sampling:
    if not seeded:
        return Sampling(temperature=0, logprobs=0)
    return Sampling(temperature=0.8, seed=sum(name.encode()), logprobs=0)


async def encode(driver: Driver) -> dict[str, tuple[int, ...]]:
    language = Language(await driver.tokenizer())
    return {
        name: await language.encode(language.chat(messages), add_special_tokens=False)
        for name, messages in PROMPTS.items()
    }


async def answers(
    stack: Stack, keys: Iterable[Key], max_tokens: int, *overrides: str
) -> tuple[Tokens, dict[Key, dict[str, Any]]]:
    """All at once: so every answer is computed in a batch of changing make-up."""
    keys = list(keys)
    async with stack.driver(*overrides) as driver:
        prompts = await encode(driver)
        limit = asyncio.Semaphore(16)

        async def ask(name: str, seeded: bool) -> tuple[list[Token], dict[str, Any]]:
            async with limit:
                return await stack.ask(driver, prompts[name], max_tokens, sampling(name, seeded))

        done = await asyncio.gather(*(ask(*key) for key in keys))
    return (
        {key: tokens for key, (tokens, _) in zip(keys, done, strict=True)},
        {key: timeline for key, (_, timeline) in zip(keys, done, strict=True)},
    )


def same(expected: Tokens, got: Tokens, max_tokens: int) -> None:
    """Ids, positions and logprobs, to the bit."""
    for key, tokens in got.items():
        assert tokens == expected[key][:max_tokens], key


def handed_off(timelines: dict[Key, dict[str, Any]], tokens: Tokens, relay_tokens: int) -> int:
    """How many went to main after exactly that many relay tokens; an answer may be shorter."""
    count = 0
    for key, timeline in timelines.items():
        assert timeline["route"] == "P-RLD-MD", timeline["reason"]
        if timeline["tokens"]["main"]:
            assert timeline["tokens"]["relay"] == relay_tokens, key
            assert timeline["handoff"]["sealed_at"] == relay_tokens + 1, key
            count += 1
        assert sum(timeline["tokens"].values()) == len(tokens[key])
    return count


def every_key() -> list[Key]:
    return [(name, seeded) for name in PROMPTS for seeded in (False, True)]


async def check(state: Path, source: str, plan: Plan, *others: str) -> dict[str, int]:
    """Compare PDD, each (strategy, handoff point) of `plan` with its prompts, and `others` to one engine."""
    model = (f"spec.model.source={source}", EXACT)
    keys = sorted({key for each in plan.values() for key in each})
    longest = max(SHORT, *(relay_tokens + 1 + BEHIND for _, relay_tokens in plan))
    handoffs: dict[str, int] = {}
    with Stack("aggregated", state / "agg", *model, engine="torch") as stack:
        expected, _ = await answers(stack, keys, longest)
    for graph in others:
        line = [FAST_LINE] * (graph == "pd-cross")
        with Stack(graph, state / graph, *model, *line, engine="torch") as stack:
            same(expected, (await answers(stack, keys, SHORT))[0], SHORT)
    with Stack("quickstart-torch", state / "pdd", *model, FAST_LINE, RELAY_KV) as stack:
        for (strategy, relay_tokens), some in plan.items():
            bounds = f"{{min_relay_tokens: {relay_tokens}, max_relay_tokens: {relay_tokens}}}"
            max_tokens = relay_tokens + 1 + BEHIND
            got, timelines = await answers(
                stack,
                some,
                max_tokens,
                "spec.routing={plugin: always-relay}",
                f"spec.handoff={{plugin: {strategy}, config: {bounds}}}",
            )
            same(expected, got, max_tokens)
            handoffs[f"{strategy} after {relay_tokens}"] = handed_off(timelines, got, relay_tokens)
        got, timelines = await answers(
            stack, keys, SHORT, "spec.routing={plugin: always-relay}", "spec.handoff={plugin: none}"
        )
        same(expected, got, SHORT)
        assert not any(timeline["tokens"]["main"] for timeline in timelines.values())
        await stack.idle()
    return handoffs


EVERY_HANDOFF = [(strategy, n) for n in HANDOFFS for strategy in (*MOVES_TOKENS, "kv-transfer")]


def shared_out() -> Plan:
    """Every handoff, and each key with every strategy and at every handoff point: of the long answers, a third each."""
    keys, plan = every_key(), Plan()
    for strategy, n in EVERY_HANDOFF:
        turn = (HANDOFFS.index(n) + (*MOVES_TOKENS, "kv-transfer").index(strategy)) % 3
        plan[strategy, n] = keys if n < LONG else keys[turn::3]
    return plan


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_tiny_model_gives_one_engines_tokens_after_every_handoff(tiny: Path, tmp_path: Path) -> None:
    handoffs = await check(tmp_path, str(tiny), shared_out(), "pd-intra", "pd-cross")
    assert set(handoffs) == {f"{strategy} after {n}" for strategy, n in EVERY_HANDOFF}
    assert all(count > 0 for count in handoffs.values()), handoffs


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(4 * 3600)
async def test_smollm2_gives_one_engines_tokens(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--full-identity"):
        plan, others = dict.fromkeys(EVERY_HANDOFF, every_key()), ("pd-intra", "pd-cross")
    else:
        # With the one graph beside PDD that has a line; without one, its engines do the same.
        names = ("one-word", "longer-story", "two-turns", "chinese", "emoji", "code")
        keys = [(name, which % 2 == 1) for which, name in enumerate(names)]
        plan, others = dict.fromkeys([("catch-up", 7), ("one-shot", 2), ("kv-transfer", 1)], keys), ("pd-cross",)
    handoffs = await check(tmp_path, "smollm2", plan, *others)
    assert all(count > 0 for count in handoffs.values()), handoffs
