"""A process of its own: an engine whose host has no more memory to give, and has again. Its argument is the model."""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path

from pdd_torch.engine import TorchEngine

from pdd_runtime.errors import CapacityError
from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.testing.engine_harness import EngineHarness

SPARE = 24 << 20
"""Bytes beside what it has: more than a pass over few tokens needs, and less than one over many."""
SMALL, LARGE = tuple(range(3, 23)), tuple(n % 200 for n in range(3000))


async def main(model: str) -> None:
    config = TorchEngine.Config(kv_blocks=256, token_budget=4096)
    async with EngineHarness.started(TorchEngine(config, ModelSpec(source=model))) as harness:
        expected = await harness.generate(SMALL, 30, salt="before")
        await harness.idle()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (taken() + SPARE, hard))
        small, large = await asyncio.gather(
            harness.generate(SMALL, 30), harness.generate(LARGE, 2), return_exceptions=True
        )
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        assert small == expected, small
        assert isinstance(large, CapacityError), large
        assert harness.failure is None
        await harness.idle()
        assert len(await harness.generate(LARGE, 2)) == 2
        print(f"refused: {large.why}")


def taken() -> int:
    """Bytes of addresses that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
