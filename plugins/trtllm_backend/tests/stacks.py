"""Graphs with stand-ins in all their workers, brought up by the command line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from pdd_trtllm.testing.serve import PAUSE
from pdd_trtllm.testing.standin import environment

from plugins.trtllm_backend.tests.answers import GREEDY, LENGTH, NAMES, RELAY, prompt
from tests.integration.stack import Stack

BOUNDS = f"{{min_relay_tokens: {RELAY}, max_relay_tokens: {RELAY}}}"
HANDED_OFF = ("spec.routing={plugin: always-relay}", f"spec.handoff={{plugin: catch-up, config: {BOUNDS}}}")
DIRECT = ("spec.routing={plugin: never-relay}",)


@contextmanager
def stacked(
    graph: str, model: Path, state: Path, config: Mapping[str, Any], *overrides: str, **env: str
) -> Iterator[Stack]:
    """`config`: of every pool, beside what makes a server small. `env`: of every server."""
    small = {"block_size": 16, "batch_limit": 4, "token_budget": 64, "start_timeout": "5min"}
    settings = json.dumps(small | {"env": environment(**{PAUSE: "0.01"}, **env)} | config)
    pools = [f"spec.pools.{pool}.engine.config={settings}" for pool in ("prefill", "relay", "main")]
    of_model = (f"spec.model.source={model}", "spec.model.dtype=float32")
    with Stack(graph, state, *of_model, *pools, *overrides) as stack:
        yield stack


async def many_at_once(stack: Stack, model: Path, expected: Mapping[str, list[int]]) -> None:
    """Over the relay, every prompt three times."""
    async with stack.driver(*HANDED_OFF) as driver:
        asked = [name for name in NAMES for _ in range(3)]
        prompts = {name: await prompt(model, name) for name in NAMES}
        answers = await asyncio.gather(*(stack.ask(driver, prompts[name], LENGTH, GREEDY) for name in asked))
    for name, (tokens, _) in zip(asked, answers, strict=True):
        assert [token.id for token in tokens] == expected[name]
    await stack.idle(60)


async def streamed(url: str, body: dict[str, Any]) -> AsyncIterator[str]:
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])["choices"][0]["delta"].get("content") or ""


def servers(stack: Stack, pool: str) -> list[int]:
    """Processes of the servers of a pool's workers."""
    workers = {int(row["pid"]) for row in stack.ps() if row.get("pool") == pool and row.get("pid")}
    parents: dict[int, int] = {}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if b"tensorrt_llm.commands.serve" in (entry / "cmdline").read_bytes().split(b"\0")[2:3]:
                    found.append(int(entry.name))
            except (OSError, ValueError):
                continue
    return [pid for pid in found if descends(pid, workers, parents)]


def descends(pid: int, ancestors: set[int], parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid in ancestors:
            return True
    return False
