"""A graph whose state directory has no room left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.cli.shell import Cli, until
from tests.waiting import PATIENCE

pytestmark = pytest.mark.slow


@pytest.fixture
def disk(cli: Cli) -> Iterator[Path]:
    """The state directory, on a filesystem of 512 KiB."""
    state = cli.directory / "state"
    state.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", state], capture_output=True)
    if mounted.returncode:
        pytest.skip("this user may not mount a small filesystem")
    yield state
    cli("down", "demo", "--timeout", "0")
    subprocess.run(["umount", "--lazy", state], check=True)


def fill(disk: Path, log: Path) -> None:
    """And the last page of a log, which it has already."""
    with log.open("ab") as file:
        file.write(b"-" * (-log.stat().st_size % 4096 - 1) + b"\n")
    with suppress(OSError), (disk / "filler").open("ab", buffering=0) as filler:
        while filler.write(bytes(4096)):
            pass


def answer(url: str) -> str:
    body = {"model": "toy", "prompt": "Why?", "max_tokens": 5, "temperature": 0}
    return str(httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).json()["choices"][0]["text"])


def test_everything_goes_on_and_is_logged_again_when_there_is_room(cli: Cli, disk: Path) -> None:
    def worker() -> int | None:
        return next(process["pid"] for process in cli.ps("demo") if process["pool"] == "main")

    def replaced(pid: int | None) -> bool:
        return any(p["pool"] == "main" and p["state"] == "ready" and p["pid"] != pid for p in cli.ps("demo"))

    assert cli("up", cli.write(), "-d", "--wait").code == 0
    url = cli.launcher()["url"]
    told = answer(url)
    log = disk / "demo" / "logs" / "main-0.log"
    for room in (False, True):
        (disk / "filler").unlink() if room else fill(disk, log)
        pid = worker()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: replaced(pid))
        until(lambda: httpx.get(f"{url}/ready").is_success)
        assert answer(url) == told
        trouble = "main/0: its log cannot be written: No space left on device" in cli("ps", "demo").out
        assert trouble == (not room)
    assert " lines could not be written here\n" in log.read_text()
    assert json.loads((disk / "demo" / "launcher.json").read_bytes())["url"] == url
    assert cli("down", "demo").code == 0
