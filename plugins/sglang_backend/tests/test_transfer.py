"""SGLang's own transfer between two real servers, driven through the engines alone."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import httpx
import msgspec
import pytest
from pdd_sglang.conformance import TestSglangTransfer as Suite
from pdd_sglang.conformance import tiny, transferring
from pdd_sglang.engine import SglangEngine
from pdd_sglang.rooms import Room

from pdd_runtime.plugins.engine import Received
from pdd_runtime.server.metrics import scrape
from pdd_runtime.testing.engine_harness import PATIENCE, EngineHarness
from pdd_runtime.testing.native_suite import Pair

pytestmark = pytest.mark.timeout(3600)

__all__ = ["tiny", "transferring"]


class TestTransfer(Suite):
    async def test_only_what_the_reader_lacks_is_moved(self, pair: Pair) -> None:
        """By the server's own count, in whole pages."""
        page = pair.block * pair.source.info.layout.token_bytes
        prompt, before = self.prompt(4 * pair.block + 5), moved(pair)

        async def have_moved(pages: int) -> None:
            await pair.source.eventually(lambda: differs(moved(pair) - before, pages * page), "others have moved")

        async with (
            asyncio.timeout(PATIENCE),
            pair.offered(prompt) as offer,
            aclosing(pair.target.receiving(prompt, offer)) as events,
        ):
            assert await anext(events) == Received(0, len(prompt))
        await have_moved(5)
        await knows(pair.target, prompt, 4)
        decoded = await pair.bring((*prompt, 7), 30)
        assert (decoded.extended.computed, decoded.extended.received) == (0, 6)
        await have_moved(6)
        # What the reader has made itself need not come again.
        whole = (*prompt, 7, *decoded.ids)
        await knows(pair.target, whole, 6)
        async with asyncio.timeout(PATIENCE), aclosing(pair.source.offering(whole)) as offers:
            await pair.take(whole, await anext(offers), 2)
            # To its own end: of one that is closed before, the server may not count what it has moved.
            assert not [offer async for offer in offers]
        await have_moved(6 + -(-len(whole) // pair.block) - 6)

    async def test_a_server_tells_whose_pages_are_cached(self, pair: Pair) -> None:
        prompt = self.prompt(3 * pair.block)
        for salt, others in (("one", "two"), ("two", "three")):
            await pair.bring(prompt, 2, salt=salt)
            for harness in (pair.source, pair.target):
                await knows(harness, prompt, 3, salt)
                assert await harness.engine.cached(prompt, others) == 0

    async def test_servers_that_name_one_room_are_not_told_that_their_tokens_differ(self, pair: Pair) -> None:
        """Why an offer has a digest."""
        mine, others = self.prompt(2 * pair.block, 1), self.prompt(2 * pair.block, 2)
        right = (await pair.source.prefill(mine)).first.id
        async with asyncio.timeout(PATIENCE), pair.offered(others) as offer:
            body = {"input_ids": mine, "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}}
            body |= msgspec.convert(offer.params, Room).body
            async with httpx.AsyncClient(timeout=PATIENCE) as http:
                answer = await http.post(f"{url(pair.target)}/generate", json=body)
        assert answer.status_code == 200
        assert answer.json()["output_ids"] != [right]

    async def test_many_prompts_of_several_parts_are_computed_once(self, pair: Pair) -> None:
        """Also where those that have no reader yet, and those that never get one, give way to each other."""
        prompts = [self.prompt(20 * pair.block + which, 50 + which) for which in range(6)]
        before = computed(pair)
        firsts = await asyncio.gather(*(pair.source.prefill(prompt) for prompt in prompts))
        decoded = await asyncio.gather(*(pair.bring(prompt, 2) for prompt in prompts))
        assert [one.ids[0] for one in decoded] == [one.first.id for one in firsts]
        # Of each: once for its first token and once for its reader the rest of a page, and parts of those that were
        # computed beside each other.
        total = sum(len(prompt) for prompt in prompts)
        assert computed(pair) - before < 1.5 * total
        await pair.idle()


async def differs(found: float, wanted: float) -> str | None:
    return None if found == wanted else f"{found}, not {wanted}"


async def knows(harness: EngineHarness, prompt: tuple[int, ...], blocks: int, salt: str = "") -> None:
    """Return when the engine knows that so many blocks are cached."""

    async def lacking() -> str | None:
        found = await harness.engine.cached(prompt, salt) // harness.info.layout.block_size
        return None if found >= blocks else f"{found} of {blocks}"

    await harness.eventually(lacking, "blocks are missing")


def url(harness: EngineHarness) -> str:
    assert isinstance(harness.engine, SglangEngine)
    return str(harness.engine.config.url)


def count(harness: EngineHarness, name: str, **labels: str) -> float:
    text = httpx.get(f"{url(harness)}/metrics", timeout=PATIENCE).raise_for_status().text
    return scrape(text).value(name, **labels)


def moved(pair: Pair) -> float:
    """Bytes of KV that have left the prefill server, by its own words."""
    return count(pair.source, "sglang:kv_transfer_total_mb_sum") * 2**20


def computed(pair: Pair) -> float:
    """Tokens whose KV the prefill server has made."""
    return count(pair.source, "sglang:realtime_tokens_total", mode="prefill_compute")
