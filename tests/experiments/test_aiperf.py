from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdd_runtime.cli.console import OK, USAGE
from pdd_runtime.experiments.aiperf import COMMAND, AiperfError, read_record, require_aiperf
from pdd_runtime.experiments.client import API_KEY
from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.planner import read_workload
from tests.cli.shell import Cli, Result
from tests.experiments.graphs import AGGREGATED, TOKEN_TIME

AIPERF = shutil.which(os.environ.get(COMMAND, "aiperf"))


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    command = Cli(tmp_path)
    command.write(AGGREGATED, "one.yaml")
    yield command
    if (tmp_path / "state" / "one-pool").exists():
        command("down", "one-pool", "--timeout", "0")


def test_without_it_the_error_says_how_to_get_it(cli: Cli) -> None:
    missing = {COMMAND: str(cli.directory / "aiperf")}
    for command in (("ab", "one.yaml", "one.yaml"), ("bench", "one.yaml")):
        done = cli(*command, "--driver", "aiperf", env=missing)
        assert done.code == USAGE
        assert "aiperf is not installed" in done.err
        assert "pip install aiperf==" in done.err


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    command = tmp_path / "aiperf"
    command.touch(mode=0o755)
    monkeypatch.setenv(COMMAND, str(command))
    return command


def test_what_it_cannot_send_is_refused(installed: Path) -> None:
    assert require_aiperf(read_workload("prompt=10").sessions(3, 0)) == str(installed)
    with pytest.raises(AiperfError, match="several turns"):
        require_aiperf(read_workload("prompt=10,turns=2").sessions(3, 0))


def packet(*tokens: int) -> dict[str, str]:
    return {"name": "data", "value": json.dumps({"id": "cmpl-12ab", "choices": [{"text": "x", "token_ids": tokens}]})}


def test_a_record_has_the_times_of_its_own_clock() -> None:
    """As aiperf 0.13 writes them with `--export-level raw`."""
    record = {
        "metadata": {
            "conversation_id": "3",
            "request_start_ns": 1_000_500_000_000,
            "request_end_ns": 1_002_000_000_000,
        },
        "start_perf_ns": 70_000_000_000,
        "status": 200,
        "responses": [
            {"perf_ns": 70_250_000_000, "packets": [packet(7)]},
            {"perf_ns": 70_300_000_000, "packets": [packet(8, 9), packet()]},
            {"perf_ns": 70_400_000_000, "packets": [{"name": "data", "value": "[DONE]"}]},
        ],
    }
    outcome = Outcome(3, 0, 10, 0.0, 0.0)
    read_record(record, outcome, offset=-1000.0)
    assert (outcome.due, outcome.error, outcome.request_id) == (0.5, None, "req-12ab")
    assert outcome.tokens == [7, 8, 9]
    assert outcome.metric("ttft") == pytest.approx(0.25)
    assert outcome.metric("tpot") == pytest.approx(0.025)
    assert outcome.metric("e2e") == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"status": 503, "error": {"code": 503, "message": "no room"}}, "no room"),
        ({"status": 200, "responses": []}, "200: the answer has no tokens"),
    ],
)
def test_a_record_of_a_failure_is_one(record: dict[str, object], words: str) -> None:
    outcome = Outcome(0, 0, 10, 0.0, 0.0)
    times = {"conversation_id": "0", "request_start_ns": 1, "request_end_ns": 2}
    read_record({"metadata": times, "start_perf_ns": 0, **record}, outcome, 0.0)
    assert outcome.error == words


WATCHED = """#!/bin/sh
# Runs aiperf, and keeps what others could read: its arguments, and the files in which the key stands.
echo "$@" > {kept}/arguments
cp run.json {kept}/
{aiperf} "$@"
code=$?
grep -rlF -e "$PDD_API_KEY" . > {kept}/files
exit $code
"""


class Guarded:
    """A graph that asks for a key, and an aiperf that is watched."""

    def __init__(self, cli: Cli, aiperf: str) -> None:
        self.key = str(json.loads(cli("keys", "add", "alice", "--format", "json").out)["key"])
        sets = ("--set", "spec.frontend.port=0", "--set", "spec.frontend.keys=keys.jsonl")
        up = cli("up", "one.yaml", *sets, "-d", "--wait", timeout=120)
        assert up.code == OK, up.err
        self._cli, self._command = cli, cli.directory / "watched"
        self._command.write_text(WATCHED.format(kept=cli.directory, aiperf=aiperf))
        self._command.chmod(0o755)

    def bench(self, driver: str) -> Result:
        url = str(self._cli.launcher("one-pool")["url"])
        done = self._cli(
            *("bench", "--url", url, "-w", "prompt=100,output=12,warmup=1", "-n", "4", "--driver", driver),
            *("--format", "json"),
            timeout=400,
            env={COMMAND: str(self._command), API_KEY: self.key},
        )
        assert self.key not in done.out + done.err
        return done

    def hidden(self) -> bool:
        """Whether aiperf was told where the key is, and no file or argument has it."""
        kept = {name: (self._cli.directory / name).read_text() for name in ("arguments", "run.json", "files")}
        return API_KEY in kept["run.json"] and self.key not in "".join(kept.values()) and kept["files"] == ""


def test_a_key_stands_in_no_argument_and_in_no_file(cli: Cli) -> None:
    guarded = Guarded(cli, aiperf="false")
    assert "aiperf has written no records" in guarded.bench("aiperf").err
    assert guarded.hidden()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(AIPERF is None, reason=f"aiperf is not installed: name it by {COMMAND}")
def test_a_graph_that_asks_for_a_key_is_measured_by_both_drivers(cli: Cli) -> None:
    guarded = Guarded(cli, str(AIPERF))
    for driver in ("own", "aiperf"):
        done = guarded.bench(driver)
        assert done.code == OK, done.err
        graph = next(iter(json.loads(done.out)["graphs"].values()))
        assert (graph["requests"], graph["errors"]) == (4, 0)
    assert guarded.hidden()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(AIPERF is None, reason=f"aiperf is not installed: name it by {COMMAND}")
@pytest.mark.parametrize("workload", ["prompt=100,output=12,warmup=1", "prompt=100,output=12,warmup=1,rate=4"])
def test_it_sends_the_same_requests_and_gets_the_same_answers(cli: Cli, workload: str) -> None:
    assert AIPERF is not None
    up = cli("up", "one.yaml", "--set", "spec.frontend.port=0", "-d", "--wait", timeout=120)
    assert up.code == OK, up.err
    url = str(cli.launcher("one-pool")["url"])
    graphs = {}
    for driver in ("own", "aiperf"):
        done = cli(
            *("bench", "--url", url, "-w", workload, "-n", "8", "--driver", driver, "--format", "json"),
            timeout=400,
            env={COMMAND: AIPERF},
        )
        assert done.code == OK, done.err
        graphs[driver] = next(iter(json.loads(done.out)["graphs"].values()))
    own, other = graphs["own"], graphs["aiperf"]
    for key in (
        "requests",
        "errors",
        "output_tokens",
        "prompt_tokens",
        "timelines",
        "tokens",
        "cached_tokens",
        "routes",
    ):
        assert own[key] == other[key], key
    assert other["tpot"]["p50"] >= 0.9 * TOKEN_TIME
