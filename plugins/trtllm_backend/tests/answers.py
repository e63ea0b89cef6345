"""What one executor by itself makes of the prompts that graphs are asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from pdd_trtllm.testing.arguments import LlmArgs
from pdd_trtllm.testing.executor import Executor
from pdd_trtllm.testing.serve import execute
from pdd_trtllm.testing.task import Failed, Finish

from pdd_runtime.frontend.language import Language
from pdd_runtime.models.tokenizer import from_directory
from pdd_runtime.plugins.engine import Sampling
from tests.integration.prompts import PROMPTS

NAMES = ("one-word", "question", "long-story", "emoji")
LENGTH, RELAY = 41, 20
"""Tokens of an answer: one of prefill, twenty of the relay, twenty of main."""
GREEDY = Sampling(temperature=0)


async def prompt(model: Path, name: str) -> tuple[int, ...]:
    language = Language(from_directory(model))
    return await language.encode(language.chat(PROMPTS[name]), add_special_tokens=False)


async def answers(model: Path) -> dict[str, list[int]]:
    """Greedy, `LENGTH` tokens each."""
    return dict(zip(NAMES, await alone(model, *[await prompt(model, name) for name in NAMES]), strict=True))


async def alone(model: Path, *prompts: Sequence[int]) -> list[list[int]]:
    """The same of any prompts."""
    executor, _ = execute(LlmArgs(model=str(model)))
    try:
        return [await _answer(executor, tokens) for tokens in prompts]
    finally:
        await asyncio.to_thread(executor.stop)


async def _answer(executor: Executor, tokens: Sequence[int]) -> list[int]:
    made: list[int] = []
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def take(more: Sequence[int], finish: Finish | Failed | None) -> None:
        made.extend(more)
        if finish is not None:
            loop.call_soon_threadsafe(over.set)

    executor.submit(list(tokens), LENGTH, GREEDY, True, take)
    await over.wait()
    return made
