"""The command as its users run it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.waiting import PATIENCE

GRAPH = """\
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: demo}
spec:
  model: {source: toy}
  clusters: {dc-a: {}}
  pools:
    main: {role: aggregated, cluster: dc-a, engine: {plugin: scripted}}
  frontend: {port: 0}
"""


@dataclass
class Result:
    """What a command did."""

    code: int
    out: str
    err: str


@dataclass
class Cli:
    """Runs the command as a user does, with a state directory of its own."""

    directory: Path
    attached: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PDD_", "COLUMNS"))},
            "PDD_STATE_DIR": str(self.directory / "state"),
            "OMP_NUM_THREADS": "1",
        }

    def __call__(self, *arguments: str, timeout: float = 2 * PATIENCE, env: dict[str, str] | None = None) -> Result:
        done = subprocess.run(
            [sys.executable, "-m", "pdd_runtime.cli", *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**self.env, **(env or {})},
            cwd=self.directory,
            check=False,
        )
        assert "Traceback" not in done.stderr + done.stdout
        return Result(done.returncode, done.stdout, done.stderr)

    def start(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        """A command that stays, with both outputs in its stdout."""
        process = subprocess.Popen(
            [sys.executable, "-m", "pdd_runtime.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**self.env, **(env or {})},
            cwd=self.directory,
            # Ctrl-C means something to it, even where these tests run in the background and ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.attached.append(process)
        return process

    def write(self, text: str = GRAPH, name: str = "demo.yaml") -> str:
        (self.directory / name).write_text(text)
        return name

    def ps(self, *arguments: str) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = json.loads(self("ps", *arguments, "--format", "json").out)
        return listed

    def launcher(self, name: str = "demo") -> dict[str, Any]:
        launcher: dict[str, Any] = json.loads((self.directory / "state" / name / "launcher.json").read_bytes())
        return launcher

    def pids(self, name: str = "demo") -> list[int]:
        """The launcher and all it started."""
        launcher = self.launcher(name)
        return [launcher["pid"], *(process["pid"] for process in launcher["processes"])]


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    """What it prints, up to the line that matches."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if re.search(pattern, line):
            return seen
    raise AssertionError(f"it ended without {pattern!r}:\n{seen}")


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


def has_route(url: str) -> bool:
    """Whether the frontend there says that it can serve. Its launcher has the port a moment before it listens."""
    try:
        return httpx.get(f"{url}/ready", timeout=PATIENCE).is_success
    except httpx.ConnectError:
        return False
