"""A graph that is changed while it serves: whoever streams from it notices nothing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.shell import Cli, read_until, running, until
from tests.cli.stream_load import StreamLoad
from tests.graphs import pdd
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow

GRAPH = pdd(
    "roll",
    "routing: {plugin: always-relay}",
    "frontend: {port: 0}",
    engine="{plugin: scripted, config: {token_time: 0.005}}",
    main="replicas: 2",
)
TORN = "spec.pools.relay.engine.config.start_error=the weights are torn"


@pytest.fixture(scope="module")
def roll(cli: Cli) -> Iterator[str]:
    """The file of a graph that runs."""
    name = cli.write(GRAPH, "roll.yaml")
    done = cli("up", name, "--wait", "--wait-timeout", "60")
    assert (done.code, done.err) == (0, "")
    yield name
    pids = cli.pids("roll")
    assert cli("down", "roll").code == 0
    assert [pid for pid in pids if running(pid)] == []


def processes(cli: Cli) -> dict[str, tuple[int, str]]:
    """Pid and epoch by pool and index; all are ready."""
    listed = cli.ps("roll")
    assert {process["state"] for process in listed} == {"ready"}
    return {f"{process['pool']}/{process['index']}": (process["pid"], process["epoch"]) for process in listed}


def replaced(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """Those whose process is another one; all others are the very same."""
    for pid, epoch in set(before.values()) - set(after.values()):
        assert not running(pid), epoch
    return {name for name in after if before.get(name) != after[name]}


def load(cli: Cli) -> StreamLoad:
    return StreamLoad(cli.launcher("roll")["url"])


def test_a_rolling_restart_of_everything_costs_no_token(cli: Cli, roll: str) -> None:
    before = processes(cli)
    with load(cli) as users:
        done = cli("restart", "--graph", "roll", timeout=4 * PATIENCE)
        counted = users.counted
        until(lambda: users.counted > counted + 6)
    assert (done.code, done.err) == (0, "")
    assert users.faults == []
    after = processes(cli)
    assert replaced(before, after) == set(before) == set(after)
    steps = done.out.splitlines()
    assert steps[0] == "5 to replace"
    # One alone in its pool has its successor beside it; of several one drains after the other.
    assert "relay/0: starts a replacement beside it" in steps
    assert steps.index("main/0: is replaced") < steps.index("main/1: drains")


def test_one_process_is_restarted_and_no_other(cli: Cli, roll: str) -> None:
    before = processes(cli)
    done = cli("restart", "main/1", "-g", roll, "--surge", "--format", "json")
    assert (done.code, json.loads(done.out)["steps"][1]) == (0, "main/1: starts a replacement beside it")
    assert replaced(before, processes(cli)) == {"main/1"}
    for unknown in ("mian", "main/7"):
        refused = cli("restart", unknown, "-g", roll)
        assert refused.code == 1
        assert (
            f"there is no process {unknown} here\n  why: the pools are: prefill, relay, main, frontend" in refused.err
        )
    assert cli("restart", "main/x", "-g", roll).code == 1


def test_up_again_applies_what_has_changed_and_leaves_the_rest_alone(cli: Cli, roll: str) -> None:
    before = processes(cli)
    changed = ["--set", "spec.pools.main.replicas=3", "--set", "spec.pools.relay.env={LESSON: learnt}"]
    changed += ["--set", "spec.handoff={plugin: one-shot}"]
    dry = cli("up", roll, *changed, "--dry-run", "--format", "json")
    lines = ["+ main/2", '~ relay/0  spec.pools.relay.env.LESSON: nothing → "learnt"']
    assert [(change["kind"], change["pool"]) for change in json.loads(dry.out)["changes"]] == [
        ("add", "main"), ("replace", "relay"), ("replace", "frontend"),
    ]  # fmt: skip
    assert processes(cli) == before
    with load(cli) as users:
        done = cli("up", roll, *changed, "--wait", timeout=4 * PATIENCE)
        counted = users.counted
        until(lambda: users.counted > counted + 6)
        assert (done.code, done.err) == (0, "")
        assert all(line in done.out for line in lines)
        assert f"ready: {users.url}" in done.out
        middle = processes(cli)
        assert replaced(before, middle) == {"main/2", "relay/0", "frontend/0"}
        # And back: two are replaced once more, and the third goes.
        assert cli("up", roll, "--wait", timeout=4 * PATIENCE).code == 0
    assert users.faults == []
    after = processes(cli)
    assert replaced(middle, after) == {"relay/0", "frontend/0"}
    assert set(after) == set(before)


def test_a_replacement_that_cannot_start_leaves_what_runs_as_it_is(cli: Cli, roll: str) -> None:
    before = processes(cli)
    with load(cli) as users:
        failed = cli("up", roll, "--set", TORN, "--wait", timeout=4 * PATIENCE)
    assert failed.code == 1
    assert "relay/0 does not become ready" in failed.err
    assert "the weights are torn" in failed.err
    assert "add --no-surge" in failed.err
    assert users.faults == []
    assert processes(cli) == before
    assert "the last change was not made whole: relay/0 does not become ready" in " ".join(
        cli("ps", "roll").out.split()
    )
    mended = cli("up", roll, "-d")
    assert (mended.code, mended.err) == (0, "")
    assert "nothing is to be done" in mended.out
    assert "not made whole" not in cli("ps", "roll").out
    # It forgot that graph: who is killed now comes back as before.
    os.kill(before["relay/0"][0], signal.SIGKILL)
    until(lambda: before["relay/0"][0] not in cli.pids("roll"))
    until(lambda: [process["state"] for process in cli.ps("roll")] == ["ready"] * len(before))


def test_what_cannot_be_applied_changes_nothing(cli: Cli, roll: str) -> None:
    before = processes(cli)
    for override, code, what in (
        ("spec.pools.main.engine.plugin=nosuch", 2, 'called "nosuch"'),
        ("spec.frontend.port=9000", 1, "spec.frontend.port cannot be changed while the graph runs: 0 → 9000"),
        ("spec.model.dtype=bfloat16", 1, "spec.model.dtype cannot be changed while the graph runs"),
    ):
        refused = cli("up", roll, "--set", override, "-d")
        assert refused.code == code
        assert what in refused.err
        assert "fix: " in refused.err
    assert cli("up", roll, "--set", "spec.frontend.port=9000", "--dry-run").code == 1
    assert processes(cli) == before
    assert "runs as roll.yaml says" in cli("up", roll, "--dry-run").out


SLOW_START = ["--set", "spec.pools.relay.engine.config={token_time: 0.005, start_time: 600}"]


def begin(cli: Cli, roll: str) -> list[int]:
    """A change that does not end by itself is under way. Returns the pids of all processes, the new one among them."""
    before = len(cli.pids("roll"))
    assert "is being changed" in cli("up", roll, *SLOW_START, "-d").out
    until(lambda: len(cli.pids("roll")) > before)
    assert "being changed: relay/0: starts a replacement beside it" in cli("ps", "roll").out
    refused = cli("restart", "-g", "roll")
    assert refused.code == 1
    assert "the graph is being changed already\n  why: relay/0: starts a replacement" in refused.err
    return cli.pids("roll")


def test_down_in_the_middle_of_a_change_leaves_nothing(cli: Cli, roll: str) -> None:
    pids = begin(cli, roll)
    following = cli.start("restart", "-g", "roll")
    assert following.wait(PATIENCE) == 1
    assert cli("down", "roll").code == 0
    assert [pid for pid in pids if running(pid)] == []
    assert cli("up", roll, "--wait", timeout=4 * PATIENCE).code == 0


def test_a_launcher_killed_in_the_middle_of_a_change_leaves_no_orphan_and_up_again_repairs(cli: Cli, roll: str) -> None:
    pids = begin(cli, roll)
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: not any(running(pid) for pid in pids))
    assert cli("up", roll, "--wait", timeout=4 * PATIENCE).code == 0
    with load(cli) as users:
        until(lambda: users.counted)
    assert users.faults == []
    assert not set(pids) & set(cli.pids("roll"))


def test_a_bench_that_is_told_to_end_leaves_neither_processes_nor_files(cli: Cli) -> None:
    name = cli.write(GRAPH.replace("{name: roll}", "{name: measured}"), "measured.yaml")
    (temporary := cli.directory / "temporary").mkdir()
    workload = ["-w", "prompt=20,output=200", "-n", "100000"]
    bench = cli.start("bench", name, *workload, env={"TMPDIR": str(temporary)})
    launched = "pdd-bench-*/**/launcher.json"

    def pids() -> list[int]:
        found = [json.loads(path.read_bytes()) for path in temporary.glob(launched)]
        return [process["pid"] for launcher in found for process in launcher["processes"]]

    until(lambda: len(pids()) == 5)
    started = pids()
    bench.terminate()
    assert bench.wait(2 * PATIENCE) == 130
    assert list(temporary.iterdir()) == []
    assert [pid for pid in started if running(pid)] == []


def test_ctrl_c_in_the_foreground_drains_in_the_middle_of_a_change_too(cli: Cli) -> None:
    name = cli.write(GRAPH.replace("{name: roll}", "{name: front}"), "front.yaml")
    attached = cli.start("up", name, "--quiet")
    read_until(attached, "^ready: ")
    assert cli("up", name, *SLOW_START, "-d").code == 0
    until(lambda: "being changed" in cli("ps", "front").out)
    pids = cli.pids("front")
    attached.send_signal(signal.SIGINT)
    assert attached.wait(2 * PATIENCE) == 0
    assert [pid for pid in pids if running(pid)] == []
