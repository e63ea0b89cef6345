from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from pdd_torch.conformance import TestExact, TestExactBfloat16, TestFast
from pdd_torch.engine import TorchEngine
from tokenizers import Tokenizer

from pdd_runtime.errors import Cancelled, CapacityError, EngineError, RequestError
from pdd_runtime.plugins.engine import Extended, Guide, ModelSpec, Sampling, Tokens
from pdd_runtime.testing.byte_tokenizer import END
from pdd_runtime.testing.engine_harness import GREEDY, EngineHarness

__all__ = ["TestExact", "TestExactBfloat16", "TestFast"]
SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=42)

Started = Callable[..., Any]


@pytest.fixture
def started(tiny: Path) -> Started:
    @asynccontextmanager
    async def start(source: str | Path = tiny, **config: Any) -> AsyncGenerator[EngineHarness, None]:
        engine = TorchEngine(TorchEngine.Config(**config), ModelSpec(source=str(source), mode="exact"))
        async with EngineHarness.started(engine) as harness:
            yield harness

    return start


def text(n: int, which: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(which).choices(range(256), k=n))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_tokens_depend_on_no_setting(started: Started, sampling: Sampling) -> None:
    prompts = [text(n, n) for n in (3, 60, 100, 161)]
    answers = []
    for config in (
        {},
        {"token_budget": 5, "batch_limit": 4},
        {"token_budget": 17, "batch_limit": 1, "block_size": 5},
        {"block_size": 128},
    ):
        async with started(**config) as harness:
            answers.append(await asyncio.gather(*(harness.generate(tokens, 40, sampling) for tokens in prompts)))
    assert answers == [answers[0]] * len(answers)


async def test_a_preempted_request_answers_as_if_it_had_not_been(started: Started) -> None:
    prompts = [text(60, which) for which in range(6)]
    async with started() as harness:
        alone = [await harness.generate(tokens, 50, SEEDED) for tokens in prompts]
    async with started(kv_blocks=12) as harness:  # one needs 7 blocks
        crowded = await asyncio.gather(*(harness.generate(tokens, 50, SEEDED) for tokens in prompts))
        await harness.idle()
    assert crowded == alone


async def test_a_request_that_never_fits_is_refused_with_both_numbers(started: Started) -> None:
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


async def test_the_context_ends_an_answer(started: Started) -> None:
    async with started(context_length=40) as harness:
        decoded = await harness.decode(text(30), 100)
        assert (decoded.stopped.reason, decoded.stopped.tokens) == ("length", 40)


@pytest.mark.parametrize("state", ["waiting", "prompt", "decoding", "held"])
@pytest.mark.parametrize("way", ["close", "cancel"])
async def test_a_request_can_be_given_up_in_every_state(started: Started, state: str, way: str) -> None:
    async with started(batch_limit=1, token_budget=4) as harness:
        first = harness.decoding(text(4), 800, request_id="first")
        victim = harness.decoding(text(400), 2 if state == "held" else 600, hold=True, request_id="victim")
        async with aclosing(first), aclosing(victim):
            if state == "waiting":
                assert isinstance(await anext(first), Extended)
            reader = asyncio.ensure_future(anext(victim))
            if state in ("waiting", "prompt"):
                await asyncio.sleep(0.02)
                assert not reader.done()
                assert (await harness.engine.load()).waiting == (state == "waiting")
            else:
                await reader
                event = await anext(victim)
                assert isinstance(event, Tokens)
                if state == "held":
                    await harness.collect(replay(Extended(0, 0, 0), event, following=victim))
                reader = asyncio.ensure_future(anext(victim))
                await asyncio.sleep(0)
            if way == "cancel":
                await harness.engine.cancel("victim")
                with pytest.raises(Cancelled):
                    await exhaust(reader, victim)
            else:
                reader.cancel()
                await asyncio.wait({reader})
        await harness.idle()
        assert (await harness.engine.load()).sessions == 0


