"""Three SGLang servers under one graph: the tokens are those of one plain server, and little is computed twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
from openai import AsyncOpenAI

from pdd_runtime.ids import new_id
from pdd_runtime.pipeline import Driver, SessionRequest
from pdd_runtime.plugins.engine import Sampling, Token
from tests.waiting import until

from . import sglang_graph
from .sglang_graph import LONG, POOLS, PROMPTS, ROUTES, TOKENS, Fleet, ask, back, busy, server_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    engines = dict.fromkeys(POOLS, sglang_graph.sglang())
    with sglang_graph.fleet(tmp_path_factory.mktemp("pdd"), engines) as fleet:
        yield fleet


@pytest.mark.parametrize("route", ROUTES)
async def test_every_route_gives_the_tokens_of_one_plain_server(fleet: Fleet, route: str) -> None:
    """A tenant of its own for each, so that nothing is there before; all prompts at once, then again, when all is."""
    async with fleet.stack.driver(*ROUTES[route]) as driver:
        for _ in range(2):
            answers = await asyncio.gather(*(ask(fleet, driver, prompt, route) for prompt in PROMPTS.values()))
            assert {n: answer.ids for n, answer in zip(PROMPTS, answers, strict=True)} == fleet.expected
            for answer in answers:
                assert answer.timeline["route"] == route.partition(",")[0], answer.timeline["reason"]
                if "RLD" in route:
                    assert answer.timeline["tokens"]["main"] > 0, "nothing was handed off"
    await fleet.stack.idle()


@pytest.mark.parametrize("n", [130, 333])
async def test_main_computes_the_handed_off_ids_and_loads_the_prompt(fleet: Fleet, n: int) -> None:
    before = {pool: counted(fleet, pool) for pool in POOLS}
    async with fleet.stack.driver(*ROUTES["P-RLD-MD, one-shot"]) as driver:
        answer = await ask(fleet, driver, PROMPTS[n], f"counted {n}")
    assert answer.ids == fleet.expected[n]
    known = answer.timeline["tokens"]["prefill"] + answer.timeline["tokens"]["relay"]

    def told(pool: str) -> dict[str, float]:
        return {name: value - before[pool][name] for name, value in counted(fleet, pool).items()}

    # Counters are written a moment after the answer.
    await until(lambda: told("main")["host"] > 0)
    assert told("main") == {"computed": known, "host": n, "device": 0}
    await until(lambda: told("relay")["host"] > 0)
    assert told("relay") == {"computed": 1, "host": n, "device": 0}
    assert told("prefill")["computed"] == n


def counted(fleet: Fleet, pool: str) -> dict[str, float]:
    return {
        "computed": fleet.count(pool, "sglang:realtime_tokens_total", mode="prefill_compute"),
        "host": fleet.count(pool, "sglang:cached_tokens_total", cache_source="host"),
        "device": fleet.count(pool, "sglang:cached_tokens_total", cache_source="device"),
    }


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{fleet.stack.url}/v1", api_key="none", timeout=LONG, max_retries=0) as client:
        yield client


async def test_an_openai_client_streams_and_is_told_the_truth(fleet: Fleet, client: AsyncOpenAI) -> None:
    model = (await client.models.list()).data[0].id
    prompt = list(PROMPTS[130])
    wanted = bytes(byte for byte in fleet.expected[130] if byte < 256).decode(errors="replace")
    for cached in (0, 130):
        stream = await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True, "cache_salt": "openai"},
        )
        text, usage = "", None
        async for chunk in stream:
            text += "".join(choice.text for choice in chunk.choices)
            usage = chunk.usage or usage
        assert text == wanted
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (130, TOKENS)
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == cached


async def test_a_client_that_goes_frees_all_servers(fleet: Fleet, client: AsyncOpenAI) -> None:
    model = (await client.models.list()).data[0].id
    for chunks in (0, 1, 12):
        stream = await client.completions.create(
            model=model,
            prompt=list(PROMPTS[333]),
            max_tokens=600,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "cache_salt": f"gone {chunks}"},
        )
        for _ in range(chunks):
            await anext(stream)
        await stream.close()
        await fleet.stack.idle(within=120)
        for pool in POOLS:
            await until(lambda pool=pool: not busy(fleet, pool), 120)  # type: ignore[misc]


async def test_a_killed_server_s_sessions_go_on_and_it_comes_again(fleet: Fleet) -> None:
    """Last: it takes a server's start."""
    async with fleet.stack.driver(*ROUTES["P-MD"]) as driver:
        answers = []
        for kills in (False, True):
            request = SessionRequest(
                id=new_id("req"), tokens=PROMPTS[64], max_tokens=200, sampling=Sampling(temperature=0), salt="killed"
            )
            answers.append(await answer_of(fleet, driver, request, kills=kills))
    assert answers[0] == answers[1]
    await back(fleet)
    async with fleet.stack.driver(*ROUTES["P-MD"]) as driver:
        answer = await ask(fleet, driver, PROMPTS[64], "after")
    assert answer.ids == fleet.expected[64]
    await fleet.stack.idle()


async def answer_of(fleet: Fleet, driver: Driver, request: SessionRequest, *, kills: bool) -> list[int]:
    """Its tokens; main's server is killed behind the fifth."""
    ids: list[int] = []
    async for token in driver.run(request):
        if isinstance(token, Token):
            ids.append(token.id)
        if kills and len(ids) == 5:
            os.kill(server_of(fleet.ports["main"]), signal.SIGKILL)
    return ids
