"""What a person sees, on a real terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

from tests.cli.shell import GRAPH, Cli


class Terminal:
    """The command on a pseudo-terminal, and all that it has written."""

    def __init__(self, cli: Cli, *arguments: str) -> None:
        self._fd, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdd_runtime.cli", *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**cli.env, "TERM": "xterm-256color", "COLUMNS": "120"},
            cwd=cli.directory,
            start_new_session=True,
        )
        cli.attached.append(self.process)
        os.close(inner)
        self.seen = ""

    def until(self, pattern: str, seconds: float = 60) -> None:
        """Read on until it has written this."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.seen):
            assert time.monotonic() < deadline, self.seen
            if select.select([self._fd], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):  # closed at the other end
                    self.seen += os.read(self._fd, 1 << 16).decode(errors="replace")

    def close(self) -> int:
        code = self.process.wait(30)
        os.close(self._fd)
        return code


def test_up_ends_with_a_line_that_says_how_it_is_and_logs_go_above_it(cli: Cli) -> None:
    terminal = Terminal(cli, "up", cli.write(GRAPH))
    terminal.until("2 processes ready.*Ctrl-C stops it")
    # Colours, and the processes' logs with their prefix.
    assert "\x1b[" in terminal.seen
    assert re.search(r"main/0 \| ", terminal.seen)
    assert cli("doctor", "demo", "--format", "json").code == 0
    # What a process logs later appears above the line.
    terminal.until(r"request req-\w+ ended: status 200")
    os.killpg(terminal.process.pid, signal.SIGINT)
    terminal.until("draining: running requests may end")
    assert terminal.close() == 0
    assert "Traceback" not in terminal.seen
