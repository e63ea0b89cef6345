"""Two real servers, and a reader that comes too late: what it reads is wrong to nobody but itself."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from pdd_vllm import testing
from pdd_vllm.config import VllmConfig
from pdd_vllm.engine import VllmEngine
from pdd_vllm.nixl import LATE
from pydantic import ByteSize

from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.server.metrics import scrape
from pdd_runtime.testing.engine_harness import EngineHarness
from pdd_runtime.testing.native_suite import Pair
from pdd_runtime.testing.tiny_model import write_tiny_model
from tests.waiting import until

from .vllm_graph import processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

LEASE = "12s"
ROOM = ByteSize(4 << 20)
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
PATIENCE = 300.0
TOKENS = tuple(random.Random(7).choices(range(3, 250), k=203))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return ModelSpec(source=str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context=2048, seed=3)))


@pytest.fixture(scope="module")
def attaching(model: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[VllmConfig]]:
    # Room for not much more than one sequence: what is let go of is soon something else.
    configs = [testing.native(LEASE).model_copy(update={"engine_kv_memory": ROOM}) for _ in range(2)]
    with testing.servers(configs, model, tmp_path_factory.mktemp("vllm")) as attaching:
        yield attaching


def counted(harness: EngineHarness, name: str) -> float:
    text = httpx.get(f"{url(harness)}/metrics", timeout=PATIENCE).raise_for_status().text
    return scrape(text).value(name)


def url(harness: EngineHarness) -> str:
    assert isinstance(harness.engine, VllmEngine)
    return str(harness.engine.config.url)


class Asleep:
    """All processes of a server, for as long as the `with`."""

    def __init__(self, harness: EngineHarness) -> None:
        port = urlsplit(url(harness)).port
        assert port is not None
        # Its guardian sleeps as well, and nothing ends meanwhile.
        self._pids = processes(port)
        assert len(self._pids) >= 3, "a server has its core and its workers"

    def _send(self, number: int) -> None:
        for pid in self._pids:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, number)

    def __enter__(self) -> None:
        self._send(signal.SIGSTOP)

    def __exit__(self, *_: object) -> None:
        self._send(signal.SIGCONT)


async def test_a_reader_that_sleeps_through_the_lease_fails_and_computes_the_right_answer(
    attaching: list[VllmConfig], model: ModelSpec
) -> None:
    """Its server takes up the read when it wakes, of blocks that are others' by then, as nobody told it otherwise in
    time; and nothing of that is found afterwards."""
    async with AsyncExitStack() as stack:
        giver, reader = [
            await stack.enter_async_context(EngineHarness.started(VllmEngine(config, model))) for config in attaching
        ]
        first = (await giver.prefill(TOKENS)).first
        expired = counted(giver, EXPIRED)
        async with asyncio.timeout(PATIENCE):
            async with aclosing(giver.offering(TOKENS)) as offers:
                offer = await anext(offers)
                with Asleep(reader):
                    with pytest.raises(EngineError, match="within its lease"):
                        await Pair(giver, reader).take(TOKENS, offer, 1)
                    with pytest.raises(EngineError, match="in its time"):
                        await anext(offers)
                    await until(lambda: counted(giver, EXPIRED) == expired + 1, PATIENCE)
            # What was kept is others' now: all blocks have something else.
            for which in range(6):
                await giver.prefill(tuple(random.Random(100 + which).choices(range(3, 250), k=1900)))
            decoded = await reader.decode(TOKENS, 8)
            assert decoded.ids[0] == first.id
            assert decoded.ids == await giver.generate(TOKENS, 8)
        # Woken, the reader may have read what was no more kept. The giver says so; nobody used it.
        assert counted(giver, LATE) <= 1
        with pytest.raises(EngineError, match="within its lease"):
            await Pair(giver, reader).take(TOKENS, offer, 1)
        await reader.idle()
