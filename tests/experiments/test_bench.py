"""The command as its users run it, on real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from pdd_runtime.cli.bench import BenchOptions, run_bench
from pdd_runtime.cli.console import USAGE, Consoles
from pdd_runtime.cli.targets import base_of
from pdd_runtime.experiments.report import Report
from tests.cli.shell import Cli, until
from tests.experiments.graphs import AGGREGATED, ENGINE, PDD, PREFILL_RATE, TOKEN_BYTES, TOKEN_TIME


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    command = Cli(tmp_path_factory.mktemp("bench"))
    command.write(AGGREGATED, "one.yaml")
    command.write(PDD, "three.yaml")
    yield command
    for process in command.attached:
        if process.poll() is None:
            process.kill()
        process.wait()
    for path in (command.directory / "state").glob("*/launcher.json"):
        command("down", path.parent.name, "--timeout", "0")


@pytest.fixture(scope="module")
def url(cli: Cli) -> str:
    """Of a graph that the user has running."""
    up = cli("up", "one.yaml", "--set", "spec.frontend.port=0", "-d", "--wait", "--wait-timeout", "60")
    assert up.code == 0, up.err
    return str(cli.launcher("one-pool")["url"])


def measured(out: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(out)
    Report.model_validate(data)
    return data


def test_graphs_are_brought_up_in_turn_measured_and_compared(cli: Cli, url: str) -> None:
    # A graph of the same name runs beside it, with its own port and state.
    workload = "prompt=400,output=30,hit=0.5,turns=2,rate=3"
    scratch = cli.directory / "scratch"
    scratch.mkdir()
    done = cli(
        *("bench", "one.yaml", "three.yaml", "-w", workload, "-n", "6", "--seed", "4", "--format", "json"),
        env={"TMPDIR": str(scratch)},
    )
    assert done.code == 0, done.err
    data = measured(done.out)
    assert (data["requests"], data["seed"], data["baseline"]) == (6, 4, "one-pool")
    one, three = data["graphs"]["one-pool"], data["graphs"]["three-pools"]
    for graph in (one, three):
        assert (graph["requests"], graph["errors"], graph["timelines"]) == (6, 0, 6)
        assert graph["output_tokens"] == sum(graph["tokens"].values()) == 6 * 30
        assert graph["prompt_tokens"] == 6 * 400
        assert graph["tpot"]["p50"] >= TOKEN_TIME * 0.95
        assert graph["rate"]["offered"] == 3
        assert graph["rate"]["achieved"] > 0
        assert graph["late"] >= 0
    assert one["tokens"]["main"] == 180
    assert one["link_bytes"] == {}
    assert three["tokens"]["relay"] > 0
    assert three["handoff_gap"]["p50"] is not None
    # Half of every prompt was there before, and only the other half crossed the WAN: whole blocks of 16 tokens.
    assert three["cached_tokens"]["prefill"] == pytest.approx(6 * 200, abs=6 * 16)
    assert three["link_bytes"]["wan"] == pytest.approx(6 * 200 * TOKEN_BYTES, rel=0.2)
    assert set(data["ratios"]["three-pools"]) == {"ttft", "tt10", "tpot", "longest_gap", "handoff_gap", "e2e"}
    assert data["ratios"]["three-pools"]["e2e"]["p50"] > 0
    low, high = data["ci"]["graphs"]["one-pool"]["e2e"]["mean"]
    assert low <= one["e2e"]["mean"] <= high
    # What was brought up is down; what the user has running is not.
    assert httpx.get(f"{url}/ready").is_success
    assert [path.name for path in (cli.directory / "state").iterdir()] == ["one-pool"]
    assert list(scratch.iterdir()) == []
    assert [line for line in processes() if str(scratch) in line] == []


def processes() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text().replace("\0", " "))
        except OSError:
            continue
    return found


@dataclass
class Seen:
    """One completion as it passed: when the request came, and when each of its tokens went by."""

    asked: float
    tokens: list[float] = field(default_factory=list)


class Wiretap:
    """A TCP relay with a stopwatch of its own, in threads, which knows nothing of the client it measures."""

    def __init__(self, target: str) -> None:
        parts = httpx.URL(target)
        self._target = (parts.host, parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen: list[Seen] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            current: list[Seen] = []
            threading.Thread(target=self._up, args=(client, server, current), daemon=True).start()
            threading.Thread(target=self._down, args=(server, client, current), daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket, current: list[Seen]) -> None:
        while data := client.recv(1 << 16):
            if data.startswith(b"POST /v1/completions"):
                current.append(Seen(time.monotonic()))
                self.seen.append(current[-1])
            server.sendall(data)
        server.shutdown(socket.SHUT_WR)

    def _down(self, server: socket.socket, client: socket.socket, current: list[Seen]) -> None:
        while data := server.recv(1 << 16):
            at = time.monotonic()
            for ids in re.findall(rb'"token_ids":\[([^]]*)\]', data):
                current[-1].tokens += [at] * len(ids.split(b",")) if ids else []
            client.sendall(data)
        client.shutdown(socket.SHUT_WR)


def test_its_numbers_agree_with_a_stopwatch_on_the_wire(cli: Cli, url: str) -> None:
    tap = Wiretap(url)
    try:
        workload = "prompt=600,output=25,warmup=0,concurrency=1"
        done = cli("bench", "--url", tap.url, "-w", workload, "-n", "6", "--format", "json")
    finally:
        tap.close()
    assert done.code == 0, done.err
    (graph,) = measured(done.out)["graphs"].values()
    assert [len(seen.tokens) for seen in tap.seen] == [25] * 6
    on_the_wire = {
        "ttft": [seen.tokens[0] - seen.asked for seen in tap.seen],
        "tt10": [seen.tokens[9] - seen.asked for seen in tap.seen],
        "e2e": [seen.tokens[-1] - seen.asked for seen in tap.seen],
    }
    for metric, values in on_the_wire.items():
        # The client asks before the wire carries it, and has a token after: its times cannot be shorter. How much
        # longer they may be is only what a busy machine makes of it.
        here, there = graph[metric]["mean"], statistics.mean(values)
        assert there <= here <= there + 0.4, metric
    assert graph["ttft"]["mean"] >= 600 / PREFILL_RATE * 0.9
    assert graph["tpot"]["mean"] == pytest.approx(
        statistics.mean((seen.tokens[-1] - seen.tokens[0]) / 24 for seen in tap.seen), abs=0.01
    )


def test_a_frontend_that_is_killed_gives_errors_that_are_counted(cli: Cli, url: str) -> None:
    bench = cli.start(
        *("bench", "one.yaml", "--url", url, "-w", "prompt=64,output=40,concurrency=2,warmup=0"),
        *("-n", "10", "--format", "json", "-o", "killed.json"),
    )
    frontend = next(row for row in cli.ps("one-pool") if row["role"] == "frontend")
    before = len(httpx.get(f"{url}/pdd/requests").json()["requests"])
    until(lambda: len(httpx.get(f"{url}/pdd/requests").json()["requests"]) >= before + 4)
    os.kill(frontend["pid"], signal.SIGKILL)
    assert bench.wait(60) == 0
    assert bench.stdout is not None
    said = bench.stdout.read()
    graph = measured((cli.directory / "killed.json").read_text())["graphs"]["one-pool"]
    # Two had ended, as two run at once; it came back at another port, so that nothing after it is answered.
    assert 2 <= graph["requests"] - graph["errors"] < 10
    assert graph["first_error"]
    assert f"{graph['errors']} of 10 requests failed; the first: {graph['first_error']}" in said


def test_only_errors_is_exit_code_1_and_the_report_is_there_all_the_same(cli: Cli) -> None:
    done = cli("bench", "--url", "http://127.0.0.1:1", "-n", "3", "--format", "json")
    assert done.code == 1
    graph = measured(done.out)["graphs"]["http://127.0.0.1:1"]
    assert (graph["requests"], graph["errors"]) == (3, 3)
    assert "no model is served here" in graph["first_error"]
    broken = ENGINE.replace("token_time", "start_error: no such model, token_time")
    cli.write(AGGREGATED.replace(ENGINE, broken), "broken.yaml")
    done = cli("bench", "broken.yaml", "-n", "2", "-o", "broken.txt")
    assert done.code == 1
    assert "2 of 2 requests failed" in done.err
    assert "no such model" in (cli.directory / "broken.txt").read_text() + done.err


def test_a_graph_that_takes_too_long_to_be_ready_is_an_error(cli: Cli) -> None:
    cli.write(AGGREGATED.replace("token_time", "start_time: 3600, token_time"), "slow.yaml")
    done = cli("bench", "slow.yaml", "-n", "2", "--wait-timeout", "10", "--format", "json")
    assert done.code == 1
    (graph,) = measured(done.out)["graphs"].values()
    assert graph["errors"] == 2
    assert "graph one-pool is not ready after 10 s" in graph["first_error"]
    assert "main/0 is starting" in graph["first_error"]


@pytest.mark.parametrize(
    ("graphs", "changes", "message"),
    [
        (["one.yaml"], {"workload": "promt=5"}, 'unknown key "promt" in the workload'),
        ([], {}, "there is nothing to measure"),
        (["one.yaml", "three.yaml"], {"url": "http://127.0.0.1:1"}, "one --url is one graph"),
        (["one.yaml", "one.yaml"], {}, "two graphs are called one-pool"),
        (["one.yaml"], {"overrides": ["two:spec.frontend.host=x"]}, '--set is for "two", which is not measured'),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_is_started(
    cli: Cli, capsys: pytest.CaptureFixture[str], graphs: list[str], changes: dict[str, Any], message: str
) -> None:
    asked = BenchOptions(
        graphs=[cli.directory / graph for graph in graphs],
        workload="prompt=10",
        requests=1,
        seed=0,
        overrides=[],
        url=None,
        wait_timeout=None,
        form="table",
        out=None,
    )
    assert run_bench(replace(asked, **changes), Consoles()) == USAGE
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err


@pytest.mark.parametrize("url", ["http://h:80", "h:80", "http://h:80/", "http://h:80/v1", "h:80/v1/"])
def test_a_url_is_taken_as_people_paste_it(url: str) -> None:
    assert base_of(url) == "http://h:80"


def test_a_graph_that_is_wrong_is_exit_code_2(cli: Cli) -> None:
    done = cli("bench", "one.yaml", "--set", "one:spec.frontend.prot=1")
    assert (done.code, done.out) == (2, "")
    assert 'unknown key "prot"' in done.err
