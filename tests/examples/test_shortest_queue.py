"""The example distribution, from its folder to a request's timeline, as its author would go about it."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "shortest_queue"


@dataclass
class Author:
    """A fresh virtual environment and a copy of the example."""

    python: Path
    folder: Path
    env: dict[str, str]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.python), *command], cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=100
        )

    def __call__(self, *command: str) -> str:
        done = self.run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def cli(self, *arguments: str) -> str:
        return self("-m", "pdd_runtime.cli", *arguments)


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> Author:
    """With the example installed by pip, offline: what it builds on comes from the environment of these tests."""
    home = tmp_path_factory.mktemp("author")
    venv.create(home / "venv", with_pip=False, symlinks=True)
    python = home / "venv" / "bin" / "python"
    packages = sysconfig.get_path("purelib", vars={"base": str(home / "venv")})
    shared = [path for path in (*site.getsitepackages(), sysconfig.get_path("purelib")) if Path(path).is_dir()]
    # `addsitedir` rather than a plain path: editable installs are path files of that folder.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in dict.fromkeys(shared)]
    (Path(packages) / "shared.pth").write_text("".join(lines))
    ignored = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "dist")
    folder = Path(shutil.copytree(EXAMPLE, home / "shortest_queue", ignore=ignored))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PDD_", "PYTHON", "PYTEST"))}
    env |= {"PDD_STATE_DIR": str(home / "state"), "OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    author = Author(python, folder, env)
    author("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "-e", ".")
    return author


def test_its_own_tests_pass(author: Author) -> None:
    assert " passed" in author("-m", "pytest", "-q", "-p", "no:cacheprovider")


def test_it_is_listed_with_its_settings(author: Author) -> None:
    listed = json.loads(author.cli("plugins", "--format", "json"))
    mine = {row["name"]: row for row in listed["plugins"] if row["distribution"] == "pdd-shortest-queue"}
    assert {name: row["kind"] for name, row in mine.items()} == {
        "shortest-queue": "routing policy",
        "load-aware": "handoff strategy",
    }
    assert mine["shortest-queue"]["config"]["longest"]["default"] == 8
    assert listed["problems"] == []


def test_it_passes_the_check(author: Author) -> None:
    report = json.loads(author.cli("plugins", "check", "pdd-shortest-queue", "--format", "json"))
    assert report["ok"]
    assert {checked["name"] for checked in report["classes"]} == {"shortest-queue", "load-aware"}


@pytest.fixture
def url(author: Author) -> Iterator[str]:
    """Of the frontend of the example's graph, brought up."""
    try:
        author.cli("up", "graph.yaml", "-d", "--wait", "--wait-timeout", "60")
        rows: list[dict[str, Any]] = json.loads(author.cli("ps", "shortest-queue", "--format", "json"))
        yield next(row["endpoint"] for row in rows if row["role"] == "frontend")
    finally:
        author.run("-m", "pdd_runtime.cli", "down", "shortest-queue", "--timeout", "0")


def test_a_graph_uses_it_and_the_timeline_says_so(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "Who decides?"}], "max_tokens": 300}
    answer = httpx.post(f"{url}/v1/chat/completions", json={"model": "script", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    timeline = httpx.get(f"{url}/pdd/requests/{answer.headers['x-pdd-request-id']}").raise_for_status().json()
    assert timeline["route"] == "P-RLD-MD"
    assert timeline["reason"] == "shortest queues: prefill/0 has 0 requests, main/0 has 0, relay/0 has 0"
    assert timeline["handoff"]["strategy"] == "load-aware"
    assert timeline["tokens"]["main"] > 0
