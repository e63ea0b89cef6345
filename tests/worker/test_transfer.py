"""Promises of KV on its way from one worker process to another."""

from __future__ import annotations

import asyncio
import random
import signal
from typing import Any

import pytest

from pdd_runtime.errors import PddError, TransferError
from pdd_runtime.plugins.engine import (
    DecodeEvent,
    DecodeRequest,
    Extended,
    PrefillEvent,
    PrefillRequest,
    Sampling,
    Tokens,
)
from pdd_runtime.plugins.messages import Fetched, FetchEvent, Fetching, FetchProgress, FetchRequest
from tests.waiting import PATIENCE

GREEDY = Sampling(temperature=0)
ENGINE = "spec.pools.{}.engine.config.{}"


def text(n: int, which: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(which).choices(range(32, 127), k=n))


class Route:
    """P and MD, driven as a driver does it."""

    def __init__(self, prefill: Any, main: Any) -> None:
        self.p, self.md = prefill, main

    async def connect(self) -> Route:
        self.to_p, self.to_md = await self.p.connect(), await self.md.connect()
        return self

    def request(self, request_id: str, tokens: tuple[int, ...], timeout: float = PATIENCE) -> FetchRequest:
        return FetchRequest(
            id=request_id,
            tokens=tokens,
            transport="tcp",
            endpoint=self.p.member.transports["tcp"] if self.p.member else "127.0.0.1:1",
            epoch=self.p.key.epoch,
            source="prefill",
            layout=self.p.member.info.layout if self.p.member else None,
            timeout=timeout,
        )

    def fetching(self, request_id: str, tokens: tuple[int, ...], timeout: float = PATIENCE) -> Any:
        return self.to_md.stream("kv.fetch", self.request(request_id, tokens, timeout), FetchEvent, timeout=None)

    def prefilling(self, request_id: str, tokens: tuple[int, ...]) -> Any:
        request = PrefillRequest(id=request_id, tokens=tokens, sampling=GREEDY)
        return self.to_p.stream("engine.prefill", request, PrefillEvent, timeout=60)

    def decoding(self, request_id: str, tokens: tuple[int, ...], max_tokens: int, at: Any = None) -> Any:
        request = DecodeRequest(
            id=request_id, tokens=tokens, prompt_tokens=len(tokens), max_tokens=max_tokens, sampling=GREEDY
        )
        return (at or self.to_md).stream("engine.decode", request, DecodeEvent, timeout=60)

    async def first_token(self, request_id: str, tokens: tuple[int, ...]) -> int:
        async with self.prefilling(request_id, tokens) as events:
            last = [event async for event in events][-1]
        assert isinstance(last, Tokens)
        return last.tokens[0].id

    async def turn(self, request_id: str, tokens: tuple[int, ...], n: int) -> tuple[list[Any], list[Any]]:
        """Prefill on P, fetch on MD meanwhile, decode there. Returns the fetch's and the decode's events."""
        async with self.fetching(request_id, tokens) as fetch:
            first = asyncio.create_task(self.first_token(request_id, tokens))
            fetched: list[Any] = []
            async for event in fetch:
                fetched.append(event)
                if isinstance(event, Fetched):
                    break
            async with self.decoding(request_id, (*tokens, await first), n) as decode:
                decoded = [event async for event in decode]
        return fetched, [first.result(), *decoded]

    async def unused(self) -> None:
        await self.p.unused()
        await self.md.unused()


def ids(decoded: list[Any]) -> tuple[int, ...]:
    """The first token and all that were decoded."""
    return (decoded[0], *(token.id for event in decoded if isinstance(event, Tokens) for token in event.tokens))


async def start(cluster: Any, *overrides: str) -> Route:
    prefill, main = await asyncio.gather(cluster.start("prefill", *overrides), cluster.start("main", *overrides))
    return await Route(prefill, main).connect()


async def test_main_decodes_on_kv_that_came_while_prefill_ran(cluster: Any) -> None:
    route = await start(cluster, f"{ENGINE.format('prefill', 'prefill_rate')}=1000")
    prompt = text(1005)
    fetched, decoded = await route.turn("r", prompt, 20)
    assert fetched[0] == Fetching(blocks_cached=0, blocks_wanted=63)
    assert fetched[-1].cached_tokens == 1005
    assert fetched[-1].report.blocks == 63
    assert fetched[-1].report.bytes == 63 * 16 * 128
    assert sum(isinstance(event, FetchProgress) for event in fetched) >= 3, "blocks came only at the end"
    assert next(event for event in decoded if isinstance(event, Extended)) == Extended(1005, 1, 1)
    alone = (await route.first_token("s", prompt), *(await _alone(route, prompt, decoded[0], 20)))
    assert ids(decoded) == alone
    await route.unused()


async def _alone(route: Route, prompt: tuple[int, ...], first: int, n: int) -> tuple[int, ...]:
    """What P itself would have answered."""
    async with route.decoding("alone", (*prompt, first), n, at=route.to_p) as events:
        return ids([0, *[event async for event in events]])[1:]


async def test_a_second_turn_moves_only_its_suffix(cluster: Any) -> None:
    route = await start(cluster)
    prompt = text(400)
    fetched, decoded = await route.turn("one", prompt, 30)
    assert fetched[-1].report.blocks == 25
    # 431 tokens, of which main has made the KV of 430 itself: 26 whole blocks and a tail of 14.
    longer = (*prompt, *ids(decoded), *text(70, 1))
    fetched, decoded = await route.turn("two", longer, 5)
    assert fetched[0] == Fetching(blocks_cached=26, blocks_wanted=6)
    assert fetched[-1].report.bytes == 6 * 16 * 128
    assert next(event for event in decoded if isinstance(event, Extended)).computed == 1
    again, _ = await route.turn("three", longer, 1)
    assert again[0] == Fetching(blocks_cached=32, blocks_wanted=0)
    await route.unused()


