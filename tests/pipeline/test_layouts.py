"""Pools whose engines lay out KV differently serve a request together: its KV is used where it arrives, and the
driver's view of what is cached counts each pool's own blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import pytest
import pytest_asyncio

pytestmark = pytest.mark.asyncio(loop_scope="module")

Prompt = Callable[[int], list[int]]


class Cut(NamedTuple):
    """How a pool's engine lays out KV."""

    block_size: int
    dtype: str
    tp_size: int
    axes: str = "lkthd"

    @property
    def token_bytes(self) -> int:
        return 128 if self.dtype == "float32" else 64

    def settings(self, pool: str) -> list[str]:
        values = {**self._asdict(), "token_bytes": self.token_bytes, "kv_heads": 2}
        return [f"spec.pools.{pool}.engine.config.{key}={value}" for key, value in values.items()]


FINE, COARSE = Cut(16, "float32", 2), Cut(32, "bfloat16", 1)
WAYS = {"fine to coarse": (FINE, COARSE), "coarse to fine": (COARSE, FINE)}
RELAY = Cut(8, "bfloat16", 2, "lkhtd")


class Mixed(NamedTuple):
    fleet: Any
    prefill: Cut
    main: Cut


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=WAYS.values(), ids=WAYS)
async def mixed(request: pytest.FixtureRequest, make_fleet: Callable[..., Any]) -> AsyncIterator[Mixed]:
    prefill, main = request.param
    cuts = {"prefill": prefill, "relay": RELAY, "main": main, "all": FINE}
    fleet = make_fleet(*(setting for pool, cut in cuts.items() for setting in cut.settings(pool)))
    await fleet.start()
    try:
        yield Mixed(fleet, prefill, main)
    finally:
        await fleet.close()


def there(timeline: dict[str, Any]) -> list[int]:
    """How many tokens' KV each transfer left where it went."""
    ends = [event["what"] for event in timeline["events"] if event["what"].endswith("tokens are there")]
    return sorted(int(what.split(": ")[1].split()[0]) for what in ends)


@pytest.mark.parametrize(
    ("route", "handoff", "transfers"),
    [("never-relay", "none", 1), ("always-relay", "catch-up", 2), ("always-relay", "kv-transfer", 3)],
)
async def test_the_answer_is_that_of_one_engine(
    mixed: Mixed, prompt: Prompt, route: str, handoff: str, transfers: int
) -> None:
    tokens = prompt(397)
    fleet = mixed.fleet
    expected = await fleet.ask(await fleet.aggregated(), tokens, 60)
    config = "{min_relay_tokens: 9, max_relay_tokens: 9}" if handoff != "none" else "{}"
    driver = await fleet.driver(
        f"spec.routing={{plugin: {route}}}", f"spec.handoff={{plugin: {handoff}, config: {config}}}"
    )
    answer = await fleet.settled(await fleet.ask(driver, tokens, 60))
    assert answer.tokens == expected.tokens
    arrived = there(answer.timeline)
    assert arrived[0] == 397, "what came could not be used, and was recomputed"
    assert len(arrived) == transfers
    sent = answer.transfer("prefill->main")
    blocks = -(-397 // mixed.prefill.block_size)
    assert (sent["blocks_sent"], sent["bytes"]) == (
        blocks,
        blocks * mixed.prefill.block_size * mixed.prefill.token_bytes,
    )


async def test_a_second_turn_moves_only_what_covers_its_suffix(mixed: Mixed, prompt: Prompt) -> None:
    fleet = mixed.fleet
    driver = await fleet.driver()
    first = await fleet.settled(await fleet.ask(driver, tokens := prompt(200), 45))
    longer = [*tokens, *first.ids, *prompt(55)]
    second = await fleet.settled(await fleet.ask(driver, longer, 10))
    assert second.tokens == (await fleet.ask(await fleet.aggregated(), longer, 10)).tokens
    # Main has the KV of the first turn, 244 tokens or 245, and finds its whole blocks.
    cached = 240 // mixed.main.block_size * mixed.main.block_size
    assert second.timeline["cached"] == {"prefill": 200, "main": cached}
    assert f"{cached} of 300 prompt tokens" in second.timeline["reason"]
    sent, size = second.transfer("prefill->main"), mixed.prefill.block_size
    assert sent["blocks_cached"] == cached // mixed.main.block_size
    assert sent["blocks_sent"] == -(-300 // size) - cached // size
    assert sent["bytes"] == sent["blocks_sent"] * size * mixed.prefill.token_bytes
