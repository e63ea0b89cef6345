from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from pathlib import Path

import pytest
from pdd_llamacpp.conformance import TestBfloat16, TestFewCells, TestFloat16
from pdd_llamacpp.engine import LlamaCppEngine
from tokenizers import Tokenizer

from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import ModelSpec, Sampling, Token
from pdd_runtime.testing.engine_harness import EngineHarness

__all__ = ["TestBfloat16", "TestFewCells", "TestFloat16"]


def text(n: int, which: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(which).choices(range(256), k=n))


async def test_the_exact_mode_is_not_promised_and_refused_with_a_way_out(tiny: Path) -> None:
    spec = ModelSpec(source=str(tiny), mode="exact")
    promised = LlamaCppEngine.promises(spec, LlamaCppEngine.Config())
    assert promised is not None
    assert not promised.exact
    with pytest.raises(EngineError, match="exact") as caught:
        async with EngineHarness.started(LlamaCppEngine(LlamaCppEngine.Config(), spec)):
            pass
    assert "mode: fast" in caught.value.fix


def compared(mine: tuple[Token, ...], theirs: tuple[Token, ...]) -> int:
    """How many tokens of two greedy answers are equal: all, or those before a near tie. A random model has many, and
    llama.cpp's sums depend on the batch in the last digits of float16."""
    for count, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if one.id != other.id:
            assert abs(one.top[0][1] - one.top[1][1]) < 0.05, (count, one, other)
            return count
        assert one.logprob == pytest.approx(other.logprob, abs=0.05)
    return len(mine)


async def test_crowded_requests_answer_as_if_they_were_alone(tiny: Path) -> None:
    """Preempted for blocks, and moved out of the cells."""
    prompts = [text(60, which) for which in range(6)]
    spec, greedy = ModelSpec(source=str(tiny)), Sampling(temperature=0, logprobs=2)
    async with EngineHarness.started(LlamaCppEngine(LlamaCppEngine.Config(), spec)) as harness:
        alone = [(await harness.decode(tokens, 50, greedy)).tokens for tokens in prompts]
    config = LlamaCppEngine.Config(kv_blocks=12, cells=192, context_length=192)
    async with EngineHarness.started(LlamaCppEngine(config, spec)) as harness:
        crowded = await asyncio.gather(*(harness.decode(tokens, 50, greedy) for tokens in prompts))
        await harness.idle()
    counts = [compared(mine, theirs.tokens) for mine, theirs in zip(alone, crowded, strict=True)]
    assert sum(counts) > 200, counts


def test_it_works_without_torch_and_listing_it_loads_no_library() -> None:
    code = (
        "import sys, pdd_llamacpp.plugin as p; (engine,) = p.pdd_register_engines(); "
        "assert 'pdd_llamacpp.library' not in sys.modules; "
        "import pdd_llamacpp.runner; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.model
async def test_smollm2_answers_as_it_should() -> None:
    async with EngineHarness.started(LlamaCppEngine(LlamaCppEngine.Config(), ModelSpec(source="smollm2"))) as harness:
        files = await harness.engine.tokenizer()
        tokenizer = Tokenizer.from_str(files.tokenizer_json)
        question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        tokens = tuple(tokenizer.encode(question).ids)
        decoded = await harness.decode(tokens, 30, Sampling(temperature=0, stop_token_ids=files.eos_token_ids))
        assert decoded.stopped.reason == "stop"
        assert tokenizer.decode(list(decoded.ids), skip_special_tokens=False) == (
            "The capital of France is Paris.<|im_end|>"
        )
