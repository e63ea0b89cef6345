"""One graph that runs, and every command that looks at it or troubles it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.cli.shell import GRAPH, Cli, read_until, running, until
from tests.waiting import PATIENCE

KEYS = ["pool", "index", "role", "cluster", "pid", "epoch", "state", "endpoint"]


@pytest.fixture(scope="module", autouse=True)
def up(cli: Cli) -> Iterator[str]:
    """The output of `up`."""
    done = cli("up", cli.write(), "-d", "--wait", "--wait-timeout", "60")
    assert (done.code, done.err) == (0, "")
    yield done.out
    pids = cli.pids()
    done = cli("down")
    assert (done.code, done.err) == (0, "")
    assert "frontend/0 draining" in done.out
    assert "graph demo is down" in done.out
    assert [pid for pid in pids if running(pid)] == []
    assert cli("ps").code == 3
    assert "is ready" in cli("logs", "main", "-g", "demo").out


def url(cli: Cli) -> str:
    return str(cli.launcher()["url"])


def ready(cli: Cli) -> bool:
    return httpx.get(f"{url(cli)}/ready").is_success


def test_up_shows_the_graph_its_start_and_how_to_use_it(cli: Cli, up: str) -> None:
    assert "dc-a" in up.splitlines()[1]
    assert up.index("main/0 starting") < up.index("main/0 ready") < up.index(f"ready: {url(cli)}")
    curl = up.splitlines()[-1]
    assert curl.startswith(f"curl -N {url(cli)}/v1/chat/completions ")
    answer = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert answer.stdout.rstrip().endswith("data: [DONE]")


def test_a_running_graph_is_asked(cli: Cli) -> None:
    done = cli("ask", "Why?", "--max-tokens", "5")
    assert done.code == 0
    assert done.out.startswith("you: Why?\n")
    assert "timeline of req-" in done.out
    assert cli("ask", "@nowhere.txt").code == 1
    asked = json.loads(cli("ask", "Why?", "--max-tokens", "5", "--format", "json").out)
    assert asked["answer"] in done.out
    assert asked["timeline"]["finish_reason"]


def test_ps_lists_every_process_the_frontend_among_them(cli: Cli) -> None:
    listed = cli.ps("demo")
    assert [list(process) for process in listed] == [KEYS, KEYS]
    main, frontend = listed
    assert (main["pool"], main["index"], main["role"], main["cluster"], main["state"]) == (
        *("main", 0, "aggregated", "dc-a", "ready"),
    )
    assert (frontend["pool"], frontend["role"], frontend["endpoint"]) == ("frontend", "frontend", url(cli))
    assert sorted([main["pid"], frontend["pid"]]) == sorted(cli.pids()[1:])
    assert main["epoch"] != frontend["epoch"]


def test_ps_takes_a_name_a_file_or_nothing(cli: Cli) -> None:
    tables = [cli("ps", *argument).out for argument in ([], ["demo"], ["demo.yaml"])]
    assert tables[0] == tables[1] == tables[2]
    assert "demo" in tables[0]
    assert "ready" in tables[0]
    unknown = cli("ps", "dmeo")
    assert (unknown.code, unknown.out) == (3, "")
    assert unknown.err == 'error: graph dmeo is not running\n  fix: did you mean "demo"?\n'


def test_a_second_up_in_the_foreground_is_refused_and_says_who_runs_it(cli: Cli) -> None:
    second = cli("up", "demo.yaml")
    assert second.code == 4
    assert second.err.startswith("error: graph demo is running already\n  why: its launcher is process ")
    assert url(cli) in second.err
    assert "change it with `up -d`" in second.err
    assert ready(cli)


def test_up_again_of_the_same_graph_does_nothing(cli: Cli) -> None:
    pids = cli.pids()
    for arguments in (["-d"], ["--wait"], ["--dry-run"]):
        again = cli("up", "demo.yaml", *arguments)
        assert (again.code, again.err) == (0, "")
        assert "graph demo runs as demo.yaml says" in again.out
    assert json.loads(cli("up", "demo.yaml", "--dry-run", "--format", "json").out)["changes"] == []
    assert json.loads(cli("up", "demo.yaml", "-d", "--format", "json").out)["pid"] == pids[0]
    assert cli.pids() == pids


def test_logs_come_with_a_prefix_for_all_or_for_one(cli: Cli) -> None:
    every = cli("logs").out
    assert "    main/0 | " in every
    assert "frontend/0 | " in every
    one = cli("logs", "main/0", "-n", "1").out.splitlines()
    assert len(one) == 1
    assert one[0].startswith("main/0 | ")
    unknown = cli("logs", "mian")
    assert unknown.code == 1
    assert 'did you mean "main"?' in unknown.err


def test_a_requests_timeline_is_drawn(cli: Cli) -> None:
    body = {"model": "toy", "prompt": "Hello", "max_tokens": 4}
    request_id = httpx.post(f"{url(cli)}/v1/completions", json=body).headers["x-pdd-request-id"]
    drawn = cli("timeline", request_id)
    assert drawn.code == 0
    assert "main tokens" in drawn.out
    assert "4 tokens" in drawn.out
    assert json.loads(cli("timeline", request_id, "--format", "json").out)["id"] == request_id
    unknown = cli("timeline", "req-none")
    assert unknown.code == 1
    assert "no timeline of request 'req-none'" in unknown.err


def test_a_killed_worker_is_noticed_and_replaced(cli: Cli) -> None:
    follow = cli.start("logs", "main", "-f")
    before = cli.ps()[0]
    os.kill(before["pid"], signal.SIGKILL)
    until(lambda: before["pid"] not in [process["pid"] for process in cli.launcher()["processes"]])
    until(lambda: ready(cli))
    until(lambda: cli.ps()[0]["state"] == "ready")
    after = cli.ps()[0]
    assert after["pid"] != before["pid"]
    assert after["epoch"] != before["epoch"]
    assert "main/0" in read_until(follow, r"launcher: main/0 ended \(killed by SIGKILL")
    assert "is ready" in read_until(follow, "is ready")
    follow.send_signal(signal.SIGINT)
    assert follow.wait(20) == 0


def test_two_graphs_run_beside_each_other_and_must_be_named(cli: Cli) -> None:
    cli.write(GRAPH.replace("demo", "second"), "second.yaml")
    assert cli("up", "second.yaml", "-d").code == 0
    both = cli("ps").out
    assert "demo" in both
    assert "second" in both
    for command in (["down"], ["ps", "--format", "json"], ["timeline", "x"]):
        done = cli(*command)
        assert done.code == 2
        assert "several graphs are there: demo, second" in done.err
    pids = cli.pids("second")
    # It may not have come up yet: that is no reason to leave anything.
    assert cli("down", "second.yaml").code == 0
    assert [pid for pid in pids if running(pid)] == []
    assert ready(cli)


def test_a_reader_that_leaves_gets_no_traceback(cli: Cli) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "pdd_runtime.cli", "ps"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=cli.env, timeout=PATIENCE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_logs_of_one_request_come_from_every_process_in_order(cli: Cli) -> None:
    body = {"model": "toy", "prompt": "Hello", "max_tokens": 4}
    mine, other = (
        httpx.post(f"{url(cli)}/v1/completions", json=body, timeout=PATIENCE).headers["x-pdd-request-id"]
        for _ in range(2)
    )
    until(lambda: f"request {mine} ended" in cli("logs", "frontend", "--request", mine).out)
    done = cli("logs", "--request", mine)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert all(mine in line for line in lines)
    processes = [line.split(" | ")[0].strip() for line in lines]
    assert sorted(processes) == ["frontend/0", "frontend/0", "main/0"]
    assert f"request {mine}: route A, " in lines[0]
    assert f"request {mine}: made 4 tokens, length" in done.out
    assert f"request {mine} ended: status 200, 4 tokens" in done.out
    assert other not in done.out
    entries = [json.loads(line) for line in cli("logs", "-r", mine, "--format", "json").out.splitlines()]
    assert [entry["process"] for entry in entries] == processes
    made = next(entry for entry in entries if entry["process"] == "main/0")
    assert (made["level"], made["logger"]) == ("INFO", "pdd_runtime.worker.service")
    assert entries == sorted(entries, key=lambda entry: str(entry["time"]))
    none = cli("logs", "--request", "req-0123456789abcdef")
    assert (none.code, none.out) == (1, "")
    assert "no process of graph demo has logged req-0123456789abcdef" in none.err


def test_a_port_that_another_graph_has_is_told_before_anything_starts(cli: Cli) -> None:
    port = url(cli).rpartition(":")[2]
    name = cli.write(GRAPH.replace("{name: demo}", "{name: clash}"), "clash.yaml")
    taken = ["--set", f"spec.frontend.port={port}"]
    for arguments in (["-d"], [], ["--dry-run"]):
        done = cli("up", name, *taken, *arguments)
        assert done.code == 1
        assert done.err == (
            f"--set spec.frontend.port={port}: error: the frontend cannot listen on 127.0.0.1:{port}\n"
            f"  why: graph demo listens there: {url(cli)}\n  "
            "fix: choose another port, --set spec.frontend.port=9000 (0: any that is free)\n"
        )
    assert not (cli.directory / "state" / "clash").exists()
    checked = cli("validate", name, *taken)
    assert checked.code == 0
    assert f"warning: the frontend cannot listen on 127.0.0.1:{port}" in checked.err
    assert json.loads(cli("validate", name, *taken, "--format", "json").out)["warnings"][0]["code"] == "launch"


def completed(cli: Cli, words: str) -> list[str]:
    """What bash would offer behind `words`."""
    arguments = ["pdd-runtime", *words.split(" ")]
    env = {
        "_PDD_RUNTIME_COMPLETE": "complete_bash",
        "COMP_WORDS": "pdd-runtime " + words,
        "COMP_CWORD": str(len(arguments) - 1),
    }
    return cli(env=env).out.split()


def test_the_shell_completes_commands_pools_graphs_and_files(cli: Cli) -> None:
    assert completed(cli, "va") == ["validate"]
    assert completed(cli, "logs ma") == ["main"]
    assert completed(cli, "logs --graph demo fr") == ["frontend"]
    assert completed(cli, "down ") == ["demo"]
    assert completed(cli, "up de") == completed(cli, "bench de") == ["demo.yaml"]
    assert completed(cli, "plugins check pdd-run") == ["pdd-runtime"]
    assert completed(cli, "ps --format j") == ["json"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_can_be_taught(cli: Cli, shell: str) -> None:
    # In a script there is no shell around it to be recognised: it is named.
    env = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = cli("--show-completion", shell, env=env)
    assert done.code == 0
    assert f"_PDD_RUNTIME_COMPLETE=complete_{shell}" in done.out
