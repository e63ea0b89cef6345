"""Prefill, relay and main on vLLM, one server each, under one graph: what clients get is what one vLLM server says, and
main computes nothing that came over the line."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from pdd_vllm import testing

from pdd_runtime.plugins.engine import Sampling
from pdd_runtime.testing.tiny_model import write_tiny_model
from tests.waiting import until

from .vllm_graph import PATIENCE, VllmStack, complete

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

RELAY, LENGTH = 12, 40
"""Tokens that the relay makes at least, and of the answer."""
LONG = 1800
"""Of an answer in whose middle something can happen."""
BOUNDS = f"{{min_relay_tokens: {RELAY}, max_relay_tokens: {RELAY}}}"
RELAYED = ("spec.routing={plugin: always-relay}", f"spec.handoff={{plugin: one-shot, config: {BOUNDS}}}")
DIRECT = ("spec.routing={plugin: never-relay}",)
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    testing.interpreter()
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context=2048, seed=3)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with testing.plain(model, tmp_path_factory.mktemp("plain")) as url:
        yield url


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmStack]:
    overrides = ("spec.links.wan.rtt=20ms", *RELAYED)
    with VllmStack(model, tmp_path_factory.mktemp("state"), *overrides) as stack:
        yield stack


def prompt(n: int, which: int) -> tuple[int, ...]:
    return tuple(random.Random(which).choices(range(3, 250), k=n))


@pytest.mark.parametrize("length", [5, 32, 150, 333])
async def test_main_goes_on_from_the_relay_s_tokens_and_computes_no_more_than_these(
    stack: VllmStack, alone: str, length: int
) -> None:
    tokens = prompt(length, length)
    before = stack.sources("main")
    async with stack.driver() as driver:
        got, timeline = await stack.ask(driver, tokens, LENGTH, GREEDY)
    after = stack.sources("main")
    assert [token.id for token in got] == complete(alone, tokens, LENGTH)
    assert timeline["route"] == "P-RLD-MD", timeline["reason"]
    assert timeline["tokens"]["prefill"] == 1
    assert timeline["tokens"]["relay"] == RELAY
    grown = {source: after[source] - before[source] for source in after}
    assert grown == {"external_kv_transfer": length, "local_cache_hit": 0, "local_compute": 1 + RELAY}
    wan = next(row for row in timeline["kv"] if row["edge"] == "prefill->main")
    assert wan["blocks_sent"] == -(-length // testing.BLOCK)
    await stack.idle(PATIENCE)


@pytest.mark.parametrize("length", [7, 64, 201])
async def test_main_decodes_from_the_prompt_s_kv_without_a_relay(stack: VllmStack, alone: str, length: int) -> None:
    tokens = prompt(length, 1000 + length)
    before = stack.sources("main")
    async with stack.driver(*DIRECT) as driver:
        got, timeline = await stack.ask(driver, tokens, LENGTH, GREEDY)
    after = stack.sources("main")
    assert [token.id for token in got] == complete(alone, tokens, LENGTH)
    assert timeline["route"] == "P-MD", timeline["reason"]
    grown = {source: after[source] - before[source] for source in after}
    assert grown == {"external_kv_transfer": length, "local_cache_hit": 0, "local_compute": 1}
    await stack.idle(PATIENCE)


async def test_many_at_once_each_get_their_own_answer(stack: VllmStack, alone: str) -> None:
    prompts = [prompt(40 + 17 * which, 2000 + which) for which in range(6)]
    async with stack.driver() as driver:
        answers = await asyncio.gather(*(stack.ask(driver, tokens, LENGTH, GREEDY) for tokens in prompts))
    for tokens, (got, _) in zip(prompts, answers, strict=True):
        assert [token.id for token in got] == complete(alone, tokens, LENGTH)
    await stack.idle(PATIENCE)


async def test_an_openai_client_streams_the_same_answer_with_its_logprobs(stack: VllmStack, alone: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=PATIENCE) as client:
        models = (await client.models.list()).data
        text = "What is the colour of the sea?"
        stream = await client.completions.create(
            model=models[0].id,
            prompt=text,
            max_tokens=LENGTH,
            temperature=0,
            stream=True,
            logprobs=2,
            extra_body={"ignore_eos": True},
        )
        values = [
            value
            async for chunk in stream
            for choice in chunk.choices
            if choice.logprobs is not None
            for value in choice.logprobs.token_logprobs or ()
        ]
        whole = await client.completions.create(
            model=models[0].id,
            prompt=text,
            max_tokens=LENGTH,
            temperature=0,
            logprobs=2,
            extra_body={"ignore_eos": True},
        )
    assert len(values) == LENGTH
    assert whole.choices[0].logprobs is not None
    # What was found in a cache rounds otherwise than what was computed with its neighbours.
    assert values == pytest.approx(whole.choices[0].logprobs.token_logprobs, abs=1e-3)
    body = {"prompt": text, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        reference = (await client.post(f"{alone}/v1/completions", json=body)).raise_for_status().json()
    assert values == pytest.approx(reference["choices"][0]["logprobs"]["token_logprobs"], abs=1e-3)
    await stack.idle(PATIENCE)


async def test_a_client_that_leaves_frees_the_servers(stack: VllmStack) -> None:
    body = {"prompt": list(prompt(100, 5)), "max_tokens": 1500, "ignore_eos": True, "stream": True, "temperature": 0}
    async with (
        httpx.AsyncClient(timeout=PATIENCE) as client,
        client.stream("POST", f"{stack.url}/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        async for _ in answer.aiter_lines():
            if stack.running("relay") or stack.running("main"):
                break
    await until(lambda: not any(stack.running(pool) for pool in stack.ports), PATIENCE)
    await stack.idle(PATIENCE)


async def test_a_killed_main_server_says_nothing_wrong_and_comes_back(stack: VllmStack, alone: str) -> None:
    """What it was decoding goes on elsewhere; later sessions are served."""
    tokens = prompt(120, 6)
    await stack.ready_again("main", 0)
    worker = stack.worker("main")

    def kill() -> None:
        for pid in stack.processes("main"):
            os.kill(pid, signal.SIGKILL)

    async with stack.driver(*DIRECT) as driver:
        got, timeline = await stack.ask(driver, tokens, LONG, GREEDY, {100: kill})
    assert [token.id for token in got] == complete(alone, tokens, LONG)
    assert {lost["role"] for lost in timeline["recoveries"]} == {"main"}
    await stack.ready_again("main", worker["pid"])
    async with stack.driver() as driver:
        again, timeline = await stack.ask(driver, tokens, LENGTH, GREEDY)
    assert [token.id for token in again] == complete(alone, tokens, LENGTH)
    assert timeline["tokens"]["main"] > 0
    await stack.idle(PATIENCE)


async def test_a_killed_worker_leaves_no_process_of_its_server(stack: VllmStack, alone: str) -> None:
    await stack.ready_again("main", 0)
    worker, before = stack.worker("main"), set(stack.processes("main"))
    assert len(before) >= 3, "a server has its core and its workers"
    os.kill(worker["pid"], signal.SIGKILL)
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in before), PATIENCE)
    await stack.ready_again("main", worker["pid"])
    tokens = prompt(70, 7)
    async with stack.driver() as driver:
        got, _ = await stack.ask(driver, tokens, LENGTH, GREEDY)
    assert [token.id for token in got] == complete(alone, tokens, LENGTH)
    await stack.idle(PATIENCE)
