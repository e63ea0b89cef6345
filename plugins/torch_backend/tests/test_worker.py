"""The engine in a real worker: one whose pass does not end takes its worker along, and the log says where and why."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import httpx

from tests.integration.stack import Stack
from tests.waiting import PATIENCE, until


async def test_a_pass_that_does_not_end_is_told_with_its_place_and_its_worker_starts_again(
    tiny: Path, tmp_path: Path
) -> None:
    """To this engine one that takes more than a millisecond does not end."""
    settings = (f"spec.model.source={tiny}", "spec.pools.main.engine.config={step_timeout: 1ms}")
    with Stack("aggregated", tmp_path, *settings, engine="torch") as stack:
        [worker] = [row["pid"] for row in stack.ps() if row["pool"] == "main"]
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            body = {"model": "tiny", "prompt": "x" * 500, "max_tokens": 100}
            asking = asyncio.create_task(client.post(f"{stack.url}/v1/completions", json=body))
            file = tmp_path / "aggregated" / "logs" / "main-0.log"
            await until(lambda: "it starts again" in file.read_text(), 2 * PATIENCE)
            log = file.read_text()
            asking.cancel()
            with suppress(asyncio.CancelledError, httpx.HTTPError):
                await asking
        [ended] = [line for line in log.splitlines() if "it starts again in 0.5 s" in line]
        assert "ended (exit code 4: " in ended
        assert "a forward pass has not ended in 0.001 s" in ended
        assert "a forward pass hangs, here:" in log
        with suppress(ProcessLookupError):
            os.kill(worker, 0)
            raise AssertionError("the worker lives")
