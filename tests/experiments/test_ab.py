"""The command as its users run it, on real processes."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest

from pdd_runtime.cli.console import FAILED, OK, USAGE
from pdd_runtime.cli.targets import is_url
from pdd_runtime.experiments.ab import Design
from pdd_runtime.experiments.ab_report import AbReport
from pdd_runtime.experiments.paired import Question
from pdd_runtime.experiments.trial import Rules
from pdd_runtime.planner import read_workload
from tests.cli.shell import Cli, read_until
from tests.experiments.graphs import AGGREGATED, ENGINE, PDD, TOKEN_TIME

SLOWER = f"--set=B:spec.pools.main.engine.config.token_time={2 * TOKEN_TIME}"
PRICES = "unit: X\nnodes: {H100: 8.0, H200: [9.6, 10.4]}\nline: 0.35\n"


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    command = Cli(tmp_path_factory.mktemp("ab"))
    command.write(AGGREGATED, "one.yaml")
    command.write(PDD, "three.yaml")
    command.write(PRICES, "prices.yaml")
    yield command
    for process in command.attached:
        if process.poll() is None:
            process.kill()
        process.wait()
    for path in (command.directory / "state").glob("*/launcher.json"):
        command("down", path.parent.name, "--timeout", "0")


def told(out: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(out)
    AbReport.model_validate(data)
    return data


@pytest.mark.timeout(300)
def test_a_slower_graph_is_found_and_the_test_ends_there(cli: Cli) -> None:
    done = cli(
        *("ab", "one.yaml", "one.yaml", SLOWER, "-w", "prompt=40,output=20,warmup=1", "-n", "60"),
        *("--decide", "tpot.typical", "--format", "json"),
        timeout=250,
    )
    assert done.code == OK, done.err
    data = told(done.out)
    assert data["baseline"] == "A"
    answer = data["comparisons"]["B"]["answers"]["tpot.typical"]
    assert answer["verdict"] == data["comparisons"]["B"]["verdict"] == "worse"
    low, high = answer["ratio_interval"]
    assert low <= answer["ratio"] <= high
    assert low > 1
    assert answer["ratio"] >= 1.03
    assert data["requests"] == answer["decided_at"] < data["planned"] == 60
    assert data["stopped"] == "every question has its verdict"
    for side in data["graphs"].values():
        assert (side["requests"], side["errors"]) == (data["requests"], 0)
        assert side["output_tokens"] == 20 * data["requests"]
    texts = data["comparisons"]["B"]["texts"]
    assert texts["expected"]
    assert texts["equal"] == texts["compared"] == data["requests"]
    assert "verdicts" in done.err
    assert list((cli.directory / "state").glob("*")) == []


@pytest.mark.timeout(300)
def test_graphs_that_differ_are_told_apart_in_a_table_with_what_they_cost(cli: Cli) -> None:
    hardware = [f"--set=A:spec.pools.main.hardware={chips}" for chips in ("8xH100",)]
    hardware += [f"--set=B:spec.pools.{pool}.hardware=8xH200" for pool in ("prefill", "relay", "main")]
    done = cli(
        *("ab", "one.yaml", "three.yaml", *hardware, "-w", "prompt=200,output=20,warmup=1", "-n", "4"),
        *("--slo", "ttft=60s,tpot=60s", "--prices", "prices.yaml", "--out", "report.txt"),
        timeout=250,
    )
    assert done.code == OK, done.err
    text = (cli.directory / "report.txt").read_text()
    assert re.search(r"B \(three.yaml\) against \(one.yaml\) A: ", text)
    assert re.search(r"ttft.p90 .*no difference shown", text)
    assert re.search(r"kept ttft ≤ 60.00 s, tpot ≤ 60.00 s +4 of 4 +4 of 4", text)
    # A node of H100 for A; B has three of H200 and a line, and their price is a range.
    assert re.search(r"cost +8 X +29.15–31.55 X", text)
    assert re.search(r"BCR +[\d.e-]+ +[\d.e-]+–[\d.e-]+", text)
    assert re.search(r"4 requests, all up at once", text)


@pytest.mark.timeout(300)
def test_one_graph_at_a_time_is_up_where_that_is_wanted(cli: Cli) -> None:
    done = cli(
        *("ab", "one.yaml", "one.yaml", "--in-turn", "--rounds", "2", "-w", "prompt=30,output=5,rate=20,warmup=1"),
        *("-n", "24", "--block", "6", "--format", "json"),
        timeout=250,
    )
    assert done.code == OK, done.err
    data = told(done.out)
    assert not data["together"]
    assert data["requests"] == 24
    # Two rounds are two numbers: too few to show anything.
    answers = data["comparisons"]["B"]["answers"]
    assert {answer["blocks"] for answer in answers.values() if answer["requests"]} == {2}
    assert {answer["verdict"] for answer in answers.values()} == {"no difference shown"}


@pytest.mark.timeout(300)
def test_graphs_that_run_are_compared_where_they_are_and_the_page_needs_no_network(cli: Cli) -> None:
    up = cli("up", "one.yaml", "--set", "spec.frontend.port=0", "-d", "--wait", "--wait-timeout", "120", timeout=150)
    assert up.code == OK, up.err
    url = str(cli.launcher("one-pool")["url"])
    done = cli("ab", url, f"{url}/v1", "-w", "prompt=30,output=12,warmup=1", "-n", "6", "--format", "html", timeout=200)
    assert done.code == OK, done.err
    page = done.out
    assert not re.search(r"""(?:src|href)=|url\(|@import""", page)
    for drawing in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(drawing)
    assert page.count('<path class="g') == page.count('class="g0" d=') + page.count('class="g1" d=') == 2 * 5
    # A point for each request of each graph in each of five metrics.
    assert len(re.findall(r'<circle class="g[01]"', page)) == 5 * 2 * 6
    assert httpx.get(f"{url}/ready").is_success
    refused = cli("ab", url, "one.yaml", "--set", "A:spec.handoff.plugin=none")
    assert refused.code == USAGE
    assert "runs already" in refused.err
    assert cli("down", "one-pool").code == OK


@pytest.mark.timeout(300)
def test_ctrl_c_ends_a_test_with_what_it_has_shown(cli: Cli) -> None:
    process = cli.start(
        *("ab", "one.yaml", "one.yaml", "-w", "prompt=20,output=20,warmup=0", "-n", "40", "--no-early-stop"),
        *("--format", "json", "-o", "ended.json"),
    )
    read_until(process, "after 8 of 40 requests")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == OK
    data = told((cli.directory / "ended.json").read_text())
    assert data["stopped"] == "interrupted"
    assert 8 <= data["requests"] < 40
    assert data["graphs"]["A"]["requests"] == data["graphs"]["B"]["requests"] == data["requests"]


@pytest.mark.timeout(300)
def test_a_graph_that_does_not_start_is_an_error(cli: Cli) -> None:
    cli.write(
        AGGREGATED.replace(ENGINE, ENGINE.replace("token_time", "start_error: no such model, token_time")), "no.yaml"
    )
    done = cli("ab", "one.yaml", "no.yaml", "-n", "2", timeout=250)
    assert done.code == FAILED
    assert "no such model" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("one.yaml",), "something to compare"),
        (("one.yaml", "one.yaml", "--decide", "speed.p50"), "no metric"),
        (("one.yaml", "one.yaml", "--slo", "ttft=quick"), "no promise"),
        (("one.yaml", "one.yaml", "--set", "C:spec.handoff.plugin=none"), 'for "C", which is not measured'),
        (("one.yaml", "three.yaml", "--prices", "prices.yaml"), "runs on"),
        (("one.yaml", "three.yaml", "-w", "prompt=x"), "prompt"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_starts(
    cli: Cli, arguments: tuple[str, ...], words: str
) -> None:
    done = cli("ab", *arguments)
    assert done.code == USAGE
    assert words in done.err


def test_blocks_are_whole_sessions_and_begin_at_once() -> None:
    def design(workload: str, **changes: Any) -> Design:
        rules = Rules((Question("ttft", "p50"),))
        return Design(read_workload(workload), 60, 3, rules, **changes)

    def blocks(one: Design) -> list[tuple[Any, ...]]:
        return one.blocks(one.workload.sessions(one.requests, one.seed))

    assert [len(block) for block in blocks(design("prompt=10"))] == [1] * 60
    assert [len(block) for block in blocks(design("prompt=10,concurrency=3"))] == [12] * 5
    assert [len(block) for block in blocks(design("prompt=10", block=25))] == [25, 25, 10]
    talks = blocks(design("prompt=10,turns=4", block=10))
    assert [sum(len(session.turns) for session in block) for block in talks] == [12] * 5
    timed = blocks(design("prompt=10,rate=5"))
    assert [block[0].start for block in timed] == [0.0] * 12
    whole = design("prompt=10,rate=5").workload.sessions(60, 3)
    gaps = [later.start - earlier.start for block in timed for earlier, later in pairwise(block)]
    kept = [later.start - earlier.start for earlier, later in pairwise(whole) if later.number % 5]
    assert gaps == pytest.approx(kept)


def test_the_examples_of_the_help_name_files_that_are_there(cli: Cli) -> None:
    words = cli("ab", "--help").out.split()
    named = {word for word in words if word.startswith("graphs/")}
    assert named
    assert all((Path(__file__).parents[2] / name).exists() for name in named)


def test_an_address_is_no_file(tmp_path: Path) -> None:
    assert all(map(is_url, ("http://h:1", "localhost:8000", "10.0.0.1:80/v1", "[::1]:8000", "https://h")))
    assert not any(map(is_url, ("graph.yaml", "graphs/a.yaml", "C:graph", "h:80x", str(tmp_path))))