async def test_a_long_prompt_comes_in_parts_and_in_another_layout(cluster: Any) -> None:
    """Its 84 MB are more than one part; the engine compares what it decodes on."""
    settings = {
        "prefill": {"token_bytes": 65536, "kv_heads": 4, "tp_size": 4, "block_size": 16},
        "main": {"token_bytes": 32768, "kv_heads": 4, "dtype": "bfloat16", "block_size": 24},
    }
    route = await start(
        cluster,
        *(f"{ENGINE.format(pool, key)}={value}" for pool, all in settings.items() for key, value in all.items()),
    )
    prompt = text(1285)
    fetched, decoded = await route.turn("r", prompt, 20)
    assert fetched[0] == Fetching(blocks_cached=0, blocks_wanted=54)
    assert fetched[-1].cached_tokens == 1285
    assert fetched[-1].report.blocks == 81
    assert fetched[-1].report.bytes == 81 * 16 * 65536
    assert next(event for event in decoded if isinstance(event, Extended)) == Extended(1285, 1, 1)
    assert ids(decoded)[1:] == await _alone(route, prompt, decoded[0], 20)
    await route.unused()


async def test_tenants_do_not_fetch_each_others_blocks(cluster: Any) -> None:
    route = await start(cluster)
    prompt = text(100)
    await route.first_token("r", prompt)
    request = FetchRequest(
        id="r",
        tokens=prompt,
        salt="other",
        transport="tcp",
        endpoint=route.p.member.transports["tcp"],
        epoch=route.p.key.epoch,
    )
    async with route.to_md.stream("kv.fetch", request, FetchEvent, timeout=PATIENCE) as fetch:
        events = [await anext(fetch), await anext(fetch)]
    assert events[-1].cached_tokens == 0
    assert events[-1].report.gone == 7


async def test_a_killed_source_ends_the_fetch_with_a_clear_error(cluster: Any) -> None:
    route = await start(cluster, f"{ENGINE.format('prefill', 'prefill_rate')}=100")
    prompt = text(1000)
    async with route.fetching("r", prompt, timeout=4.0) as fetch:
        prefill = asyncio.create_task(route.first_token("r", prompt))
        async for event in fetch:
            if isinstance(event, FetchProgress):
                break
        route.p.process.kill()
        with pytest.raises(TransferError, match="did not come") as failure:
            async for _ in fetch:
                pass
        assert failure.value.why
    with pytest.raises(PddError):
        await prefill
    await route.md.unused()
    # What came is cached, and the rest is computed.
    async with route.decoding("r", prompt, 2) as events:
        extended = await anext(events)
    assert extended.cached >= 16
    assert extended.cached + extended.computed == 1000
    await route.md.unused()


async def test_a_source_that_drains_loses_no_transfer(cluster: Any) -> None:
    route = await start(cluster, f"{ENGINE.format('prefill', 'prefill_rate')}=250")
    prompt = text(600)
    async with route.fetching("r", prompt) as fetch:
        prefill = asyncio.create_task(route.first_token("r", prompt))
        async for event in fetch:
            if isinstance(event, FetchProgress):
                break
        route.p.process.send_signal(signal.SIGTERM)
        await route.p.state("draining")
        async for event in fetch:
            if isinstance(event, Fetched):
                break
        assert event.cached_tokens == 600
        await prefill
    assert await route.p.ended() == 0
    await route.md.unused()


async def test_a_source_of_another_epoch_is_refused(cluster: Any) -> None:
    route = await start(cluster)
    route.p.key = type(route.p.key)("prefill", 0, "epoch-before")
    endpoint = cluster.registry.members()[-1].transports["tcp"]
    request = FetchRequest(id="r", tokens=text(50), transport="tcp", endpoint=endpoint, epoch="epoch-before")
    with pytest.raises(TransferError, match="epoch epoch-before is gone"):
        async for _ in route.to_md.stream("kv.fetch", request, FetchEvent, timeout=PATIENCE):
            pass
    await route.md.unused()


async def test_a_hundred_turns_cancelled_at_random_moments_leave_nothing(cluster: Any) -> None:
    route = await start(
        cluster,
        f"{ENGINE.format('prefill', 'prefill_rate')}=40000",
        f"{ENGINE.format('main', 'token_time')}=0.0005",
        f"{ENGINE.format('main', 'capacity_blocks')}=200",
        f"{ENGINE.format('prefill', 'capacity_blocks')}=400",
    )
    dice = random.Random(7)
    outcomes = {"done": 0, "cancelled": 0, "failed": 0}

    async def one(number: int) -> None:
        prompt = text(dice.randrange(1, 600), number % 10) + text(dice.randrange(1, 40), number)
        turn = asyncio.create_task(route.turn(f"r{number}", prompt, 20))
        await asyncio.wait({turn}, timeout=dice.random() * 0.1 if number % 3 else 20)
        turn.cancel()
        await asyncio.wait({turn})
        if turn.cancelled():
            outcomes["cancelled"] += 1
        elif turn.exception() is None:
            outcomes["done"] += 1
        else:
            # The store is made too small for all at once.
            assert isinstance(turn.exception(), PddError), turn.exception()
            outcomes["failed"] += 1

    for start_number in range(0, 100, 10):
        await asyncio.gather(*(one(number) for number in range(start_number, start_number + 10)))
    assert outcomes["done"] > 10
    assert outcomes["cancelled"] > 10
    await route.unused()
    fetched, _ = await route.turn("last", text(300, 99), 3)
    assert fetched[-1].cached_tokens == 300
    await route.unused()
