"""Three vLLM servers under one graph, brought up by the command line, and what a plain one answers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from pdd_vllm import testing

from pdd_runtime.clock import now
from pdd_runtime.server.metrics import Metrics, scrape
from pdd_runtime.server.process import free_port
from tests.integration.stack import Stack

PATIENCE = 120.0
"""Seconds for what must happen at once, where several servers share two cores."""
START = 1800.0
"""Seconds for servers to start."""
POOLS = ("prefill", "relay", "main")


class VllmStack(Stack):
    """The graph `mixed` with a vLLM server in every worker. It has two datacenters and a shaped line between them."""

    graph = "mixed"

    def __init__(self, model: Path, state: Path, *overrides: str) -> None:
        self.ports = {pool: free_port() for pool in POOLS}
        engines = [
            f"spec.pools.{pool}.engine={json.dumps({'plugin': 'vllm', 'config': {**self.config(), 'port': port}})}"
            for pool, port in self.ports.items()
        ]
        super().__init__(self.graph, state, f"spec.model.source={model}", *engines, *overrides)

    def config(self) -> dict[str, Any]:
        """Of one pool's engine."""
        config = testing.settings().model_dump(mode="json", exclude_unset=True)
        return {**config, "start_timeout": testing.START}

    def cli(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pdd_runtime.cli", *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=START, check=False)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def worker(self, pool: str) -> dict[str, Any]:
        """Its row of `ps`."""
        return next(row for row in self.ps() if row["role"] == pool)

    def metrics(self, pool: str) -> Metrics:
        """Of the pool's server."""
        url = f"http://127.0.0.1:{self.ports[pool]}/metrics"
        return scrape(httpx.get(url, timeout=PATIENCE).raise_for_status().text)

    def running(self, pool: str) -> int:
        """Requests that the pool's server computes now."""
        return int(self.metrics(pool).value("vllm:num_requests_running"))

    def sources(self, pool: str) -> dict[str, int]:
        """Where the KV of the prompts that the pool's server was sent came from, in tokens."""
        metrics = self.metrics(pool)
        return {
            source: int(metrics.value("vllm:prompt_tokens_by_source_total", source=source))
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        }

    def processes(self, pool: str) -> list[int]:
        """The server of the pool's worker: all processes that run in its directory, the guardian as well."""
        return processes(self.ports[pool])

    async def ready_again(self, pool: str, pid: int) -> None:
        """Return when another process than `pid` is the pool's worker, and serves; 0: any."""
        until = now() + START
        while (row := self.worker(pool))["state"] != "ready" or row["pid"] == pid:
            assert now() < until, row
            await asyncio.sleep(0.5)


def processes(port: int) -> list[int]:
    """All that run in the directory of the server that listens there."""
    places = {_place(pid) for pid, argv in _running() if str(port) in argv and "vllm.entrypoints" in " ".join(argv)}
    return [pid for pid, _ in _running() if _place(pid) in places - {""}]


def _running() -> Iterator[tuple[int, list[str]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                yield int(entry.name), (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")


def _place(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/cwd").readlink()).removesuffix(" (deleted)")
    except OSError:
        return ""


def complete(url: str, tokens: tuple[int, ...], n: int) -> list[int]:
    """The `n` likeliest tokens behind `tokens`, whatever they are."""
    body = {"prompt": tokens, "max_tokens": n, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).raise_for_status().json()
    found: list[int] = answer["choices"][0]["token_ids"]
    return found
