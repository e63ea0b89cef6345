"""`pdd-runtime simulate`: what a graph would do, as a table and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdd_runtime.cli.console import FAILED, OK, USAGE
from tests.cli.shell import Cli
from tests.graphs import pdd

GRAPH = pdd(
    "simulated",
    prefill="replicas: 2, hardware: h100",
    relay="hardware: h100",
    main="replicas: 2, hardware: h200",
    wan="bandwidth: 10Gbit/s, rtt: 20ms",
    model="llama-3.1-8b",
)
WORKLOAD = "prompt=8000,output=50,hit=0.5,rate=1"


@pytest.fixture
def graph(tmp_path: Path) -> str:
    path = tmp_path / "graph.yaml"
    path.write_text(GRAPH)
    return str(path)


def test_it_says_what_users_would_see_and_what_would_be_busy(cli: Cli, graph: str) -> None:
    told = cli("simulate", graph, "-w", WORKLOAD, "-n", "200", "--seeds", "3")
    assert told.code == OK
    for line in (
        "600 of 600, in 3 runs",
        "route P-RLD-MD",
        "ttft",
        "handoff_gap",
        "main, each worker",
        "wan, from dc-a",
    ):
        assert line in told.out
    assert "roofline" in told.out
    assert "wan, from dc-b" not in told.out


def test_programs_get_every_run_and_the_intervals(cli: Cli, graph: str) -> None:
    told = json.loads(cli("simulate", graph, "-w", WORKLOAD, "-n", "200", "--seeds", "2", "--format", "json").out)
    low, mean, high = (told["e2e"]["mean"][key] for key in ("low", "mean", "high"))
    assert low < mean < high
    assert [run["requests"] for run in told["runs"]] == [200, 200]
    assert set(told["sources"]) == {"prefill", "relay", "main"}
    again = json.loads(cli("simulate", graph, "-w", WORKLOAD, "-n", "200", "--seeds", "2", "--format", "json").out)
    assert again == told


def test_requests_beyond_the_context_are_told_with_the_key_that_says_so(cli: Cli, graph: str) -> None:
    mixed = "prompt=choice(1000:0.75, 200000:0.25),output=50,rate=1"
    limit = ("--set", "spec.pools.main.engine.config.context_length=4096")
    told = cli("simulate", graph, "-w", mixed, "-n", "200", "--seeds", "2", *limit)
    assert told.code == OK
    assert "refused as too long" in told.out
    assert "refused by admission" not in told.out
    for words in ("of 400 requests", "pool main takes 4,096 tokens", "engine.config.context_length in the graph"):
        assert words in told.err
    assert "more than it can do" not in told.err

    found = json.loads(cli("simulate", graph, "-w", mixed, "-n", "200", "--seeds", "2", *limit, "--format", "json").out)
    assert found["context"]["tokens"] == 4096
    assert all(30 < run["too_long"] == run["rejected"] < 70 for run in found["runs"])

    assert cli("simulate", graph, "-w", "prompt=200000,output=50,rate=1", "-n", "50", "--seeds", "1").code == FAILED


def test_a_changed_link_changes_what_users_see(cli: Cli, graph: str) -> None:
    def waits(*more: str) -> float:
        asked = ("simulate", graph, "-w", WORKLOAD, "-n", "200", "--seeds", "1", "--format", "json")
        told = json.loads(cli(*asked, "--set", "spec.routing.plugin=never-relay", *more).out)
        return float(told["tt10"]["p50"]["mean"])

    assert waits("--set", "spec.links.wan.bandwidth=1Gbit/s") > waits() + 1.0


def test_what_fails_is_seen(cli: Cli, graph: str) -> None:
    told = cli(
        "simulate",
        graph,
        "-w",
        WORKLOAD,
        "-n",
        "200",
        "--seeds",
        "1",
        "--fail",
        "main/1@30s+20s",
        "--fail",
        "wan@60s+1s",
    )
    assert told.code == OK
    assert "200 of 200" in told.out
    assert "--seeds" in told.err


def test_more_than_it_can_do_is_told(cli: Cli, graph: str) -> None:
    told = cli("simulate", graph, "-w", "prompt=8000,output=50,rate=200", "-n", "700", "--seeds", "1")
    assert "refused by admission" in told.out
    assert "more than it can do" in told.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--fail", "main"), "main/3@60s+30s"),
        (("--fail", "nobody/1@1s+1s"), "nobody"),
        (("--set", "spec.pools.main.hardware=abacus"), "abacus"),
        (("--set", "spec.pools.main.hardware=null"), "pdd-runtime profile"),
        (("--profile", "nowhere.yaml"), "nowhere.yaml"),
        (("-w", "promt=5"), "promt"),
    ],
)
def test_what_is_wrong_is_told_and_how_to_mend_it(cli: Cli, graph: str, arguments: tuple[str, ...], says: str) -> None:
    told = cli("simulate", graph, "-w", WORKLOAD, "-n", "10", "--seeds", "1", *arguments)
    assert told.code in (USAGE, FAILED)
    assert says in told.err
    assert "Traceback" not in told.err
