"""A conversation of twenty turns: from the second on, only what is new crosses the WAN."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from pdd_runtime.pipeline import Driver
from pdd_runtime.plugins.engine import Sampling
from tests.integration.stack import Stack

BLOCK, TURNS = 16, 20
ROOM = 96
"""Blocks of main's pool: a conversation of a thousand tokens fits, but not beside much else."""
LINE = ("spec.links.wan.rtt=4ms", "spec.links.wan.bandwidth=8Mbit/s")
GREEDY = Sampling(temperature=0)


class Conversation:
    def __init__(self, stack: Stack, driver: Driver) -> None:
        self._stack, self._driver = stack, driver
        self._random = random.Random("conversation")
        self.tokens: tuple[int, ...] = ()

    def words(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(32, 127) for _ in range(count))

    async def ask(self, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], dict[str, Any]]:
        """The answer, and the prompt's way to main, when main has all of both, with the reason for its route."""
        answer, timeline = await self._stack.ask(self._driver, prompt, 9, GREEDY)
        await self._stack.idle()
        assert timeline["error"] is None
        settled = self._stack.timelines.get(timeline["id"])
        assert settled is not None
        (wan,) = (row for row in settled.body()["kv"] if row["edge"] == "prefill->main")
        return tuple(token.id for token in answer), wan | {"reason": timeline["reason"]}

    async def turn(self) -> dict[str, Any]:
        prompt = self.tokens + self.words(self._random.randrange(20, 60))
        answer, wan = await self.ask(prompt)
        self.tokens = prompt + answer
        return wan


async def test_every_turn_sends_its_suffix_alone_and_after_an_eviction_what_is_lost(tiny: Path, tmp_path: Path) -> None:
    settings = (f"spec.model.source={tiny}", *LINE, "spec.routing={plugin: predictive}")
    with Stack("quickstart-torch", tmp_path, *settings, f"spec.pools.main.engine.config.kv_blocks={ROOM}") as stack:
        async with stack.driver() as driver:
            conversation = Conversation(stack, driver)
            block_bytes = 0
            for turn in range(TURNS):
                # The last token of an answer was chosen, but its KV was not computed.
                known = max(0, len(conversation.tokens) - 1) // BLOCK
                lost = turn in (8, 14)
                if lost:
                    await conversation.ask(conversation.words((ROOM - 4) * BLOCK))
                wan = await conversation.turn()
                blocks = -(-(len(conversation.tokens) - 9) // BLOCK)
                block_bytes = block_bytes or wan["bytes"] // wan["blocks_sent"]
                assert wan["bytes"] == wan["blocks_sent"] * block_bytes
                assert wan["blocks_sent"] + wan["blocks_cached"] == blocks
                if lost:
                    assert wan["blocks_cached"] < known, f"turn {turn}: main has evicted nothing"
                else:
                    assert wan["blocks_cached"] == known, f"turn {turn}"
                # What took longer than a moment to send says how fast the link is, and routing hears of it.
                assert ("measured" if turn > 8 else "declared") in wan["reason"] or turn == 8, wan["reason"]
