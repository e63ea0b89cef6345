from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from pdd_runtime import __version__
from pdd_runtime.cli.app import app
from pdd_runtime.cli.console import ALREADY_RUNNING, FAILED, NOT_RUNNING, OK, USAGE
from tests.cli.shell import Cli

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


def commands() -> dict[str, Any]:
    """By name; those of a group as "group name"."""

    def walk(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, command in group.commands.items():
            yield f"{prefix}{name}", command
            if hasattr(command, "commands"):
                yield from walk(command, f"{prefix}{name} ")

    return dict(walk(typer.main.get_command(app), ""))


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_command_has_help_with_an_example(name: str) -> None:
    command = commands()[name]
    assert command.help
    assert command.epilog
    assert f"pdd-runtime {name}" in command.epilog
    for parameter in command.params:
        assert getattr(parameter, "help", None), f"{name} {parameter.name}"


def test_no_command_is_told_in_half_a_sentence(cli: Cli) -> None:
    for arguments in ([], ["plugins"]):
        assert "..." not in cli(*arguments, "--help").out.partition("Commands:")[2]


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_manual_has_every_command_and_option(name: str) -> None:
    text = DOCS.read_text()
    section = re.search(rf"^##+ `pdd-runtime {name}(?=[` ]).*?(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert section, f"no section on {name}"
    for parameter in commands()[name].params:
        for option in parameter.opts if parameter.param_type_name == "option" else []:
            if option != "--help":
                assert f"`{option}" in section[0], f"{option} of {name}"


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_manual_has_no_option_that_does_not_exist(name: str) -> None:
    text = DOCS.read_text()
    section = re.search(rf"^##+ `pdd-runtime {name}(?=[` ]).*?(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert section
    told = {option for row in re.findall(r"^\| (`-.*?) \|", section[0], re.MULTILINE) for option in _options(row)}
    real = {option for parameter in commands()[name].params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert told - real == set()


def _options(cell: str) -> list[str]:
    """The options that the first cell of a row names: of `--set PATH=VALUE`, `--set`."""
    return [option.split()[0] for option in re.findall(r"`(-[^`]*)`", cell)]


def test_the_manual_has_every_exit_code() -> None:
    text = DOCS.read_text()
    assert [OK, FAILED, USAGE, NOT_RUNNING, ALREADY_RUNNING] == [0, 1, 2, 3, 4]
    for code in range(5):
        assert f"| {code} |" in text


def test_the_version_is_printed(cli: Cli) -> None:
    done = cli("--version")
    assert (done.code, done.out) == (0, f"pdd-runtime {__version__}\n")


def test_wrong_usage_is_2(cli: Cli) -> None:
    assert cli("up").code == 2
    assert cli("fly").code == 2
    assert cli("ps", "--format", "xml").code == 2


def test_plugins_are_listed_with_what_is_wrong(cli: Cli) -> None:
    done = cli("plugins")
    assert done.code == 0
    assert re.search(r"engine +scripted +pdd-runtime ", done.out)
    listed = json.loads(cli("plugins", "--format", "json").out)
    scripted = next(plugin for plugin in listed["plugins"] if plugin["name"] == "scripted")
    assert scripted["distribution"] == "pdd-runtime"
    assert "token_time" in scripted["config"]
    # A plugin that is broken is named; the others are there.
    listed = json.loads(cli("plugins", "--format", "json", env={"PDD_PLUGINS": "scripted,none"}).out)
    assert [plugin["name"] for plugin in listed["plugins"]] == ["scripted"]
    assert "not installed: none" in listed["problems"][0]["what"]


def test_validate_tells_which_engines_move_kv_themselves(cli: Cli) -> None:
    graph = Path(__file__).parents[2] / "graphs" / "quickstart.yaml"
    native = "{plugin: scripted, config: {data_plane: native}}"
    changes = [
        *(f"spec.pools.{pool}.engine={native}" for pool in ("prefill", "relay", "main")),
        "spec.edges.0={from: prefill, to: relay, carries: kv}",
        "spec.edges.1={from: prefill, to: main, carries: kv, link: wan}",
        "spec.links.wan.emulate=false",
    ]
    done = cli("validate", str(graph), *(part for change in changes for part in ("--set", change)))
    assert done.code == 0
    for pool in ("relay", "main"):
        how = "scripted → scripted, native; scripted moves it itself (data_plane: native)"
        assert f"KV prefill → {pool}: {how}" in " ".join(done.out.split())


def test_validate_draws_the_graph(cli: Cli) -> None:
    graph = Path(__file__).parents[2] / "graphs" / "quickstart.yaml"
    done = cli("validate", str(graph), "--set", "spec.frontend.port=9000")
    assert done.code == 0
    assert "  prefill ──KV──▶ main by tcp, wan: 200Mbit/s, 50ms there and back, emulated" in done.out
    assert "127.0.0.1:9000" in done.out


def test_a_handoff_that_no_edge_can_carry_is_refused(cli: Cli) -> None:
    graph = Path(__file__).parents[2] / "graphs" / "quickstart.yaml"
    kv = "spec.handoff={plugin: kv-transfer}"
    done = cli("validate", str(graph), "--set", kv)
    assert done.code == 2
    assert 'handoff strategy kv-transfer moves kv, but no edge carries kv from "relay"' in done.err
    edge = "spec.edges.3={from: relay, to: main, carries: kv, transport: {plugin: tcp}, link: wan}"
    assert cli("validate", str(graph), "--set", kv, "--set", edge).code == 0


def test_no_color_is_heeded(cli: Cli) -> None:
    colored = cli("validate", "none.yaml", env={"FORCE_COLOR": "1"})
    assert "\x1b[" in colored.err
    plain = cli("validate", "none.yaml", env={"FORCE_COLOR": "1", "NO_COLOR": "1"})
    assert "\x1b[31m" not in plain.err
    assert "\x1b[" not in cli("validate", "none.yaml").err


def test_a_tab_waits_for_nothing_that_is_not_needed() -> None:
    loaded = "import sys, pdd_runtime.cli.app; print(*(name.split('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True, timeout=60)
    assert not {"httpx", "pydantic", "uvicorn", "torch"} & set(done.stdout.split())
