from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from msgspec import structs

from pdd_runtime.errors import Cancelled, CapacityError, EngineError, RequestError
from pdd_runtime.inprocess import Chunk, fingerprint
from pdd_runtime.plugins.engine import Engine, Extended, Guide, ModelSpec, Sampling, Tokens
from pdd_runtime.testing.byte_tokenizer import byte_tokenizer
from pdd_runtime.testing.engine_harness import EngineHarness, StoreHost
from pdd_runtime.testing.engine_suite import EngineConformance
from pdd_runtime.testing.inprocess_suite import InProcessFaults
from tests.inprocess import toy
from tests.inprocess.toy import ToyEngine, ToyRunner
from tests.waiting import PATIENCE, until

SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=42)


class TestToyEngine(InProcessFaults, EngineConformance):
    plugin = ToyEngine

    @pytest.fixture
    def engine(self) -> Engine:
        return make(kv_blocks=64)


def make(**config: Any) -> ToyEngine:
    return ToyEngine(ToyEngine.Config(**config), ModelSpec(source="toy"))


@asynccontextmanager
async def started(**config: Any) -> AsyncGenerator[EngineHarness, None]:
    """At the end every sequence that the runner saw is forgotten."""
    async with EngineHarness.started(make(**config)) as harness:
        try:
            yield harness
        finally:
            runner_of(harness).go.set()
        if not harness.engine._closed:  # type: ignore[attr-defined]
            await until(lambda: not runner_of(harness).known)


def runner_of(harness: EngineHarness) -> ToyRunner:
    runner: ToyRunner = harness.engine.runner  # type: ignore[attr-defined]
    return runner


def text(n: int, which: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(which).choices(range(256), k=n))


async def test_a_preempted_request_answers_as_if_it_had_not_been() -> None:
    prompts = [text(60, which) for which in range(6)]
    async with started() as harness:
        alone = [await harness.generate(tokens, 50, SEEDED) for tokens in prompts]
    async with started(kv_blocks=12) as harness:  # one needs 7 blocks
        crowded = await asyncio.gather(*(harness.generate(tokens, 50, SEEDED) for tokens in prompts))
        await harness.idle()
    assert crowded == alone


async def test_a_request_that_never_fits_is_refused_with_both_numbers() -> None:
    async with started(kv_blocks=10) as harness:
        with pytest.raises(CapacityError, match=r"needs 11 blocks of KV, the pool has 10"):
            await harness.generate(text(100), 62)
        assert len(await harness.generate(text(100), 61)) == 61
        with pytest.raises(CapacityError, match="1025 tokens are more than the context of 1024"):
            await harness.generate(text(1025), 1)
        for tokens in ((), (3, 258), (3, -1)):
            with pytest.raises(RequestError):
                await harness.generate(tokens, 1)
        await harness.idle()


async def test_who_waits_too_long_for_blocks_that_others_hold_fails_and_lets_the_next_by() -> None:
    async with started(kv_blocks=10, kv_wait="200ms") as harness:
        held = harness.store.allocate(7)
        large = asyncio.create_task(harness.generate(text(100), 2))
        await busy(harness, running=0, waiting=1)
        small = asyncio.create_task(harness.generate(text(20), 2))
        with pytest.raises(CapacityError, match="kv_wait"):
            await large
        assert len(await small) == 2
        harness.store.release(held)
        await harness.idle()
        assert len(await harness.generate(text(100), 2)) == 2


async def test_a_process_that_was_stopped_for_long_has_no_hung_pass() -> None:
    async with started(step_timeout="2s") as harness:
        expected = await harness.generate(text(10), 5)
        go = runner_of(harness).go
        go.clear()
        answer = asyncio.create_task(harness.generate(text(10), 5))
        await busy(harness, running=1, waiting=0)
        time.sleep(2.1)  # noqa: ASYNC251 - nothing runs in a process that is stopped
        asyncio.get_running_loop().call_later(0.01, go.set)
        assert await answer == expected
        assert harness.failure is None


async def test_the_context_ends_an_answer() -> None:
    async with started(context_length=40) as harness:
        decoded = await harness.decode(text(30), 100)
        assert (decoded.stopped.reason, decoded.stopped.tokens) == ("length", 40)


