"""What every part of the engine suite begins with."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from typing import ClassVar

import pytest
import pytest_asyncio

from pdd_runtime.plugins.engine import Engine
from pdd_runtime.testing.engine_harness import EngineHarness


class EngineFixtures:
    """An engine, started, and prompts for it."""

    vocabulary: ClassVar[range] = range(3, 200)
    """Token ids that prompts may be made of."""

    @pytest.fixture
    def engine(self) -> Engine:
        raise NotImplementedError("give the suite a fixture `engine` that returns an engine, not yet started")

    @pytest_asyncio.fixture
    async def harness(self, engine: Engine) -> AsyncGenerator[EngineHarness, None]:
        async with EngineHarness.started(engine) as harness:
            yield harness

    def prompt(self, n: int, which: int = 0) -> tuple[int, ...]:
        """`n` tokens, the same for the same `which`."""
        return tuple(random.Random(which).choices(self.vocabulary, k=n))
