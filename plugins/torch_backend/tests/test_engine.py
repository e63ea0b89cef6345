from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from pdd_torch.conformance import TestExact, TestExactBfloat16, TestFast
from pdd_torch.engine import TorchEngine
from pdd_torch.testing import build_tiny_model
from tokenizers import Tokenizer

from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import Guide, ModelSpec, Sampling
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


def test_a_prompt_that_the_host_has_no_memory_for_fails_alone_and_is_served_when_it_has(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "tiny", context=4096)
    script = Path(__file__).with_name("short_of_memory.py")
    ran = subprocess.run([sys.executable, str(script), str(model)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "can't allocate memory" in ran.stdout


async def test_a_preempted_request_answers_as_if_it_had_not_been(started: Started) -> None:
    prompts = [text(60, which) for which in range(6)]
    async with started() as harness:
        alone = [await harness.generate(tokens, 50, SEEDED) for tokens in prompts]
    async with started(kv_blocks=12) as harness:  # one needs 7 blocks
        crowded = await asyncio.gather(*(harness.generate(tokens, 50, SEEDED) for tokens in prompts))
        await harness.idle()
    assert crowded == alone


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
