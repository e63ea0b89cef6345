"""Three SGLang servers that move KV themselves under one graph: the tokens are those of one plain server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from pdd_runtime.errors import PddError
from pdd_runtime.ids import new_id
from pdd_runtime.pipeline import Driver, SessionRequest
from pdd_runtime.plugins.engine import Sampling
from tests.waiting import until

from . import sglang_graph
from .sglang_graph import POOLS, PROMPTS, ROUTES, Fleet, ask, back, busy, server_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

OWN_ROUTES = {route: overrides for route, overrides in ROUTES.items() if "kv-transfer" not in route}
"""What a relay has decoded it gives to nobody."""
TOKEN = 2 * 2 * 2 * 32 * 4
"""Bytes of a token's KV: layers, K and V, heads, elements, float32."""
PAGE = 16


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    engines = dict.fromkeys(POOLS, sglang_graph.sglang_pd())
    more = ("spec.model.dtype=float32",)
    with sglang_graph.fleet(tmp_path_factory.mktemp("native"), engines, "sglang-pd", more) as fleet:
        yield fleet


@pytest.mark.parametrize("route", OWN_ROUTES)
async def test_every_route_gives_the_tokens_of_one_plain_server(fleet: Fleet, route: str) -> None:
    """A tenant of its own for each, so that nothing is there before; all prompts at once, then again, when all is."""
    async with fleet.stack.driver(*OWN_ROUTES[route]) as driver:
        for _ in range(2):
            answers = await asyncio.gather(*(ask(fleet, driver, prompt, route) for prompt in PROMPTS.values()))
            assert {n: answer.ids for n, answer in zip(PROMPTS, answers, strict=True)} == fleet.expected
            for answer in answers:
                assert answer.timeline["route"] == route.partition(",")[0], answer.timeline["reason"]
                assert answer.timeline["tokens"]["main"] > 0
    await fleet.stack.idle()


@pytest.mark.parametrize("route", OWN_ROUTES)
async def test_the_kv_that_a_timeline_tells_of_has_left_the_prefill_server(fleet: Fleet, route: str) -> None:
    """By its own count, which is of whole pages: the prompt goes once to each reader, and then only what is new. A
    timeline tells of more where a reader's last pages were not yet known to be there."""
    readers = 2 if "RLD" in route else 1
    before, prompts = moved(fleet), readers * 333 * TOKEN
    async with fleet.stack.driver(*OWN_ROUTES[route]) as driver:
        answer = await ask(fleet, driver, PROMPTS[333], f"counted {route}")
    assert answer.ids == fleet.expected[333]
    transfers = answer.timeline["kv"]
    assert {transfer["edge"] for transfer in transfers} == {f"prefill->{pool}" for pool in POOLS[-readers:]}
    told = sum(transfer["bytes"] for transfer in transfers)
    await until(lambda: moved(fleet) - before >= prompts)
    assert prompts <= moved(fleet) - before <= prompts + len(transfers) * 3 * PAGE * TOKEN
    # The rest of a page goes again with every transfer.
    assert moved(fleet) - before <= told + len(transfers) * 2 * PAGE * TOKEN


def moved(fleet: Fleet) -> float:
    return fleet.count("prefill", "sglang:kv_transfer_total_mb_sum") * 2**20


async def test_routing_sees_what_the_servers_have_cached(fleet: Fleet) -> None:
    async with fleet.stack.driver(*OWN_ROUTES["P-MD"]) as driver:
        first = await ask(fleet, driver, PROMPTS[130], "seen")
        assert first.timeline["cached"]["prefill"] == 0
        again = await ask(fleet, driver, PROMPTS[130], "seen")
    assert again.ids == first.ids == fleet.expected[130]
    assert again.timeline["cached"]["prefill"] == 128
    (transfer,) = again.timeline["kv"]
    assert transfer["bytes"] < 2 * PAGE * TOKEN


@pytest.mark.parametrize("route", ["P-MD", "P-RLD-MD, catch-up"])
@pytest.mark.parametrize("tokens", [0, 1, 12])
async def test_a_client_that_goes_frees_all_servers(fleet: Fleet, route: str, tokens: int) -> None:
    async with fleet.stack.driver(*OWN_ROUTES[route]) as driver:
        request = asked(PROMPTS[333], f"gone {route} {tokens}")
        answer = driver.run(request)
        waiting = asyncio.ensure_future(anext(answer))
        if not tokens:
            await until(lambda: busy(fleet, "prefill") > 0, 60)
            waiting.cancel()
            await asyncio.wait({waiting})
        else:
            await waiting
            for _ in range(tokens - 1):
                await anext(answer)
        await answer.aclose()
    await fleet.stack.idle(within=120)
    for pool in POOLS:
        await until(lambda pool=pool: not busy(fleet, pool), 120)  # type: ignore[misc]


def asked(prompt: tuple[int, ...], salt: str, max_tokens: int = 600) -> SessionRequest:
    greedy = Sampling(temperature=0)
    return SessionRequest(id=new_id("req"), tokens=prompt, max_tokens=max_tokens, sampling=greedy, salt=salt)


async def test_a_killed_prefill_server_is_named_where_it_is_still_needed(fleet: Fleet) -> None:
    """Last: it takes a server's start. Main has the prompt, and yet cannot go on behind the relay."""
    async with fleet.stack.driver(*OWN_ROUTES["P-RLD-MD, one-shot"]) as driver:
        with pytest.raises(PddError) as caught:
            await kill_behind_the_third_token(fleet, driver, asked(PROMPTS[64], "killed"))
    assert "prefill" in caught.value.what
    await back(fleet)
    async with fleet.stack.driver(*OWN_ROUTES["P-MD"]) as driver:
        answer = await ask(fleet, driver, PROMPTS[64], "after")
    assert answer.ids == fleet.expected[64]
    await fleet.stack.idle(within=120)
    for pool in POOLS:
        await until(lambda pool=pool: not busy(fleet, pool), 120)  # type: ignore[misc]


async def kill_behind_the_third_token(fleet: Fleet, driver: Driver, request: SessionRequest) -> None:
    seen = 0
    async for _ in driver.run(request):
        seen += 1
        if seen == 3:
            os.kill(server_of(fleet.ports["prefill"]), signal.SIGKILL)
