"""Whole graphs on the stand-in, brought up by the command line behind the frontend: tokens are those of one engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from plugins.trtllm_backend.tests.answers import GREEDY, LENGTH, NAMES, RELAY, answers, prompt
from plugins.trtllm_backend.tests.stacks import DIRECT, HANDED_OFF, many_at_once, servers, stacked, streamed
from tests.integration.prompts import PROMPTS
from tests.integration.stack import Stack
from tests.waiting import until

CONFIG: dict[str, Any] = {"kv_memory": "32MiB"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def stack(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    state = tmp_path_factory.mktemp("state")
    with stacked(
        "trtllm", tiny, state, CONFIG, "spec.links.wan.rtt=4ms", "spec.links.wan.bandwidth=200Mbit/s"
    ) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(tiny: Path) -> dict[str, list[int]]:
    return await answers(tiny)


async def test_a_prompt_goes_straight_to_main_or_over_the_relay_and_the_tokens_are_the_same(
    stack: Stack, tiny: Path, expected: dict[str, list[int]]
) -> None:
    for route, overrides in (("P-MD", DIRECT), ("P-RLD-MD", HANDED_OFF)):
        async with stack.driver(*overrides) as driver:
            for name in NAMES:
                tokens, timeline = await stack.ask(driver, await prompt(tiny, name), LENGTH, GREEDY)
                assert timeline["route"] == route, timeline["reason"]
                assert [token.id for token in tokens] == expected[name], (route, name)
                if route == "P-RLD-MD":
                    assert timeline["tokens"] == {"prefill": 1, "relay": RELAY, "main": LENGTH - 1 - RELAY}
    await stack.idle(60)


async def test_many_at_once_over_the_relay(stack: Stack, tiny: Path, expected: dict[str, list[int]]) -> None:
    await many_at_once(stack, tiny, expected)


async def test_the_api_streams_what_the_engine_makes(stack: Stack, expected: dict[str, list[int]]) -> None:
    body = {"model": "tiny", "messages": PROMPTS["question"], "max_tokens": LENGTH, "temperature": 0, "stream": True}
    text = "".join([piece async for piece in streamed(stack.url, body)])
    assert text.encode() == bytes(expected["question"])
    await stack.idle(60)


async def test_a_client_that_goes_ends_its_request_everywhere(stack: Stack) -> None:
    body = {"model": "tiny", "messages": PROMPTS["question"], "max_tokens": 800, "temperature": 0, "stream": True}
    async with aclosing(streamed(stack.url, body)) as pieces:
        async for _ in pieces:
            break
    await stack.idle(60)


async def test_a_server_that_is_killed_takes_its_worker_along_and_both_come_back(
    stack: Stack, tiny: Path, expected: dict[str, list[int]]
) -> None:
    """Main's, in the midst of an answer: that goes on elsewhere; the next one finds main again."""
    [before] = servers(stack, "main")
    question = await prompt(tiny, "question")
    async with stack.driver(*DIRECT) as driver:
        undisturbed, _ = await stack.ask(driver, question, 800, GREEDY)
        asking = asyncio.create_task(stack.ask(driver, question, 800, GREEDY))
        await until(lambda: stack.loads().get("main/0", {}).get("sessions"))
        os.kill(before, signal.SIGKILL)
        tokens, timeline = await asking
    assert [token.id for token in tokens] == [token.id for token in undisturbed]
    assert {(lost["role"], lost["worker"]) for lost in timeline["recoveries"]} == {("main", "main/0")}
    await until(lambda: "main/0" in stack.loads(), 300)
    assert before not in servers(stack, "main")
    async with stack.driver(*DIRECT) as driver:
        tokens, timeline = await stack.ask(driver, question, LENGTH, GREEDY)
    assert timeline["route"] == "P-MD"
    assert [token.id for token in tokens] == expected["question"]