@pytest.mark.parametrize("state", ["waiting", "prompt", "decoding", "held"])
@pytest.mark.parametrize("way", ["close", "cancel"])
async def test_a_request_can_be_given_up_in_every_state(state: str, way: str) -> None:
    async with started(batch_limit=1, token_budget=4) as harness:
        go = runner_of(harness).go
        first = harness.decoding(text(4), 900, request_id="first")
        victim = harness.decoding(text(400), 2 if state == "held" else 600, hold=True, request_id="victim")
        async with aclosing(first), aclosing(victim):
            if state == "waiting":
                assert isinstance(await anext(first), Extended)
            if state in ("waiting", "prompt"):
                go.clear()
                reader = asyncio.ensure_future(anext(victim))
                await busy(harness, running=1, waiting=int(state == "waiting"))
                assert not reader.done()
            else:
                await anext(victim)
                event = await anext(victim)
                assert isinstance(event, Tokens)
                go.clear()
                if state == "held":
                    go.set()
                    await harness.collect(replay(Extended(0, 0, 0), event, following=victim))
                reader = asyncio.ensure_future(anext(victim))
                await asyncio.sleep(0)
            if way == "cancel":
                await harness.engine.cancel("victim")
                go.set()
                with pytest.raises(Cancelled):
                    await exhaust(reader, victim)
            else:
                reader.cancel()
                go.set()
                await asyncio.wait({reader})
        await harness.idle()
        assert (await harness.engine.load()).sessions == 0


async def busy(harness: EngineHarness, *, running: int, waiting: int) -> None:
    """Wait until the engine says so of itself."""
    async with asyncio.timeout(PATIENCE):
        while True:
            load = await harness.engine.load()
            if (load.running, load.waiting) == (running, waiting):
                return
            await asyncio.sleep(0.005)


async def replay(*events: Any, following: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    for event in events:
        yield event
    async for event in following:
        yield event


async def exhaust(reader: asyncio.Future[Any], stream: AsyncGenerator[Any, None]) -> None:
    await reader
    async for _ in stream:
        pass


async def test_a_hundred_mixed_requests_leave_nothing_behind() -> None:
    rng = random.Random(5)
    async with started(kv_blocks=60, batch_limit=5, token_budget=40) as harness:

        async def request(which: int) -> None:
            await asyncio.sleep(rng.random() * 0.5)
            tokens = text(rng.randint(1, 200), rng.randint(0, 9))[: rng.randint(1, 200)]
            name = f"request-{which}"
            if rng.random() < 0.4:
                stream: AsyncGenerator[Any, None] = harness.prefilling(tokens, SEEDED, request_id=name)
            else:
                stream = harness.decoding(tokens, rng.randint(0, 60), SEEDED, hold=rng.random() < 0.3, request_id=name)
            patience = rng.random() * 0.4 if rng.random() < 0.6 else 1.5
            try:
                async with asyncio.timeout(patience), aclosing(stream):
                    async for _ in stream:
                        if rng.random() < 0.05:
                            break
                        if rng.random() < 0.05:
                            await harness.engine.seal(name, rng.randint(1, 260))
                        if rng.random() < 0.03:
                            await harness.engine.cancel(name)
            except (TimeoutError, Cancelled):
                pass

        async with asyncio.TaskGroup() as group:
            for which in range(100):
                group.create_task(request(which))
        await harness.idle()
        assert (await harness.engine.load()).sessions == 0
        assert len(await harness.generate(text(150), 20)) == 20


async def test_a_failed_pass_ends_its_requests_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started() as harness:
        expected = await harness.generate(text(10), 5)
        monkeypatch.setattr(runner_of(harness), "step", lambda chunks: 1 / 0)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await harness.generate(text(10), 5)
        assert harness.failure is None
        monkeypatch.undo()
        assert await harness.generate(text(10), 5) == expected
        await harness.idle()


async def test_a_row_that_no_token_can_be_chosen_from_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started() as harness:
        expected = await harness.generate(text(10), 30)
        step = runner_of(harness).step

        def with_a_broken_row(chunks: Sequence[Chunk]) -> list[Any]:
            rows = zip(chunks, step(chunks), strict=True)
            return [row if row is None or chunk.tokens[-1] != 7 else row * float("nan") for chunk, row in rows]

        monkeypatch.setattr(runner_of(harness), "step", with_a_broken_row)
        assert 7 not in expected
        good, bad = await asyncio.gather(
            harness.generate(text(10), 30), harness.generate((*text(40), 7), 30), return_exceptions=True
        )
        assert good == expected
        assert isinstance(bad, EngineError)
        assert "nan" in str(bad)


async def test_closing_in_the_middle_of_everything_frees_all() -> None:
    async with started(batch_limit=2) as harness:
        tasks = [asyncio.create_task(harness.generate(text(300, which), 300)) for which in range(4)]
        await until(lambda: harness.store.stats.used)
        await harness.engine.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)
        assert harness.store.stats.used == 0
        with pytest.raises(EngineError, match="closed"):
            await harness.generate(text(3), 1)
        await harness.engine.close()
        assert runner_of(harness).closed == 1


