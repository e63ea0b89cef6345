"""`pdd-runtime chaos` on real processes."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pdd_runtime.experiments.chaos_report import ChaosReport
from tests.cli.shell import Cli, read_until
from tests.graphs import pdd
from tests.waiting import PATIENCE

ENGINE = "{plugin: scripted, config: {token_time: 0.01}}"
GRAPH = pdd(
    "stormy",
    "frontend: {port: 0}",
    engine="{plugin: scripted, config: {token_time: 0.01}}",
    prefill="replicas: 2",
    main="replicas: 2",
    wan="bandwidth: 100Mbit/s, rtt: 10ms, emulate: true",
)
pytestmark = pytest.mark.timeout(300)
QUICK = ("--streams", "4", "-w", "prompt=100,output=uniform(40, 80),timeout=60", "--wait-timeout", "60")


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    command = Cli(tmp_path_factory.mktemp("chaos"))
    command.write(GRAPH, "stormy.yaml")
    yield command
    for path in (command.directory / "state").glob("*/launcher.json"):
        command("down", path.parent.name, "--timeout", "0")


@pytest.fixture(scope="module")
def url(cli: Cli) -> Iterator[str]:
    """Of a graph that users have."""
    up = cli("up", "stormy.yaml", "-d", "--wait", "--wait-timeout", "60")
    assert up.code == 0, up.err
    yield str(cli.launcher("stormy")["url"])
    cli("down", "stormy", "--timeout", "0")


def judged(out: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(out)
    ChaosReport.model_validate(data)
    return data


def test_killed_workers_lose_no_token_ctrl_c_gives_a_verdict_and_all_is_down_afterwards(cli: Cli) -> None:
    process = cli.start(
        *("chaos", "stormy.yaml", "--for", "10m", "--kill-every", "1s", "--seed", "5", "--longest-gap", "30s"),
        *("--format", "json", *QUICK),
    )
    for _ in range(3):
        read_until(process, r"kill \w+/\d")
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=4 * PATIENCE)
    made = judged(rest[rest.index("\n{") :])
    assert (process.returncode, made["ok"], made["reasons"]) == (0, True, []), rest
    assert len(made["faults"]) >= 3
    assert made["streams"] == made["same"] > 4
    assert sum(made["restarts"].values()) == sum(len(fault["struck"]) for fault in made["faults"])
    assert not (cli.directory / "state" / "stormy" / "launcher.json").exists()


def test_a_graph_that_users_have_is_struck_by_consent_alone(cli: Cli, url: str) -> None:
    pids = cli.pids("stormy")
    refused = cli("chaos", "stormy", "--for", "1s")
    assert refused.code == 4
    assert "--strike-running" in refused.err
    assert cli.pids("stormy") == pids
    # Two faults that are none for anybody but the frontend's own watch, and a bound that no stream can keep.
    done = cli(
        *("chaos", "stormy", "--strike-running", "--for", "3s", "--kill-every", "1s", "--faults", "disk"),
        *("--lasting", "500ms", "--longest-gap", "1ms", *QUICK),
        timeout=4 * PATIENCE,
    )
    assert done.code == 1, done.err + done.out
    assert "not well" in done.out
    assert "stood still" in done.out
    assert "0 changed" in done.out
    assert httpx.get(f"{url}/ready").is_success
    assert cli.pids("stormy") == pids


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--faults", "quake"), "there is no fault"),
        (("--for", "soon"), "is no duration"),
        (("--faults", "etcd"), "etcd of a graph that runs"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_struck(
    cli: Cli, url: str, arguments: tuple[str, ...], told: str
) -> None:
    done = cli("chaos", "stormy", "--strike-running", *arguments)
    assert done.code in (1, 2)
    assert told in done.err
    assert all(process["state"] == "ready" for process in cli.ps("stormy"))
