"""Two engines in one graph, both ways round: what one has computed, the other decodes from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pdd_llamacpp.engine import LlamaCppEngine
from pdd_llamacpp.testing import build_tiny_gguf, dequantise
from pdd_torch.engine import TorchEngine

from pdd_runtime.frontend.language import Language
from pdd_runtime.models.source import find_model
from pdd_runtime.plugins.engine import ModelSpec, Sampling, Token
from pdd_runtime.testing.engine_harness import EngineHarness
from tests.integration.prompts import PROMPTS
from tests.integration.stack import Stack

ENGINES = {"torch": TorchEngine, "llamacpp": LlamaCppEngine}
WAYS = [("torch", "llamacpp"), ("llamacpp", "torch")]
RELAY, LENGTH = 17, 28
"""Tokens of the relay, one more than a block has, and of the answer: one of prefill, 17, and 10 of main."""
GREEDY = Sampling(temperature=0, logprobs=2)
NEAR = 0.05
"""Logprobs closer than this are a near tie: the engines add up in different orders, and llama.cpp attends in float16.
Measured on these prompts, their logprobs differ by 0.017 at most."""
CLEAR = ("question", "long-story", "system", "emoji")
"""Prompts to which SmolLM2's answers have no near tie."""

Answers = dict[str, list[Token]]


async def alone(engine: str, source: Path, names: tuple[str, ...]) -> Answers:
    made = ENGINES[engine](ENGINES[engine].Config(), ModelSpec(source=str(source)))
    async with EngineHarness.started(made) as harness:
        language = Language(await harness.engine.tokenizer())
        return {
            name: list((await harness.decode(await encode(language, name), LENGTH, GREEDY)).tokens) for name in names
        }


async def encode(language: Language, name: str) -> tuple[int, ...]:
    return await language.encode(language.chat(PROMPTS[name]), add_special_tokens=False)


async def mixed(near: str, far: str, source: Path, state: Path, names: tuple[str, ...]) -> Answers:
    """Prefill and relay on `near`, main on `far`, handed off after `RELAY` tokens."""
    pools = {"prefill": near, "relay": near, "main": far}
    bounds = f"{{min_relay_tokens: {RELAY}, max_relay_tokens: {RELAY}}}"
    overrides = [
        f"spec.model.source={source}",
        *(f"spec.pools.{pool}.engine.plugin={engine}" for pool, engine in pools.items()),
        "spec.links.wan.rtt=4ms",
        "spec.routing={plugin: always-relay}",
        f"spec.handoff={{plugin: catch-up, config: {bounds}}}",
    ]
    answers: Answers = {}
    with Stack("mixed", state, *overrides) as stack:
        async with stack.driver() as driver:
            language = Language(await driver.tokenizer())
            for name in names:
                prompt = await encode(language, name)
                answers[name], timeline = await stack.ask(driver, prompt, LENGTH, GREEDY)
                check(timeline, len(prompt), len(answers[name]))
        await stack.idle(60)
    return answers


def check(timeline: dict[str, Any], prompt: int, length: int) -> None:
    """It was handed off, and main computed none of the prompt's KV."""
    assert timeline["route"] == "P-RLD-MD", timeline["reason"]
    assert timeline["tokens"] == {"prefill": 1, "relay": RELAY, "main": length - 1 - RELAY}
    wan = next(row for row in timeline["kv"] if row["edge"] == "prefill->main")
    assert wan["blocks_sent"] > 0
    assert wan["blocks_sent"] + wan["blocks_cached"] == -(-prompt // 16)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("near", "far"), WAYS)
async def test_a_tiny_model_is_handed_from_one_engine_to_the_other(near: str, far: str, tmp_path: Path) -> None:
    """A random model has many near ties, so answers may part at one; before it they are alike."""
    source = build_tiny_gguf(tmp_path / "tiny.gguf", seed=7, context=2048)
    names = ("one-word", "question", "sum", "long-story", "two-turns", "system", "emoji", "code")
    expected = await alone(far, source, names)
    got = await mixed(near, far, source, tmp_path / "state", names)
    handed_on = 0
    for name in names:
        for count, (mine, theirs) in enumerate(zip(got[name], expected[name], strict=False)):
            if mine.id != theirs.id:
                assert theirs.top[0][1] - theirs.top[1][1] < NEAR, (name, count, mine, theirs)
                break
            handed_on += count > RELAY
    assert handed_on > LENGTH - 1 - RELAY, "no answers are alike behind the handoff"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The real model with its weights as float32, 540 MB: the same for both engines."""
    path = dequantise(find_model("smollm2").path, tmp_path_factory.mktemp("models") / "smollm2-float32.gguf")
    yield path
    path.unlink()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def single(smollm2: Path) -> Answers:
    """What either engine answers by itself."""
    torch, llamacpp = [await alone(engine, smollm2, CLEAR) for engine in ENGINES]
    for name in CLEAR:
        gaps = [token.top[0][1] - token.top[1][1] for token in torch[name]]
        assert min(gaps) > NEAR, f"the answer to {name} has a near tie: choose another prompt"
    assert ids(llamacpp) == ids(torch)
    return torch


def ids(answers: Answers) -> dict[str, list[int]]:
    return {name: [token.id for token in tokens] for name, tokens in answers.items()}


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("near", "far"), WAYS)
async def test_smollm2_gives_one_engine_s_tokens_whichever_engine_goes_on(
    near: str, far: str, smollm2: Path, single: Answers, tmp_path: Path
) -> None:
    assert ids(await mixed(near, far, smollm2, tmp_path, CLEAR)) == ids(single)
