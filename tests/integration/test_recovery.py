"""A real model loses no token, and changes none, when its workers are killed: whatever the request asks for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pdd_runtime.pipeline import Driver
from pdd_runtime.plugins.engine import Guide
from tests.pipeline.conftest import Answer, Fleet
from tests.waiting import PATIENCE, until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: recovery-of-a-model}
spec:
  model: {source: SOURCE, mode: exact}
  clusters: {dc-a: {}, dc-b: {}}
  links:
    wan: {between: [dc-a, dc-b], bandwidth: 20Mbit/s, rtt: 4ms, emulate: true}
  pools:
    prefill: {role: prefill, cluster: dc-a, engine: {plugin: torch}}
    relay: {role: relay, cluster: dc-a, engine: {plugin: torch}}
    main: {role: main, cluster: dc-b, engine: {plugin: torch}}
    all: {role: aggregated, cluster: dc-a, engine: {plugin: torch}}
  edges:
    - {from: prefill, to: relay, carries: kv, transport: {plugin: tcp}}
    - {from: prefill, to: main, carries: kv, transport: {plugin: tcp}, link: wan}
    - {from: relay, to: main, carries: tokens, link: wan}
  routing: {plugin: always-relay}
  handoff: {plugin: catch-up, config: {min_relay_tokens: 60, max_relay_tokens: 60}}
"""
TOKENS = 160
START = 120.0
"""Seconds for workers that import torch, all at once."""
KILLS = (("prefill", "relay", 0), ("relay", "relay", 10), ("main", "relay", 10), ("main", "main", 10))
"""Who, when that tier has made more than so many tokens of every answer."""
SCHEMA = '{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "minItems": 200}}}'
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "seeded": {"temperature": 0.8, "seed": 5, "top_p": 0.9, "logprobs": 0},
    "penalised": {"temperature": 0.7, "seed": 6, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "min_tokens": 20},
    "guided": {"temperature": 0.9, "seed": 7, "guide": Guide(kind="json_schema", text=SCHEMA)},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), (), GRAPH.replace("SOURCE", str(tiny)))
    await fleet.start(patience=START)
    try:
        yield fleet
    finally:
        await fleet.close()


async def ask(fleet: Fleet, driver: Driver, name: str, id: str = "") -> Answer:
    prompt = [5 + (7 * i + len(name)) % 90 for i in range(200)]
    return await fleet.ask(driver, prompt, TOKENS, id=id, **SAMPLINGS[name])


async def test_the_tokens_are_those_of_one_engine_whoever_is_killed(fleet: Fleet) -> None:
    alone, driver = await fleet.aggregated(), await fleet.driver()
    expected = {name: await ask(fleet, alone, name) for name in SAMPLINGS}
    for pool, tier, behind in KILLS:
        ids = {name: f"{name}: {pool} behind {behind} of {tier}" for name in SAMPLINGS}

        def far(ids: dict[str, str] = ids, tier: str = tier, behind: int = behind) -> bool:
            found = [fleet.timelines.get(id) for id in ids.values()]
            return all(t is not None and getattr(t.tokens, tier) > behind for t in found)

        asking = {name: asyncio.create_task(ask(fleet, driver, name, id)) for name, id in ids.items()}
        await until(far)
        await fleet.kill(pool)
        answers = {name: await asyncio.wait_for(task, PATIENCE) for name, task in asking.items()}
        for name, answer in answers.items():
            assert answer.tokens == expected[name].tokens, ids[name]
        if pool != "prefill":  # that one may have given all
            assert any(answer.timeline["recoveries"] for answer in answers.values()), pool
        gaps = [max(b - a for a, b in zip(a.times, a.times[1:], strict=False)) for a in answers.values()]
        print(f"{pool} killed behind {behind} tokens of {tier}: the longest wait was {max(gaps):.2f} s")
        await fleet.idle()
        if (pool, tier) == KILLS[-1][:2]:
            return
        await fleet.spawn(pool)
        await until(lambda: {peer.key.pool for peer in driver._peers.ready} == set(fleet.graph.spec.pools), START)
