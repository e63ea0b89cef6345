"""Each rank of a server shares its own part of the heads."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from pdd_sglang import testing
from pdd_sglang.engine import SglangEngine

from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.testing.engine_harness import EngineHarness
from pdd_runtime.testing.engine_kv_suite import carry
from pdd_runtime.testing.tiny_model import write_tiny_model

TWO_RANKS = {
    "tp": 2,
    # Without it SGLang wants a NUMA node for each rank.
    "env": {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"},
}


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_what_two_ranks_began_one_goes_on_with_and_the_other_way_round(tmp_path: Path) -> None:
    model = ModelSpec(source=str(write_tiny_model(tmp_path / "tiny", kv_heads=2)))
    one = testing.settings()
    two = one.model_copy(update=TWO_RANKS)
    async with asyncio.TaskGroup() as tasks:
        ended = asyncio.Event()
        starting = [asyncio.get_running_loop().create_future() for _ in (one, two)]
        for config, started in zip((one, two), starting, strict=True):
            tasks.create_task(_hold(SglangEngine(config, model), started, ended))
        alone, pair = await asyncio.gather(*starting)
        assert (alone.info.layout.tp_size, pair.info.layout.tp_size) == (1, 2)
        for which, (there, here) in enumerate(((pair, alone), (alone, pair))):
            tokens = tuple(random.Random(which).choices(range(3, 200), k=85))
            first = (await there.prefill(tokens)).first
            expected = await there.decode((*tokens, first.id), 12)
            carry(there, tokens, here, tokens)
            decoded = await here.decode((*tokens, first.id), 12)
            assert decoded.extended.cached == len(tokens)
            assert decoded.ids == expected.ids
        ended.set()


async def _hold(engine: SglangEngine, started: asyncio.Future[EngineHarness], ended: asyncio.Event) -> None:
    """Both start at once."""
    async with EngineHarness.started(engine) as harness:
        started.set_result(harness)
        await ended.wait()
