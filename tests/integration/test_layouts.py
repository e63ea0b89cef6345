"""A real engine computes on KV that was cut into other blocks where it was made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.stack import Stack
from tests.integration.test_token_identity import EXACT, FAST_LINE, RELAY_KV, answers, handed_off, same

SIZES = [f"spec.pools.{pool}.engine.config.block_size={n}" for pool, n in (("prefill", 16), ("relay", 8), ("main", 24))]
KEYS = [(name, seeded) for name in ("one-word", "longer-story", "code") for seeded in (False, True)]


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_pools_with_blocks_of_three_sizes_give_one_engines_tokens(tiny: Path, tmp_path: Path) -> None:
    model = (f"spec.model.source={tiny}", EXACT)
    with Stack("aggregated", tmp_path / "agg", *model, engine="torch") as stack:
        expected, _ = await answers(stack, KEYS, 14)
    with Stack("quickstart-torch", tmp_path / "pdd", *model, FAST_LINE, RELAY_KV, *SIZES) as stack:
        for strategy, transfers in (("catch-up", 2), ("kv-transfer", 3)):
            got, timelines = await answers(
                stack,
                KEYS,
                14,
                "spec.routing={plugin: always-relay}",
                f"spec.handoff={{plugin: {strategy}, config: {{min_relay_tokens: 7, max_relay_tokens: 7}}}}",
            )
            same(expected, got, 14)
            assert handed_off(timelines, got, 7) == len(KEYS)
            for timeline in timelines.values():
                ends = [e["what"].split(": ")[1] for e in timeline["events"] if e["what"].endswith("are there")]
                prompt = f"{timeline['prompt_tokens']} tokens are there"
                assert len(ends) == transfers
                assert ends.count(prompt) == 2, "KV came that could not be used, and was recomputed"
        await stack.idle()
