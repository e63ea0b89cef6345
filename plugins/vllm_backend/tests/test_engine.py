"""The engine on real servers: the conformance suite, and what is vLLM's own."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from pdd_torch.engine import TorchEngine
from pdd_vllm import testing
from pdd_vllm.conformance import TestVllm, model
from pdd_vllm.engine import VllmEngine

from pdd_runtime.kv import chain, seed
from pdd_runtime.plugins.engine import ModelSpec, Sampling, Tokens
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.metrics import scrape
from pdd_runtime.testing.engine_harness import EngineHarness
from tests.waiting import PATIENCE

__all__ = ["TestVllm", "model"]
pytestmark = pytest.mark.timeout(3600)
TOKENS = tuple(range(20, 120))


def attached(model: ModelSpec) -> testing.AttachedEngine:
    return testing.AttachedEngine(testing.settings(), model)


def kv(harness: EngineHarness, tokens: tuple[int, ...]) -> NDArray[np.float32]:
    """`[layers, 2, tokens, kv heads, head_dim]` of what the store has of them."""
    layout = harness.info.layout
    blocks = chain(seed(harness.info.fingerprint, layout.spec), tokens, layout.block_size)
    parts = []
    for block in blocks:
        number = harness.store.find(block.name)
        assert number is not None, "not all of it is here"
        elements = layout.elements(harness.store.memory(number))
        parts.append(elements.reshape(*elements.shape[:3], -1, layout.head_dim)[:, :, : block.tokens])
    return np.concatenate(parts, axis=2).view(np.float32)


async def test_its_kv_is_that_of_another_engine_under_the_same_names(model: ModelSpec) -> None:
    """Layer for layer, head for head: KV may cross engines."""
    async with EngineHarness.started(attached(model)) as ours:
        mine = await ours.prefill(TOKENS)
        from_vllm = kv(ours, TOKENS)
    async with EngineHarness.started(TorchEngine(TorchEngine.Config(kv_blocks=64), model)) as theirs:
        other = await theirs.prefill(TOKENS)
        from_torch = kv(theirs, TOKENS)
        assert theirs.info.fingerprint == ours.info.fingerprint
    assert mine.first.id == other.first.id
    assert np.abs(from_torch).max() > 1
    assert np.allclose(from_vllm, from_torch, atol=1e-3)


async def test_where_the_kv_came_from_is_what_its_own_metrics_say(model: ModelSpec) -> None:
    async with EngineHarness.started(attached(model)) as harness:
        first = (await harness.prefill(TOKENS)).first
        await _reset(harness)
        before = await _sources(harness)
        decoded = await harness.decode((*TOKENS, first.id), 4)
        after = await _sources(harness)
    assert decoded.extended.cached == len(TOKENS)
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 0, len(TOKENS)]


async def test_what_its_own_cache_has_is_not_loaded_again(model: ModelSpec) -> None:
    async with EngineHarness.started(attached(model)) as harness:
        first = (await harness.prefill(TOKENS)).first
        before = await _sources(harness)
        decoded = await harness.decode((*TOKENS, first.id), 4)
        after = await _sources(harness)
    whole = len(TOKENS) // testing.BLOCK * testing.BLOCK
    assert decoded.extended.cached == len(TOKENS)
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, whole, len(TOKENS) - whole]


async def test_tenants_share_nothing_in_its_own_cache_either(model: ModelSpec) -> None:
    async with EngineHarness.started(attached(model)) as harness:
        await harness.prefill(TOKENS, salt="one")
        before = await _sources(harness)
        await harness.prefill(TOKENS, salt="two")
        after = await _sources(harness)
    assert [now - then for now, then in zip(after, before, strict=True)] == [len(TOKENS), 0, 0]


async def test_logprobs_are_the_models_own_whatever_is_drawn(model: ModelSpec) -> None:
    """The likeliest alternatives, as many as are asked for, whether the drawn token is one of them or not."""
    async with EngineHarness.started(attached(model)) as harness:
        free = await harness.decode(TOKENS, 1, Sampling(temperature=0, logprobs=5))
        forced = next(token for token in range(3, 250) if token not in dict(free.tokens[0].top))
        bias = ((forced, 100.0),)
        hot = await harness.decode(TOKENS, 1, Sampling(temperature=2.0, logprobs=5, seed=3, logit_bias=bias))
    assert hot.ids == (forced,)
    assert [token for token, _ in hot.tokens[0].top] == [token for token, _ in free.tokens[0].top]
    assert hot.tokens[0].top[0][1] == pytest.approx(free.tokens[0].top[0][1], abs=1e-3)
    assert hot.tokens[0].logprob is not None
    assert hot.tokens[0].logprob < free.tokens[0].top[-1][1]


async def test_a_closed_stream_ends_the_request_at_the_server(model: ModelSpec) -> None:
    async with EngineHarness.started(attached(model)) as harness:
        async with asyncio.timeout(PATIENCE), aclosing(harness.decoding(TOKENS, 800)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    break
            assert await _running(harness) == 1
        await _none_runs(harness)
        await harness.idle()


async def test_a_worker_that_goes_in_mid_answer_leaves_a_server_that_serves_the_next(model: ModelSpec) -> None:
    """Nothing is offered while there is none, and nothing is written into memory that is no longer shared."""
    engine = attached(model)
    async with EngineHarness.started(engine) as harness:
        expected = await harness.generate(TOKENS, 40)
        events = harness.decoding(TOKENS, 800)
        async with asyncio.timeout(PATIENCE), aclosing(events):
            await anext(events)
            await harness.engine.close()
        url = engine.config.url
    body = {"prompt": TOKENS, "max_tokens": 40, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=PATIENCE) as client:
        answer = (await client.post(f"{url}/v1/completions", json=body)).raise_for_status().json()
    assert tuple(answer["choices"][0]["token_ids"]) == expected
    async with EngineHarness.started(attached(model)) as harness:
        assert await harness.generate(TOKENS, 40) == expected
        await harness.idle()


@pytest.mark.slow
async def test_tensor_parallel_ranks_each_have_their_shard(model: ModelSpec) -> None:
    """Two ranks of a server of its own: what they write together is what one writes, and they go on from it."""
    config = testing.settings().model_copy(update={"tp": 2})
    async with EngineHarness.started(attached(model)) as harness:
        alone = await harness.prefill(TOKENS)
        expected, from_one = await harness.generate((*TOKENS, alone.first.id), 12), kv(harness, TOKENS)
    async with EngineHarness.started(VllmEngine(config, model)) as harness:
        assert harness.info.layout.tp_size == 2
        assert (await harness.prefill(TOKENS)).first.id == alone.first.id
        assert np.allclose(kv(harness, TOKENS), from_one, atol=1e-3)
        await _reset(harness)
        decoded = await harness.decode((*TOKENS, alone.first.id), 12)
        assert decoded.extended.cached == len(TOKENS)
        assert decoded.ids == expected


async def _sources(harness: EngineHarness) -> list[int]:
    """Tokens of all prompts so far by where their KV came from: computed, vLLM's own cache, our blocks."""
    metrics = scrape(await _get(harness, "/metrics"))
    return [
        int(metrics.value("vllm:prompt_tokens_by_source_total", source=source))
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    ]


async def _running(harness: EngineHarness) -> int:
    return int(scrape(await _get(harness, "/metrics")).value("vllm:num_requests_running"))


async def _none_runs(harness: EngineHarness) -> None:
    async with asyncio.timeout(PATIENCE):
        while await _running(harness):
            pass


async def _get(harness: EngineHarness, path: str) -> str:
    return await _http(harness).get_text(path)


async def _reset(harness: EngineHarness) -> None:
    """Its own cache is empty."""
    await _http(harness).post_json("/reset_prefix_cache", {})


def _http(harness: EngineHarness) -> HttpClient:
    engine = harness.engine
    assert isinstance(engine, VllmEngine)
    return engine._http
