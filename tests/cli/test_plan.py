from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.shell import Cli, until
from tests.planner.test_plan import GRAPH, PLAN, PROFILE
from tests.waiting import PATIENCE

ONE = "spec.pools={prefill: {replicas: 2}}"
"""One deployment to choose from."""
LONG = 100.0
"""Seconds; two take it on an idle machine."""


@pytest.fixture
def plan(cli: Cli) -> Path:
    for name, text in (("graph", GRAPH), ("profile", PROFILE), ("plan", PLAN)):
        (cli.directory / f"{name}.yaml").write_text(text)
    return cli.directory / "plan.yaml"


def test_a_plan_writes_a_graph_that_is_right(cli: Cli, plan: Path) -> None:
    arguments = ("--no-what-if", "--format", "json", "--out", "best.yaml", "--html", "plan.html", "--processes", "1")
    done = cli("plan", "plan.yaml", *arguments, "--set", ONE, timeout=LONG)
    assert done.code == 0, done.err
    best = json.loads(done.out)["best"]
    assert done.err.splitlines()[0] == "measures what it found"
    drawn = json.loads(cli("graph", "best.yaml", "--format", "json").out)
    assert {name: pool["replicas"] for name, pool in drawn["spec"]["pools"].items()} == {
        name: pool["replicas"] for name, pool in best["pools"].items()
    }
    assert "<svg" in (cli.directory / "plan.html").read_text()


def test_a_typo_is_told_with_its_line(cli: Cli, plan: Path) -> None:
    (cli.directory / "typo.yaml").write_text(PLAN.replace("replicas: 1..3}, relay", "replicsa: 1..3}, relay"))
    typo = cli("plan", "typo.yaml")
    assert typo.code == 2
    assert "typo.yaml:10:21" in typo.err
    assert 'did you mean "replicas"?' in typo.err


def test_requests_beyond_the_context_are_told_first(cli: Cli, plan: Path) -> None:
    limit = ("--set", "spec.set=[spec.pools.main.engine.config.context_length=4096]")
    few, many = (f"prompt=choice(1000:{1 - share}, 200000:{share}),output=20" for share in (0.05, 0.2))
    asked = ("plan", "plan.yaml", "--processes", "1", "--no-what-if", "--set", ONE, *limit)
    done = cli(*asked, "--set", f"spec.workload={few}", timeout=LONG)
    assert done.code == 0, done.err
    assert "of the requests are longer than the context: they are refused" in done.err.splitlines()[0]
    assert "engine.config.context_length in the graph" in done.err
    assert "of the requests are longer than the context" in done.out
    refused = cli(*asked, "--set", f"spec.workload={many}")
    assert refused.code == 2
    assert "pool main takes 4,096 tokens" in refused.err


def test_a_promise_that_nothing_keeps_is_told_with_what_is_near(cli: Cli, plan: Path) -> None:
    hopeless = cli(
        "plan", "plan.yaml", "--processes", "1", "--set", "spec.slo.ttft_p90=1ms", "--set", ONE, timeout=LONG
    )
    assert hopeless.code == 1
    assert "nearly idle the best has a P90 of" in hopeless.err


def test_ctrl_c_ends_all_processes_and_writes_nothing(cli: Cli, plan: Path) -> None:
    (cli.directory / "slow.yaml").write_text(PLAN.replace("requests: 100", "requests: 1000000"))
    process = subprocess.Popen(
        [sys.executable, "-m", "pdd_runtime.cli", "plan", "slow.yaml", "--processes", "2", "--out", "late.yaml"],
        stderr=subprocess.PIPE,
        text=True,
        env=cli.env,
        cwd=cli.directory,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    assert "measures what it found" in process.stderr.readline()
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    assert "Traceback" not in process.stderr.read()
    until(lambda: not _alive(process.pid))
    assert not (cli.directory / "late.yaml").exists()


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
