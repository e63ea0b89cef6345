from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.cli.shell import Cli


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A command with a state directory of its own; what it started is ended."""
    command = Cli(tmp_path_factory.mktemp("cli"))
    yield command
    for process in command.attached:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        if process.stdout:
            process.stdout.close()
    for path in (command.directory / "state").glob("*/launcher.json"):
        command("down", path.parent.name, "--timeout", "0")
