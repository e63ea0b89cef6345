"""A server whose process is there and does nothing is found, ended, and told to whoever waits for it; and where a store
stays full, who waits for it fails alone."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import aclosing, suppress
from pathlib import Path

import pytest
from pdd_trtllm.config import TrtllmConfig
from pdd_trtllm.engine import TrtllmEngine
from pdd_trtllm.testing import standin
from pdd_trtllm.testing.serve import PAUSE
from pdd_trtllm.testing.standin import environment

from pdd_runtime.errors import CapacityError, EngineError
from pdd_runtime.plugins.engine import ModelSpec, Tokens
from pdd_runtime.server.guardian import descendants
from pdd_runtime.testing.engine_harness import EngineHarness
from tests.waiting import PATIENCE, until


def settings(**more: object) -> TrtllmConfig:
    small = {"block_size": 16, "kv_memory": "2MiB", "context_length": 512, "batch_limit": 4, "token_budget": 64}
    return TrtllmConfig.model_validate(small | more)


async def test_a_stopped_server_is_found_and_killed_and_its_requests_end(tiny: Path) -> None:
    """One is decoded, one is prefilled, one is held after its stop."""
    prompt = tuple(random.Random(5).choices(range(3, 200), k=33))
    engine = TrtllmEngine(
        settings(health_timeout="3s", env=environment(**{PAUSE: "0.05"})), ModelSpec(source=str(tiny))
    )
    async with EngineHarness.started(engine) as harness:
        decode, held = harness.decoding(prompt, 400), harness.decoding(prompt, 2, hold=True)
        async with aclosing(decode), aclosing(held):
            await harness.collect(held)
            while not isinstance(await anext(decode), Tokens):
                pass
            server = descendants(harness.engine._process.pid)  # type: ignore[attr-defined]
            assert server
            for pid in server:
                os.kill(pid, signal.SIGSTOP)
            prefill = asyncio.create_task(harness.prefill(prompt[:20]))
            async with asyncio.timeout(PATIENCE):
                with pytest.raises(EngineError, match="does not answer any more"):
                    async for _ in decode:
                        pass
                with pytest.raises(EngineError, match="does not answer any more"):
                    await anext(held)
                with pytest.raises(EngineError):
                    await prefill
        assert "does not answer any more" in str(harness.failure)
        await until(lambda: not any(_alive(pid) for pid in server))
        await harness.idle()


async def test_a_prefill_that_waits_too_long_for_blocks_fails_and_no_other(tiny: Path, tmp_path: Path) -> None:
    prompt = tuple(random.Random(6).choices(range(3, 200), k=60))
    with standin.attaching(tmp_path) as engine:
        async with EngineHarness.started(engine(settings(kv_wait="300ms"), ModelSpec(source=str(tiny)))) as harness:
            held = harness.store.allocate(harness.store.stats.free - 2)
            large = asyncio.create_task(harness.prefill(prompt))
            assert (await harness.prefill(prompt[:20])).ready[-1].tokens == 20
            with pytest.raises(CapacityError, match="kv_wait"):
                await large
            harness.store.release(held)
            assert (await harness.prefill(prompt)).ready[-1].tokens == 60
            await harness.idle()
            assert harness.failure is None


def _alive(pid: int) -> bool:
    with suppress(OSError):
        os.kill(pid, 0)
        return True
    return False
