from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.shell import GRAPH, Cli

POOL = "main: {role: aggregated, cluster: dc-a, engine: {plugin: scripted}}"
SERVER = """\
main: {role: aggregated, cluster: dc-a, replicas: 2, env: {OF_THE_POOL: "1"}, engine: {plugin: stock, config: CONFIG}}
    other: {role: aggregated, cluster: dc-a, engine: {plugin: scripted}}"""


@pytest.fixture
def plugin(tmp_path: Path) -> dict[str, str]:
    """The environment in which a distribution with the engine `stock` is installed."""
    here = Path(__file__).parent
    (tmp_path / "stock_plugin.py").write_text(
        f"import sys\nsys.path.append({str(here)!r})\nfrom stock_engine import *\n"
        "from stock_engine import pdd_register_engines\n"
    )
    info = tmp_path / "pdd_stock-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pdd-stock\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pdd_runtime.plugins]\nstock = stock_plugin\n")
    return {"PYTHONPATH": str(tmp_path)}


def graph(cli: Cli, **config: Any) -> str:
    return cli.write(GRAPH.replace(POOL, SERVER.replace("CONFIG", json.dumps(config))).replace("toy", "models/tiny"))


def test_each_workers_start_is_told_as_it_is_done(cli: Cli, plugin: dict[str, str]) -> None:
    done = cli("render", "engine", graph(cli, tp=2, args=["--nested=1"]), "main", "--format", "json", env=plugin)
    assert done.code == 0, done.err
    first, second = json.loads(done.out)
    assert (first["worker"], second["worker"], first["engine"]) == ("main/0", "main/1", "stock")
    server = str(Path(__file__).with_name("stock_server.py"))
    connector = json.dumps({"socket": first["socket"]})
    model = str(cli.directory / "models/tiny")
    expected = [sys.executable, server, "--model", model, "--port", "8001", "--connector", connector, "--nested=1"]
    assert first["argv"] == expected
    assert first["env"] == {"OF_THE_POOL": "1", "PYTHONUNBUFFERED": "1", "STOCK_MODE": "fast"}
    assert first["files"] == {"parts/flags.yaml": "tp: 2\n"}
    assert first["path"] == str(Path(sys.executable).parent)
    assert second["port"] == 8002
    assert second["socket"] != first["socket"]


def test_the_text_is_a_script_that_runs(cli: Cli, plugin: dict[str, str], tmp_path: Path) -> None:
    file = graph(cli, url="http://127.0.0.1:8123", socket=str(tmp_path / "it's a socket"))
    done = cli(
        "render", "engine", file, "main", "--set", "spec.pools.main.replicas=1", env=plugin | {"TMPDIR": str(tmp_path)}
    )
    assert done.code == 0, done.err
    ran = subprocess.run(["sh", "-c", done.out], capture_output=True, text=True, timeout=60, check=True)
    said = json.loads(ran.stdout)
    assert json.loads(said["connector"]) == {"socket": str(tmp_path / "it's a socket")}
    assert (said["port"], said["flags"], said["mode"], said["pool"]) == ("8123", "tp: 1\n", "fast", "1")
    assert said["path"].startswith(f"{Path(sys.executable).parent}:")
    assert Path(said["directory"]).is_relative_to(tmp_path)


def test_secrets_are_not_shown(cli: Cli, plugin: dict[str, str]) -> None:
    file = graph(
        cli,
        env={"HF_TOKEN": "${T0P}", "TOKENIZERS": "on"},
        args=["--api-key", "${T0P}", "--ssl-key=${T0P}", "--keys", "3"],
    )
    for output in ("text", "json"):
        done = cli("render", "engine", file, "main", "--format", output, env=plugin | {"T0P": "t0p"})
        assert done.code == 0
        assert "t0p" not in done.out
    shown = json.loads(done.out)[0]
    assert shown["argv"][-5:] == ["--api-key", "***", "--ssl-key=***", "--keys", "3"]
    assert (shown["env"]["HF_TOKEN"], shown["env"]["TOKENIZERS"]) == ("***", "on")


def test_what_has_no_server_is_refused_with_its_reason(cli: Cli, plugin: dict[str, str]) -> None:
    file = graph(cli)
    done = cli("render", "engine", file, "other", env=plugin)
    assert done.code == 1
    assert 'the engine of pool "other" is no server' in done.err
    assert f"{file}:" in done.err
    done = cli("render", "engine", file, "man", env=plugin)
    assert done.code == 2
    assert 'did you mean "main"?' in done.err


def test_flags_are_checked_against_the_servers_own_help(cli: Cli, plugin: dict[str, str]) -> None:
    done = cli("render", "engine", graph(cli, args=["--nested.deeper=1"]), "main", "--check", env=plugin)
    assert (done.code, done.out) == (0, "The installed stock server knows all 4 flags.\n")
    file = graph(cli, args=["--modell", "x"])
    done = cli("render", "engine", file, "main", "--check", env=plugin)
    assert done.code == 1
    assert "the installed stock server has no flag --modell" in done.err
    assert 'did you mean "--model"?' in done.err
    done = cli("render", "engine", file, "main", "--check", "--format", "json", env=plugin)
    assert (done.code, json.loads(done.out)["unknown"]) == (1, ["--modell"])


def test_a_server_that_is_not_there_cannot_be_checked(cli: Cli, plugin: dict[str, str]) -> None:
    done = cli("render", "engine", graph(cli, python="/opt/nowhere/python"), "main", "--check", env=plugin)
    assert done.code == 1
    assert "the server prints no help" in done.err
    assert "No such file" in done.err
    assert "set `python`" in done.err
