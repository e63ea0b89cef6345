"""What is secret is in no output, no error, no log and no file of a graph, whoever says it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from pdd_runtime.graph.secrets import is_secret
from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.settings import secret_fields
from tests.cli.shell import GRAPH, Cli

CANARY = "canary-d41d8cd98f"
POOL = "main: {role: aggregated, cluster: dc-a, engine: {plugin: scripted}}"
CHATTY = (
    "main: {role: aggregated, cluster: dc-a, env: {HF_TOKEN: '${CANARY}'}, "
    "engine: {plugin: chatty, config: {api_key: '${file:FILE}'}}}"
)
SERVER = (
    "main: {role: aggregated, cluster: dc-a, env: {HF_TOKEN: '${CANARY}'}, engine: {plugin: stock, config: "
    "{env: {API_KEY: '${CANARY}'}, args: [--api-key, '${CANARY}', '--other-key=${file:FILE}']}}}"
)
PLUGINS = """
import os
import sys

sys.path.append({here!r})
from pydantic import SecretStr
from stock_engine import StockEngine

from pdd_runtime.errors import EngineError
from pdd_runtime.plugins import hookimpl
from pdd_runtime.testing.scripted import ScriptedEngine
from pdd_runtime.testing.scripted_config import ScriptedConfig


class ChattyConfig(ScriptedConfig, frozen=True, extra="forbid"):
    api_key: SecretStr = SecretStr("")


class Chatty(ScriptedEngine):
    name = "chatty"
    Config = ChattyConfig

    async def start(self, host):
        print("my token is", os.environ["HF_TOKEN"], self._config, flush=True)
        key = self._config.api_key.get_secret_value()
        print("the graph's secret is", os.environ["PDD_SECRET"], flush=True)
        raise EngineError("the hub does not know token " + os.environ["HF_TOKEN"] + " and key " + key)


@hookimpl
def pdd_register_engines():
    return [StockEngine, Chatty]
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """With the plugins of this test, and the secret."""
    (tmp_path / "chatty_plugin.py").write_text(PLUGINS.format(here=str(Path(__file__).parent)))
    info = tmp_path / "pdd_chatty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pdd-chatty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pdd_runtime.plugins]\nchatty = chatty_plugin\n")
    (tmp_path / "key").write_text(f"{CANARY}-of-the-file\n")
    return {"PYTHONPATH": str(tmp_path), "CANARY": CANARY}


def graph(cli: Cli, pool: str, tmp_path: Path, name: str) -> str:
    pool = pool.replace("FILE", str(tmp_path / "key"))
    return cli.write(GRAPH.replace(POOL, pool).replace("demo", name).replace("toy", "models/tiny"), f"{name}.yaml")


@pytest.mark.parametrize(
    "command",
    [
        ("validate",),
        ("validate", "--format", "json"),
        ("graph", "--format", "json"),
        ("up", "--dry-run"),
        ("up", "--dry-run", "--format", "json"),
    ],
    ids=" ".join,
)
def test_no_command_shows_a_secret(cli: Cli, env: dict[str, str], tmp_path: Path, command: tuple[str, ...]) -> None:
    done = cli(*command, graph(cli, SERVER, tmp_path, "server"), env=env)
    assert done.code == 0, done.err
    assert CANARY not in done.out + done.err


def test_a_secret_setting_that_stands_in_the_graph_is_refused_and_not_repeated(
    cli: Cli, env: dict[str, str], tmp_path: Path
) -> None:
    file = graph(cli, CHATTY.replace("${file:FILE}", CANARY), tmp_path, "chatty")
    for form in ("table", "json"):
        done = cli("validate", file, "--format", form, env=env)
        assert done.code != 0
        assert "the secret api_key of chatty stands in the graph itself" in done.out + done.err
        assert CANARY not in done.out + done.err


def test_what_a_worker_says_of_its_secrets_is_nowhere(cli: Cli, env: dict[str, str], tmp_path: Path) -> None:
    done = cli("up", graph(cli, CHATTY, tmp_path, "chatty"), env=env)
    assert done.code != 0
    assert "the hub does not know token *** and key ***" in done.out + done.err
    assert CANARY not in done.out + done.err
    state = cli.directory / "state" / "chatty"
    log = (state / "logs" / "main-0.log").read_text()
    assert "my token is ***" in log
    assert "the graph's secret is ***" in log
    for path in (state, *state.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else mode & 0o700), f"{path} is open to others: {mode:o}"
        if path.is_file():
            assert CANARY not in path.read_text(errors="replace"), path


def test_a_secret_that_is_not_there_is_told_by_its_name(cli: Cli, env: dict[str, str], tmp_path: Path) -> None:
    done = cli("up", graph(cli, CHATTY.replace("CANARY", "NO_SUCH"), tmp_path, "chatty"), env=env)
    assert done.code != 0
    assert "spec.pools.main.env.HF_TOKEN: error: the environment has no NO_SUCH" in done.out + done.err


def test_every_setting_of_a_plugin_that_is_a_secret_by_its_name_is_declared_as_one() -> None:
    """A path to a secret is none."""
    plain = [
        f"{entry.name}.{name}"
        for entry in load_plugins().registered
        for name, field in entry.cls.Config.model_fields.items()
        if is_secret(name) and field.annotation in (str, str | None) and name not in secret_fields(entry.cls.Config)
    ]
    assert plain == []
