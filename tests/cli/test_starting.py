"""What `up` does when something goes wrong, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import threading

import httpx
import pytest

from tests.cli.shell import GRAPH, Cli, read_until, running, until
from tests.waiting import PATIENCE

SLOW = GRAPH.replace("{plugin: scripted}", "{plugin: scripted, config: {token_time: 0.05}}")


def gone(pids: list[int]) -> bool:
    return not any(running(pid) for pid in pids)


def test_a_broken_graph_is_told_with_file_and_line(cli: Cli) -> None:
    cli.write(GRAPH.replace("role: aggregated", "roll: aggregated"), "broken.yaml")
    for command in ("up", "validate"):
        done = cli(command, "broken.yaml")
        assert done.code == 2
        assert done.err.startswith(
            'broken.yaml:8:12: error: unknown key "roll" in spec.pools.main\n    8 |     main: {roll:'
        )
        assert done.err.count("error:") == 1
        assert 'fix: did you mean "role"?' in done.err


def test_a_plugin_that_is_not_there_is_told_before_anything_starts(cli: Cli) -> None:
    cli.write(GRAPH.replace("plugin: scripted", "plugin: scriptd"), "unknown.yaml")
    done = cli("up", "unknown.yaml")
    assert done.code == 2
    assert 'unknown.yaml:8:62: error: no installed plugin brings an engine called "scriptd"' in done.err
    assert 'did you mean "scripted"?' in done.err
    done = cli("up", cli.write(), "--set", "spec.pools.main.engine.config.token_tme=1")
    assert done.code == 2
    assert 'engine scripted has no setting "token_tme"' in done.err
    assert not (cli.directory / "state" / "demo").exists()


@pytest.mark.parametrize("arguments", [["-d", "--wait"], []], ids=["detached", "attached"])
def test_a_worker_that_cannot_start_fails_the_whole_with_its_own_words(cli: Cli, arguments: list[str]) -> None:
    override = ["--set", "spec.pools.main.engine.config.start_error=no such model"]
    done = cli("up", cli.write(), *arguments, *override)
    assert done.code == 1
    assert "error: main/0 cannot start" in done.err
    assert "no such model" in done.err
    assert not (cli.directory / "state" / "demo" / "launcher.json").exists()


@pytest.mark.parametrize("arguments", [["-d", "--wait"], []], ids=["detached", "attached"])
def test_a_start_that_takes_too_long_names_who_is_missing(cli: Cli, arguments: list[str]) -> None:
    override = ["--set", "spec.pools.main.engine.config.start_time=600"]
    done = cli("up", cli.write(), *arguments, *override, "--wait-timeout", "1")
    assert done.code == 1
    assert "graph demo is not ready after 1 s\n  why: main/0 is starting" in done.err
    if arguments:
        pids = cli.pids()
        assert cli("down").code == 0
        assert gone(pids)
    assert cli("ps").code == 3


def test_ctrl_c_lets_running_answers_end_and_leaves_nothing(cli: Cli) -> None:
    process = cli.start("up", cli.write(SLOW))
    started = read_until(process, "^ready: ")
    read_until(process, "Ctrl-C stops it")
    assert "main/0 | " in started
    url = cli.launcher()["url"]
    pids = cli.pids()
    first, answer = threading.Event(), ""

    def ask() -> None:
        nonlocal answer
        body = {"model": "toy", "prompt": "Hello", "max_tokens": 30, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as stream:
            for piece in stream.iter_text():
                first.set()
                answer += piece

    asking = threading.Thread(target=ask)
    asking.start()
    assert first.wait(PATIENCE)
    process.send_signal(signal.SIGINT)
    asking.join(PATIENCE)
    assert answer.rstrip().endswith("data: [DONE]")
    assert '"finish_reason":"length"' in answer
    rest = process.stdout.read() if process.stdout else ""
    assert process.wait(PATIENCE) == 0
    assert (
        rest.index("draining: running requests may end")
        < rest.index("frontend/0 stopped")
        < rest.index("main/0 stopped")
    )
    assert gone(pids)
    assert cli("ps").code == 3


def test_a_second_ctrl_c_kills(cli: Cli) -> None:
    process = cli.start("up", cli.write(SLOW), "--quiet")
    read_until(process, "Ctrl-C stops it")
    pids = cli.pids()
    body = {"model": "toy", "prompt": "Hello", "max_tokens": 2000, "stream": True}
    url = cli.launcher()["url"]
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as stream:
        pieces = stream.iter_text()
        next(pieces)
        process.send_signal(signal.SIGINT)
        read_until(process, "frontend/0 draining")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        # Nobody waited for the answer, and nobody was left to end it in words.
        with pytest.raises(httpx.TransportError):
            list(pieces)
    assert gone(pids)


def test_a_question_is_answered_and_drawn_and_the_graph_stays_until_sigterm(cli: Cli) -> None:
    process = cli.start("up", cli.write(), "--ask", "Why?", "--max-tokens", "7")
    shown = read_until(process, "Ctrl-C stops it")
    lines = shown.splitlines()
    asked = next(number for number, line in enumerate(lines) if line == "you: Why?")
    assert lines[asked + 1]
    assert any(line.startswith("timeline of req-") for line in lines)
    assert any(line.startswith("main tokens") and line.rstrip().endswith("7 tokens") for line in lines)
    assert "main/0 | " not in shown
    pids = cli.pids()
    assert httpx.get(f"{cli.launcher()['url']}/ready").is_success
    process.terminate()
    assert process.wait(PATIENCE) == 0
    assert gone(pids)


def test_a_question_that_fails_is_told_and_leaves_the_graph_up(cli: Cli) -> None:
    done = cli("up", cli.write(), "-d", "--ask", "Why?", "--max-tokens", "1000000")
    assert done.code == 1
    assert done.err.startswith("http://127.0.0.1:")
    assert "error: the frontend answered 400: " in done.err
    assert cli.ps()[0]["state"] == "ready"
    assert cli("down").code == 0


def test_a_launcher_that_is_killed_leaves_no_process(cli: Cli) -> None:
    assert cli("up", cli.write(), "-d", "--wait").code == 0
    pids = cli.pids()
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: gone(pids))
    done = cli("ps")
    assert done.code == 3
    assert f"its launcher, process {pids[0]}, is dead" in done.err
    assert "`pdd-runtime down demo` clears what is left" in done.err
    # Neither a new start nor `down` is troubled by what it left.
    assert cli("up", "demo.yaml", "-d", "--wait").code == 0
    os.kill(cli.pids()[0], signal.SIGKILL)
    pids = cli.pids()
    assert cli("down").code == 0
    assert gone(pids)
    assert cli("down").code == 3


def test_what_a_killed_launcher_left_on_the_port_is_no_hindrance(cli: Cli) -> None:
    assert cli("up", cli.write(), "--wait").code == 0
    port = ["--set", f"spec.frontend.port={httpx.URL(cli.launcher()['url']).port}"]
    frontend = next(process["pid"] for process in cli.ps() if process["pool"] == "frontend")
    # It cannot notice by itself that its launcher is gone.
    os.kill(frontend, signal.SIGSTOP)
    os.kill(cli.pids()[0], signal.SIGKILL)
    done = cli("up", "demo.yaml", "--wait", *port)
    assert (done.code, done.err) == (0, "")
    assert not running(frontend)
    assert cli("down").code == 0


def test_a_launcher_that_hangs_is_no_match_for_down(cli: Cli) -> None:
    assert cli("up", cli.write(), "-d", "--wait").code == 0
    pids = cli.pids()
    os.kill(pids[0], signal.SIGSTOP)
    done = cli("down", "--timeout", "0")
    assert done.code == 0
    assert gone(pids)


def test_a_dry_run_says_what_would_run_and_starts_nothing(cli: Cli) -> None:
    name = cli.write(GRAPH.replace("{name: demo}", "{name: dry}").replace("dc-a, engine", "dc-a, replicas: 2, engine"))
    done = cli("up", name, "--dry-run", "--set", "spec.pools.main.engine.config.chunk=8")
    assert (done.code, done.err) == (0, "")
    assert re.search(r"main/1 +aggregated +dc-a +engine scripted, model toy +chunk: 8", done.out)
    assert "nothing was started" in done.out
    plan = json.loads(cli("up", name, "--dry-run", "--format", "json").out)
    assert [f"{process['pool']}/{process['index']}" for process in plan["processes"]] == [
        *("main/0", "main/1", "frontend/0"),
    ]
    assert not (cli.directory / "state" / "dry").exists()
    wrong = cli("up", name, "--dry-run", "--set", "spec.pools.main.engine.plugin=scriptd")
    assert wrong.code == 2


def test_what_runs_in_the_background_is_told_as_json(cli: Cli) -> None:
    done = cli("up", cli.write(), "--wait", "--format", "json")
    assert done.code == 0
    started = json.loads(done.out)
    assert started == {
        "name": "demo",
        "pid": cli.launcher()["pid"],
        "url": cli.launcher()["url"],
        "state": str(cli.directory / "state" / "demo"),
    }
    assert "main/0 ready" in done.err
    assert json.loads(cli("down", "--format", "json").out) == {"name": "demo", "forced": []}
    assert cli("up", "demo.yaml", "--format", "json").code == 2


def test_a_check_is_told_as_json_whether_it_passes_or_not(cli: Cli) -> None:
    checked = cli("validate", cli.write(), "--format", "json")
    assert (checked.code, json.loads(checked.out)) == (
        0,
        {"name": "demo", "path": "demo.yaml", "right": True, "faults": [], "warnings": [], "kv": []},
    )
    broken = cli("validate", "demo.yaml", "--set", "spec.clusters={}", "--format", "json")
    assert (broken.code, broken.err) == (2, "")
    told = json.loads(broken.out)
    assert told["right"] is False
    assert set(told["faults"][0]) == {"code", "what", "where", "why", "fix"}
    assert cli("validate", "none.yaml", "--format", "json").code == 2
