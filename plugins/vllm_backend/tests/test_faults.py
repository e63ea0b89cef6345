"""A real server that hangs, as a whole or behind an API that answers, and one whose clients leave."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import aclosing
from pathlib import Path

import pytest
from pdd_vllm import testing
from pdd_vllm.engine import VllmEngine

from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import ModelSpec, Tokens
from pdd_runtime.server.guardian import descendants
from pdd_runtime.server.metrics import Metrics, scrape
from pdd_runtime.testing.engine_harness import EngineHarness
from pdd_runtime.testing.tiny_model import write_tiny_model
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
BUDGET, LONG = 128, 900
"""Tokens of a step, and of a prompt."""


@pytest.mark.parametrize("stopped", ["VLLM::EngineCore", "vllm.entrypoints.openai.api_server"])
async def test_ten_that_leave_are_computed_no_further_and_a_server_that_hangs_is_found(
    stopped: str, tmp_path: Path
) -> None:
    model = ModelSpec(source=str(write_tiny_model(tmp_path / "tiny")))
    config = testing.settings()
    args = (*config.args, "--max-num-batched-tokens", str(BUDGET))
    config = config.model_copy(update={"health_timeout": 20.0, "stall_timeout": 10.0, "args": args})
    async with EngineHarness.started(VllmEngine(config, model)) as harness:
        prompts = [tuple(random.Random(which).choices(range(3, 200), k=LONG)) for which in range(10)]
        readers = [asyncio.create_task(harness.prefill(prompt)) for prompt in prompts]
        while not (await metrics(harness)).value("vllm:num_requests_running"):
            pass
        for reader in readers:
            reader.cancel()
        await asyncio.wait(readers)
        before = computed(await metrics(harness))
        assert len(await harness.generate((5, 6, 7), 2)) == 2
        assert computed(await metrics(harness)) - before <= BUDGET + 5
        await harness.idle()

        guardian = harness.engine._process.pid  # type: ignore[attr-defined]
        processes = descendants(guardian)
        async with aclosing(harness.decoding(prompts[0][:100], 800)) as events:
            while not isinstance(await anext(events), Tokens):
                pass
            for pid in processes:
                if stopped in named(pid):
                    os.kill(pid, signal.SIGSTOP)
            async with asyncio.timeout(300):
                with pytest.raises(EngineError, match="no tokens any more" if "Core" in stopped else "does not answer"):
                    async for _ in events:
                        pass
        assert harness.failure is not None
        await until(lambda: not any(named(pid) for pid in processes))
        await harness.idle()


async def metrics(harness: EngineHarness) -> Metrics:
    assert isinstance(harness.engine, VllmEngine)
    return scrape(await harness.engine._http.get_text("/metrics"))


def computed(metrics: Metrics) -> float:
    """Tokens, of prompts and of answers, in all steps so far."""
    return metrics.value("vllm:iteration_tokens_total_sum")


def named(pid: int) -> str:
    """The command line of a process; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
