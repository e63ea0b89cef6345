"""A server's process: started, listened to, ended with all its children."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from contextlib import suppress
from pathlib import Path

from pdd_runtime.errors import EngineError
from pdd_runtime.last_words import telling
from pdd_runtime.server import guardian
from pdd_runtime.server.launch import Launch

PATIENCE = 4.0
"""Seconds from SIGTERM to SIGKILL: a worker has five to close."""
_KILLED = 15.0
"""Seconds in which what was killed is gone. One that hangs in a driver is not: then its guardian waits for it."""
_LAST_WORDS = 1.0
"""Seconds that output may still come after the exit."""
_MAX_LINE = 16 << 10
_KEPT = 400
"""Lines in which an error's cause is looked for: the last of many processes to end says only that others did."""
_TOLD = 6
"""Lines that an error quotes."""


class ServerProcess:
    """One start of a server. What it writes goes to a logger of the engine's name, line by line."""

    def __init__(self, name: str, directory: Path) -> None:
        """`directory` is the server's own: it runs there. Made on a running loop."""
        self.name = name
        self.ended: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        """Resolves when the process is gone, whoever ended it, to an error that says how and what it said last. Wait
        for it with `asyncio.wait` or under `asyncio.shield`: cancelling it would cancel it for all."""
        self._directory = directory
        self._log = logging.getLogger(name)
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._rest = b""
        self._process: Process | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the guardian, whose only child the server is, while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The end of what the server said, the oldest first."""
        return tuple(self._lines)

    async def start(self, launch: Launch) -> None:
        """Once. Raises `EngineError` where it cannot be started."""
        try:
            await asyncio.to_thread(launch.write_files, self._directory)
            # By its file: `-m` would import this package, and what that needs. -I and -S: no path but the standard's.
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guardian.__file__, *launch.argv),
                stdin=PIPE,
                stdout=PIPE,
                stderr=STDOUT,
                cwd=self._directory,
                env=launch.environment(os.environ),
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError(
                f"the {self.name} server could not be started", where=str(self._directory), why=str(error)
            ) from error
        self._watching = asyncio.create_task(self._watch(self._process), name=f"pdd-{self.name}-process")

    async def stop(self, patience: float = PATIENCE) -> None:
        """SIGTERM, after `patience` seconds SIGKILL, each for the server and all its children. Returns when they are
        gone. Idempotent."""
        if self._process is None or self._watching is None:
            return
        process = self._process
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await asyncio.wait([self._watching], timeout=patience)
        self._hang_up(process)
        await asyncio.wait([self._watching], timeout=_KILLED)
        if not self._watching.done():
            self._log.error("some of the %s server does not die; process %s waits for it", self.name, process.pid)

    def kill(self) -> None:
        """End it at once, hung or not, with all its children. Idempotent."""
        if self.pid is not None and self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            self._hang_up(self._process)

    @staticmethod
    def _hang_up(process: Process) -> None:
        """Its guardian kills what is left."""
        if process.stdin is not None:
            process.stdin.close()

    async def _watch(self, process: Process) -> None:
        pump = asyncio.create_task(self._pump(process), name=f"pdd-{self.name}-log")
        code = await process.wait()
        # A child that is no descendant any more could still hold the pipe where there is no /proc.
        await asyncio.wait([pump], timeout=_LAST_WORDS)
        pump.cancel()
        await asyncio.wait([pump])
        self._take([self._rest] if self._rest else [])
        self._hang_up(process)
        if not self.ended.done():
            self.ended.set_result(self._error(code))

    async def _pump(self, process: Process) -> None:
        assert process.stdout is not None
        while data := await process.stdout.read(1 << 16):
            # A bar of progress is written over itself with \r.
            *lines, self._rest = (self._rest + data.replace(b"\r", b"\n")).split(b"\n")
            if len(self._rest) > _MAX_LINE:
                lines.append(self._rest)
                self._rest = b""
            self._take(lines)

    def _take(self, lines: list[bytes]) -> None:
        for line in lines:
            if text := line.decode(errors="replace").rstrip():
                self._lines.append(text)
                self._log.info("%s", text)

    def _error(self, code: int) -> EngineError:
        last = [line.strip() for line in list(self._lines)[-_TOLD:]]
        cause = telling(self._lines)
        said = [f"it said last: {' — '.join(last)}" if last else "it said nothing"]
        return EngineError(
            f"the {self.name} server ended: {_exit(code)}",
            why="; ".join(said if not cause or cause in last else [cause, *said]),
            fix="its whole log is the worker's: `pdd-runtime logs`; `pdd-runtime render engine` has its command line",
        )


def _exit(code: int) -> str:
    number = -code if code < 0 else code - 128
    try:
        return f"killed by {signal.Signals(number).name}" if code < 0 or code > 128 else f"exit code {code}"
    except ValueError:
        return f"exit code {code}"


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port
