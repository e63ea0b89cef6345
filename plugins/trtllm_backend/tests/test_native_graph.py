"""A graph on TensorRT-LLM's own disaggregated serving: the stand-ins move the KV, and the tokens are those of one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pdd_trtllm.testing.transceiver import LINE

from pdd_runtime.ids import new_id
from pdd_runtime.pipeline import Finish, SessionRequest
from plugins.trtllm_backend.tests.answers import GREEDY, LENGTH, NAMES, RELAY, alone, answers, prompt
from plugins.trtllm_backend.tests.stacks import DIRECT, HANDED_OFF, many_at_once, servers, stacked, streamed
from tests.integration.stack import Stack
from tests.waiting import until

CONFIG: dict[str, Any] = {"data_plane": "native", "transceiver": "UCX", "transfer_timeout": "60s"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def stack(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stacked("trtllm-disagg", tiny, tmp_path_factory.mktemp("state"), CONFIG, **{LINE: "0.1"}) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(tiny: Path) -> dict[str, list[int]]:
    return await answers(tiny)


async def test_the_engines_move_the_kv_and_the_tokens_are_those_of_one(
    stack: Stack, tiny: Path, expected: dict[str, list[int]]
) -> None:
    for route, names, overrides in (("P-MD", NAMES[:2], DIRECT), ("P-RLD-MD", NAMES[2:], HANDED_OFF)):
        async with stack.driver(*overrides) as driver:
            for name in names:
                asked = await prompt(tiny, name)
                tokens, timeline = await stack.ask(driver, asked, LENGTH, GREEDY)
                assert timeline["route"] == route, timeline["reason"]
                assert [token.id for token in tokens] == expected[name], (route, name)
                readers = ("main",) if route == "P-MD" else ("main", "relay")
                assert sorted(moved["edge"] for moved in timeline["kv"]) == [f"prefill->{name}" for name in readers]
                assert all(moved["bytes"] > 0 for moved in timeline["kv"]), timeline
                if route == "P-RLD-MD":
                    assert timeline["tokens"] == {"prefill": 1, "relay": RELAY, "main": LENGTH - 1 - RELAY}
    await stack.idle(60)


async def test_many_at_once_over_the_relay(stack: Stack, tiny: Path, expected: dict[str, list[int]]) -> None:
    await many_at_once(stack, tiny, expected)


async def test_a_client_that_goes_ends_its_request_everywhere(stack: Stack) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 800, "stream": True}
    async with aclosing(streamed(stack.url, body | {"temperature": 0})) as pieces:
        async for _ in pieces:
            break
    await stack.idle(60)


async def test_a_prefill_that_is_killed_before_its_kv_is_read_costs_a_prefill_and_no_token(
    stack: Stack, tiny: Path, expected: dict[str, list[int]]
) -> None:
    """Main computes the prompt itself, and says so."""
    asked = tuple(reversed(await prompt(tiny, "emoji")))
    [server] = servers(stack, "prefill")
    async with stack.driver(*DIRECT) as driver:
        request = SessionRequest(id=new_id("req"), tokens=asked, max_tokens=LENGTH, sampling=GREEDY)
        tokens = []
        async with aclosing(driver.run(request)) as items:
            async for item in items:
                if isinstance(item, Finish):
                    break
                if not tokens:
                    os.kill(server, signal.SIGKILL)
                tokens.append(item.id)
        timeline = stack.timelines.get(request.id)
        assert timeline is not None
        assert [tokens] == await alone(tiny, asked)
        assert any("it will be recomputed" in event["what"] for event in timeline.body()["events"]), timeline.body()
    await until(lambda: "prefill/0" not in stack.loads())
    await until(lambda: "prefill/0" in stack.loads(), 300)
    async with stack.driver(*DIRECT) as driver:
        again, _ = await stack.ask(driver, await prompt(tiny, "question"), LENGTH, GREEDY)
    assert [token.id for token in again] == expected["question"]
