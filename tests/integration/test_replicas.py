"""Several frontend processes behind one port, brought up by the command line."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.waiting import PATIENCE

GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: replicas}
spec:
  model: {source: toy}
  clusters: {dc: {}}
  pools:
    main: {role: aggregated, cluster: dc, engine: {plugin: scripted, config: {token_time: 0.01, batch_limit: 64}}}
  frontend: {port: 0, replicas: 2}
"""


class Running:
    def __init__(self, state: Path) -> None:
        self.file = state / "replicas.yaml"
        self.file.write_text(GRAPH)
        self.env = {**os.environ, "PDD_STATE_DIR": str(state)}
        self.cli("up", str(self.file), "-d", "--wait")
        self.url = str(self.frontends()[0]["endpoint"])

    def cli(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "pdd_runtime.cli", *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=2 * PATIENCE, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def frontends(self) -> list[dict[str, Any]]:
        rows = json.loads(self.cli("ps", "replicas", "--format", "json"))
        return [row for row in rows if row["role"] == "frontend"]

    def get(self, path: str) -> httpx.Response:
        """Over a connection of its own: the kernel chooses who answers."""
        return httpx.get(self.url + path, timeout=PATIENCE)

    def delete(self, path: str) -> httpx.Response:
        """The same."""
        return httpx.delete(self.url + path, timeout=PATIENCE)

    async def stream(self, tokens: int, begun: asyncio.Event | None = None) -> tuple[str, bool]:
        """(its id, whether the answer came to its end), over its own connection; sets `begun` at its first byte."""
        body = {"prompt": "hello", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        text, request_id = b"", ""
        try:
            async with (
                httpx.AsyncClient(timeout=PATIENCE) as client,
                client.stream("POST", f"{self.url}/v1/completions", json=body) as answer,
            ):
                request_id = answer.headers["x-pdd-request-id"]
                assert answer.status_code == 200, await answer.aread()
                async for part in answer.aiter_bytes():
                    text += part
                    if begun is not None:
                        begun.set()
        except httpx.TransportError:
            return request_id, False
        return request_id, text.endswith(b"data: [DONE]\n\n")

    async def streams(self, count: int, tokens: int) -> list[asyncio.Task[tuple[str, bool]]]:
        """So many at once; returns when all of them are under way."""
        begun = [asyncio.Event() for _ in range(count)]
        tasks = [asyncio.create_task(self.stream(tokens, event)) for event in begun]
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(event.wait() for event in begun))
        return tasks


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    graph = Running(tmp_path_factory.mktemp("replicas"))
    yield graph
    if graph.env["PDD_STATE_DIR"] and (graph.file.parent / "replicas" / "launcher.json").exists():
        graph.cli("down", "replicas")


def requests_by_replica(metrics: str) -> dict[str, int]:
    found = re.findall(r'^pdd_requests_total\{.*replica="(\d)".*status="200".*\} (\S+)$', metrics, re.MULTILINE)
    return {replica: int(float(count)) for replica, count in found}


def test_both_are_listed_with_one_url(running: Running) -> None:
    first, second = running.frontends()
    assert (first["index"], second["index"]) == (0, 1)
    assert first["endpoint"] == second["endpoint"] == running.url
    assert first["pid"] != second["pid"]
    assert first["state"] == second["state"] == "ready"


async def test_whoever_is_asked_knows_the_requests_of_both(running: Running) -> None:
    streams = await asyncio.gather(*(running.stream(10) for _ in range(64)))
    assert all(whole for _, whole in streams)
    ids = {request_id for request_id, _ in streams}
    for _ in range(8):
        counts = requests_by_replica(running.get("/metrics").text)
        assert set(counts) == {"0", "1"}
        assert sum(counts.values()) >= 64
        listed = running.get("/pdd/requests").json()["requests"]
        assert ids <= {line["id"] for line in listed}
    for request_id in sorted(ids)[:16]:
        assert running.get(f"/pdd/requests/{request_id}").json()["id"] == request_id
    assert running.get("/pdd/requests/req-0").status_code == 404


async def test_whoever_is_asked_cancels_the_requests_of_both(running: Running) -> None:
    streams = await running.streams(16, tokens=6000)
    listed = running.get("/pdd/requests").json()["requests"]
    ids = [line["id"] for line in listed if line["status"] is None]
    assert len(ids) == 16
    for request_id in ids:
        assert running.delete(f"/pdd/requests/{request_id}").status_code == 200
    assert not any(whole for _, whole in await asyncio.gather(*streams))
    for request_id in ids:
        assert "by an operator" in running.get(f"/pdd/requests/{request_id}").json()["error"]


async def test_one_that_is_killed_takes_only_its_own_streams_and_comes_back(running: Running) -> None:
    victim = running.frontends()[0]
    streams = await running.streams(32, tokens=300)
    os.kill(victim["pid"], signal.SIGKILL)
    ends = await asyncio.gather(*streams)
    broken = [request_id for request_id, whole in ends if not whole]
    assert 0 < len(broken) < 32
    async with asyncio.timeout(2 * PATIENCE):
        while (now := running.frontends()[0])["state"] != "ready" or now["pid"] == victim["pid"]:
            # Meanwhile the other answers, and the one that comes back takes none that it would refuse.
            _, whole = await running.stream(5)
            assert whole
    assert now["endpoint"] == running.url
    again = await asyncio.gather(*(running.stream(5) for _ in range(32)))
    assert all(whole for _, whole in again)
    assert set(requests_by_replica(running.get("/metrics").text)) == {"0", "1"}


async def test_down_lets_the_answers_of_both_end(running: Running) -> None:
    streams = await running.streams(16, tokens=150)
    await asyncio.to_thread(running.cli, "down", "replicas")
    assert all(whole for _, whole in await asyncio.gather(*streams))