async def test_what_is_closed_while_it_loads_is_closed_when_it_has_loaded() -> None:
    engine, go = make(), threading.Event()
    load, loaded = engine._load, []

    def slowly() -> ToyRunner:
        go.wait()
        loaded.append(load())
        return loaded[0]

    engine._load = slowly  # type: ignore[method-assign]
    start = asyncio.create_task(engine.start(StoreHost()))
    await asyncio.sleep(0)
    close = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(EngineError, match="closed"):
        await start
    await close
    assert loaded[0].closed == 1


async def test_a_layout_with_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = structs.replace(toy.LAYOUT, state_bytes=64)
    monkeypatch.setattr(toy, "LAYOUT", layout)
    with pytest.raises(EngineError, match="state"):
        async with started():
            pass


@pytest.mark.parametrize("lacking", ["tokenizer", "library"])
async def test_without_what_guides_need_it_serves_all_but_guides(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    if lacking == "tokenizer":
        files = structs.replace(byte_tokenizer(), tokenizer_json='{"model": {"type": "no such"}}')
        monkeypatch.setattr(toy, "byte_tokenizer", lambda: files)
    else:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        monkeypatch.delitem(sys.modules, "pdd_runtime.inprocess.guides", raising=False)
        assert not ToyEngine.promises(ModelSpec(source="toy"), ToyEngine.Config()).guided
    async with started() as harness:
        assert "guided" not in harness.info.capabilities.names
        assert len(await harness.generate(text(10), 3)) == 3
        with pytest.raises(RequestError, match="guided"):
            await harness.generate(text(10), 3, Sampling(guide=Guide(kind="json_object")))
        await harness.idle()


async def test_a_guide_is_compiled_beside_the_passes_and_its_request_can_go_meanwhile() -> None:
    slow = Guide(kind="choice", text=json.dumps([f"{n * 7919 % 100_003}" for n in range(20_000)]))
    async with started() as harness:
        other = asyncio.create_task(harness.generate(text(10), 30))
        guided = asyncio.create_task(harness.decode(text(20), 3, Sampling(guide=slow)))
        cancelled = harness.decoding(text(30), 3, Sampling(guide=slow), request_id="gone")
        waiting = asyncio.ensure_future(anext(cancelled))
        assert len(await other) == 30
        await harness.engine.cancel("gone")
        with pytest.raises(Cancelled):
            await waiting
        await cancelled.aclose()
        guided.cancel()
        await asyncio.wait({guided})
        await harness.idle()


def test_kv_of_the_exact_mode_is_of_one_engine_and_dtype() -> None:
    fast = [ModelSpec(source="x", dtype=dtype) for dtype in ("float32", "bfloat16")]
    assert {fingerprint("digest", spec, engine) for spec in fast for engine in ("a", "b")} == {"digest"}
    exact = [ModelSpec(source="x", dtype=dtype, mode="exact") for dtype in ("float32", "bfloat16")]
    assert len({"digest", *(fingerprint("digest", spec, engine) for spec in exact for engine in ("a", "b"))}) == 5


def test_neither_the_engine_nor_its_listing_imports_what_takes_long() -> None:
    code = "import sys, pdd_runtime.inprocess; sys.exit(bool({'torch', 'llguidance', 'tokenizers'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