async def replay(*events: Any, following: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    for event in events:
        yield event
    async for event in following:
        yield event


async def exhaust(reader: asyncio.Future[Any], stream: AsyncGenerator[Any, None]) -> None:
    await reader
    async for _ in stream:
        pass


async def test_a_hundred_mixed_requests_leave_nothing_behind(started: Started) -> None:
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


async def test_a_failed_pass_ends_its_requests_and_no_other(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started() as harness:
        expected = await harness.generate(text(10), 5)
        model = harness.engine._runner.model
        monkeypatch.setattr(model, "forward", lambda chunks: 1 / 0)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await harness.generate(text(10), 5)
        monkeypatch.undo()
        assert await harness.generate(text(10), 5) == expected
        await harness.idle()


async def test_closing_in_the_middle_of_everything_frees_all(started: Started) -> None:
    async with started(batch_limit=2) as harness:
        tasks = [asyncio.create_task(harness.generate(text(300, which), 300)) for which in range(4)]
        await harness.until(lambda: harness.store.stats.used > 0, "nothing has begun")
        await harness.engine.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)
        assert harness.store.stats.used == 0
        with pytest.raises(EngineError, match="closed"):
            await harness.generate(text(3), 1)


async def test_a_model_that_cannot_load_fails_the_start(started: Started) -> None:
    with pytest.raises(EngineError, match="no model nowhere"):
        async with started("nowhere"):
            pass


def test_listing_the_plugin_imports_no_torch() -> None:
    code = "import sys, pdd_torch.plugin as p; p.pdd_register_engines(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "people": {"type": "integer", "minimum": 0, "maximum": 9999},
        "old": {"type": "boolean"},
    },
    "required": ["city", "people", "old"],
    "additionalProperties": False,
}


def fits(text: str) -> bool:
    value = json.loads(text)
    assert value["city"] in ("Paris", "Rome")
    return list(value) == ["city", "people", "old"] and type(value["people"]) is int and type(value["old"]) is bool


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_json_is_whole_behind_a_handoff_at_every_token(started: Started, sampling: Sampling) -> None:
    # Random weights love blanks, which JSON allows many of: with the bias the answer stays short.
    sampling = structs.replace(
        sampling,
        guide=Guide(kind="json_schema", text=json.dumps(SCHEMA)),
        stop_token_ids=(END,),
        frequency_penalty=0.2,
        logit_bias=tuple((blank, -50.0) for blank in b" \t\n"),
    )
    prompt = text(40)
    async with started() as relay, started(block_size=8) as main:
        whole = await relay.decode(prompt, 100, sampling)
        assert whole.stopped.reason == "stop"
        assert fits(bytes(whole.ids[:-1]).decode())
        for known in range(len(whole.ids)):
            tokens = (*prompt, *whole.ids[:known])
            rest = await main.decode(tokens, 100, sampling, prompt_tokens=len(prompt))
            assert whole.ids[:known] + rest.ids == whole.ids


async def test_without_a_tokenizer_to_guide_by_it_serves_all_but_guides(tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "model")
    (model / "tokenizer.json").write_text('{"model": {"type": "no such"}}')
    engine = TorchEngine(TorchEngine.Config(kv_blocks=64), ModelSpec(source=str(model)))
    async with EngineHarness.started(engine) as harness:
        assert "guided" not in harness.info.capabilities.names
        assert len(await harness.generate(text(10), 3)) == 3
        with pytest.raises(RequestError, match="guided"):
            await harness.generate(text(10), 3, Sampling(guide=Guide(kind="json_object")))
        await harness.idle()


async def test_a_guide_is_compiled_beside_the_passes_and_its_request_can_go_meanwhile(started: Started) -> None:
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


@pytest.mark.model
async def test_smollm2_writes_json_and_goes_on_with_it_anywhere(started: Started) -> None:
    async with started("smollm2") as harness:
        files = await harness.engine.tokenizer()
        tokenizer = Tokenizer.from_str(files.tokenizer_json)
        question = "<|im_start|>user\nTell me about Paris, as JSON.<|im_end|>\n<|im_start|>assistant\n"
        prompt = tuple(tokenizer.encode(question).ids)
        sampling = Sampling(
            temperature=0,
            stop_token_ids=files.eos_token_ids,
            guide=Guide(kind="json_schema", text=json.dumps(SCHEMA)),
            repetition_penalty=1.1,
        )
        whole = await harness.decode(prompt, 80, sampling)
        assert whole.stopped.reason == "stop"
        assert fits(tokenizer.decode(whole.ids[:-1]))
        for known in range(1, len(whole.ids)):
            tokens = (*prompt, *whole.ids[:known])
            assert (await harness.decode(tokens, 1, sampling, prompt_tokens=len(prompt))).ids == whole.ids[known:][:1]


@pytest.mark.model
async def test_smollm2_answers_as_it_should(started: Started) -> None:
    async with started("smollm2") as harness:
        files = await harness.engine.tokenizer()
        tokenizer = Tokenizer.from_str(files.tokenizer_json)
        question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        tokens = tuple(tokenizer.encode(question).ids)
        decoded = await harness.decode(tokens, 30, Sampling(temperature=0, stop_token_ids=files.eos_token_ids))
        assert decoded.stopped.reason == "stop"
        assert tokenizer.decode(list(decoded.ids), skip_special_tokens=False) == (
            "The capital of France is Paris.<|im_end|>"
        )
