"""A sealed decode that is held: all of it can be read on from, as where a strategy moves the relay's KV."""

from __future__ import annotations

import random
from contextlib import aclosing
from pathlib import Path

from pdd_trtllm.config import TrtllmConfig
from pdd_trtllm.testing import standin
from pdd_trtllm.testing.serve import PAUSE

from pdd_runtime.plugins.engine import ModelSpec, Stopped, Tokens
from pdd_runtime.testing.engine_harness import EngineHarness

SIZE = 16


async def test_the_tail_of_a_sealed_decode_is_published_before_it_is_aborted(tiny: Path, tmp_path: Path) -> None:
    """The server looks for closed connections every second, tells its connector nothing of an abort, and has nothing
    else to do: a page that is not full by then would never be heard of."""
    config = TrtllmConfig.model_validate(
        {"block_size": SIZE, "kv_memory": "2MiB", "context_length": 512, "batch_limit": 2, "token_budget": 64}
    )
    prompt = tuple(random.Random(5).choices(range(3, 200), k=2 * SIZE + 1))
    known = list(prompt)
    with standin.attaching(tmp_path, **{PAUSE: "0.15"}) as engine:
        async with EngineHarness.started(engine(config, ModelSpec(source=str(tiny)))) as harness:
            async with aclosing(harness.decoding(prompt, 300, hold=True, request_id="held")) as events:
                async for event in events:
                    if isinstance(event, Tokens):
                        known += [token.id for token in event.tokens]
                        if len(known) == len(prompt) + 3:
                            await harness.engine.seal("held", len(known))
                    if isinstance(event, Stopped):
                        assert event == Stopped("sealed", len(known))
                        break
                assert await harness.engine.cached(known) >= len(known) - 1
            await harness.idle()
