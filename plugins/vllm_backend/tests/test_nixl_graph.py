"""vLLM's own transfer under one graph of real servers. What clients get is what one vLLM server says; what was moved is
what vLLM itself says that it has moved."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pdd_vllm import testing
from pdd_vllm.nixl import LATE

from pdd_runtime.clock import now
from pdd_runtime.plugins.engine import Sampling
from pdd_runtime.server.process import free_port
from pdd_runtime.testing.tiny_model import write_tiny_model
from tests.waiting import until

from .vllm_graph import POOLS, VllmStack, complete

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

RELAY, LENGTH = 8, 24
"""Tokens that the relay makes at least, and of the answer."""
BOUNDS = f"{{min_relay_tokens: {RELAY}, max_relay_tokens: {RELAY}}}"
RELAYED = ("spec.routing={plugin: always-relay}", f"spec.handoff={{plugin: one-shot, config: {BOUNDS}}}")
DIRECT = ("spec.routing={plugin: never-relay}",)
GREEDY = Sampling(temperature=0)
BLOCK = testing.BLOCK
PATIENCE = 600.0
"""Seconds: NIXL on a CPU stands still now and then, up to 42 of them at a time."""
LENGTHS = (5, 64, 150, 333)
CACHED = 4 * BLOCK + 7


def prompt(n: int, which: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(1000 * which + n).choices(range(3, 250), k=n))


class NixlStack(VllmStack):
    """The graph `vllm-nixl`, as it is."""

    graph = "vllm-nixl"

    def config(self) -> dict[str, Any]:
        config = testing.native("20min").model_dump(mode="json", exclude_unset=True)
        return {**config, "start_timeout": testing.START, "lease": "20min", "nixl_port": free_port()}

    async def acquainted(self) -> None:
        """Return when both readers have read from prefill. The first question to a server has five seconds, and may
        need more on a slow machine: the prompt is then computed, as it must be."""
        begun = now()
        async with self.driver() as driver:
            for which in itertools.count(100):
                await self.ask(driver, prompt(BLOCK, which), LENGTH, GREEDY)
                read = self.transferred()
                if read["relay"] and read["main"]:
                    return
                assert now() < begun + PATIENCE, read

    def transferred(self) -> dict[str, int]:
        """Pool → tokens whose KV came from another server."""
        return {pool: self.sources(pool)["external_kv_transfer"] for pool in POOLS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    testing.interpreter()
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context=2048, seed=3)


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], list[int]]:
    """What one server says behind each prompt; it has gone before the others come."""
    with testing.plain(model, tmp_path_factory.mktemp("plain")) as url:
        asked = [prompt(n, which) for n in LENGTHS for which in (0, 1)] + [prompt(CACHED), prompt(CACHED)[:-BLOCK]]
        return {tokens: complete(url, tokens, LENGTH) for tokens in asked}


@pytest.fixture(scope="module")
def stack(
    expected: dict[tuple[int, ...], list[int]], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[NixlStack]:
    with NixlStack(model, tmp_path_factory.mktemp("state"), "spec.model.dtype=float32", *RELAYED) as stack:
        asyncio.run(stack.acquainted())
        yield stack
        assert not any(stack.metrics(pool).value(LATE) for pool in POOLS)


@pytest.mark.parametrize("length", LENGTHS)
async def test_main_reads_the_prompt_s_kv_and_extends_over_the_relay_s_tokens(
    stack: NixlStack, expected: dict[tuple[int, ...], list[int]], length: int
) -> None:
    tokens = prompt(length)
    before, sources = stack.transferred(), stack.sources("main")
    async with stack.driver() as driver:
        got, timeline = await stack.ask(driver, tokens, LENGTH, GREEDY)
    assert [token.id for token in got] == expected[tokens]
    assert timeline["route"] == "P-RLD-MD", timeline["reason"]
    assert (timeline["tokens"]["prefill"], timeline["tokens"]["relay"]) == (1, RELAY)
    after = stack.transferred()
    moved = {pool: after[pool] - before[pool] for pool in POOLS}
    assert moved == {"prefill": 0, "relay": length, "main": length}, timeline["events"]
    # Whole blocks are found, what is behind them computed: the prompt's rest and what was made since.
    whole = length // BLOCK * BLOCK
    grown = {source: n - sources[source] for source, n in stack.sources("main").items()}
    assert grown["local_cache_hit"] == whole
    assert grown["local_compute"] == length - whole + 1 + RELAY
    wan = next(row for row in timeline["kv"] if row["edge"] == "prefill->main")
    assert (wan["blocks_sent"], wan["blocks_cached"]) == (-(-length // BLOCK), 0)
    await stack.idle(PATIENCE)


@pytest.mark.parametrize("length", LENGTHS)
async def test_main_decodes_without_a_relay(
    stack: NixlStack, expected: dict[tuple[int, ...], list[int]], length: int
) -> None:
    tokens = prompt(length, 1)
    before = stack.transferred()
    async with stack.driver(*DIRECT) as driver:
        got, timeline = await stack.ask(driver, tokens, LENGTH, GREEDY)
    assert [token.id for token in got] == expected[tokens]
    assert timeline["route"] == "P-MD", timeline["reason"]
    after = stack.transferred()
    moved = {pool: after[pool] - before[pool] for pool in POOLS}
    assert moved == {"prefill": 0, "relay": 0, "main": length}, timeline["events"]
    await stack.idle(PATIENCE)


async def test_what_the_servers_have_is_seen_and_does_not_cross_again(
    stack: NixlStack, expected: dict[tuple[int, ...], list[int]]
) -> None:
    shorter, longer = prompt(CACHED)[:-BLOCK], prompt(CACHED)
    async with stack.driver(*DIRECT) as driver:
        got, _ = await stack.ask(driver, shorter, LENGTH, GREEDY)
        assert [token.id for token in got] == expected[shorter]
        before = stack.transferred()["main"]
        got, timeline = await stack.ask(driver, longer, LENGTH, GREEDY)
    assert [token.id for token in got] == expected[longer]
    there = len(shorter) // BLOCK * BLOCK
    assert timeline["cached"] == {"prefill": there, "main": there}
    assert stack.transferred()["main"] - before == len(longer) - there
    wan = next(row for row in timeline["kv"] if row["edge"] == "prefill->main")
    assert (wan["blocks_cached"], wan["blocks_sent"]) == (there // BLOCK, -(-len(longer) // BLOCK) - there // BLOCK)
    await stack.idle(PATIENCE)


async def test_a_client_that_leaves_frees_all_servers(stack: NixlStack) -> None:
    body = {"prompt": list(prompt(100, 5)), "max_tokens": 1500, "ignore_eos": True, "stream": True, "temperature": 0}
    async with (
        httpx.AsyncClient(timeout=PATIENCE) as client,
        client.stream("POST", f"{stack.url}/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        async for _ in answer.aiter_lines():
            if stack.running("main"):
                break
    await until(lambda: not any(stack.running(pool) for pool in POOLS), PATIENCE)
    await stack.idle(PATIENCE)
