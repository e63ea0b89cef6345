"""One supervised process: started, logged, restarted with back-off, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from pdd_runtime.clock import now
from pdd_runtime.errors import LaunchError
from pdd_runtime.ids import new_id
from pdd_runtime.last_words import telling
from pdd_runtime.launch.forms import Form
from pdd_runtime.launch.identity import birth
from pdd_runtime.launch.logs import LogFile
from pdd_runtime.launch.slot import Slot
from pdd_runtime.launch.state import Recorded
from pdd_runtime.launch.status import ProcessStatus, State
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.plugins.routing import Role, WorkerKey

START_FAILED = 3
"""The exit code by which a process says that it cannot start as the graph has it."""
FIRST_DELAY, LONGEST_DELAY = 0.5, 30.0
"""Seconds from a death to the next start: doubled each time, and short again after it was up for the longest."""
LAST_WORDS = 1.0
"""Seconds that output may still come after the exit, from a process of its own that holds the pipe."""


@dataclass(frozen=True)
class ChildSpec:
    """What to run."""

    pool: str
    index: int
    role: Role | Literal["frontend"]
    cluster: str
    command: tuple[str, ...]
    """Without `--epoch`, which each start adds."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """What is not to be seen in its log."""
    form: Form = field(default_factory=dict, repr=False)
    """What the process is made from."""
    listener: Callable[[], int] | None = field(default=None, repr=False, compare=False)
    """Gives the descriptor of the socket on which it is to listen."""

    @property
    def slot(self) -> Slot:
        return Slot(self.pool, self.index)

    def __str__(self) -> str:
        return f"{self.pool}/{self.index}"


class Child:
    """Runs its process until `stop`. Callbacks: `on_change()` after each change of state, `on_line(spec, line)` for
    what it writes, and `on_exit(key)`, awaited before anything else is done about a death."""

    def __init__(
        self,
        spec: ChildSpec,
        log: LogFile,
        *,
        on_change: Callable[[], None],
        on_line: Callable[[ChildSpec, str], None],
        on_exit: Callable[[WorkerKey], Awaitable[None]],
        replaces: bool = False,
        late: bool = False,
    ) -> None:
        """`replaces`: another process has its place, and keeps it until this one is ready. `late`: the others run, and
        are not to end where it cannot start."""
        self.spec, self.log, self.replaces, self._late = spec, log, replaces, late
        """`spec` holds from the next start on, where it is set anew."""
        self.form: Form = spec.form
        """Of the process that runs, or ran last."""
        self.epoch = ""
        self.recorded: Recorded | None = None
        """The process, while it runs."""
        self.restarts = 0
        self.reason = ""
        """Why it ended last."""
        self._on_change, self._on_line, self._on_exit = on_change, on_line, on_exit
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self._killed = False
        self._delay = FIRST_DELAY
        self._state: State = "starting"
        self._since = now()

    async def supervise(self) -> None:
        """Returns after `stop`, when the process has ended. Raises `LaunchError` when its very first start says
        that it can never work, unless it is late. Cancelling it kills the process."""
        try:
            while not self._stopping.is_set():
                begun = now()
                code = await self._run()
                if self._stopping.is_set():
                    break
                if code == START_FAILED and self.restarts == 0 and not self._late:
                    raise LaunchError(f"{self.spec} cannot start", why=self._said(), fix=f"its log is {self.log.path}")
                if now() - begun >= LONGEST_DELAY:
                    self._delay = FIRST_DELAY
                await self._back_off()
        finally:
            self._become("stopped")
            self.log.close()

    @property
    def stopping(self) -> bool:
        """It is to end, and not to come back."""
        return self._stopping.is_set()

    @property
    def ended(self) -> bool:
        """It has ended for good."""
        return self._state == "stopped"

    def stop(self, patience: float | None = None) -> None:
        """Ask it to end, and do not restart it. `patience`: seconds for what it has begun; None: its own."""
        self._stopping.set()
        if self._process is None:
            return
        self._become("draining")
        if patience is None:
            self._signal(signal.SIGTERM)
            return
        # Its stdin takes orders: a signal could not say how long.
        assert self._process.stdin is not None
        self._process.stdin.write(f"drain {patience:g}\n".encode())

    def kill(self) -> None:
        """End it at once."""
        self._killed = True
        self._stopping.set()
        self._signal(signal.SIGKILL)

    def status(self, member: Member | None) -> ProcessStatus:
        """`member`: how the process of this epoch presents itself to the others, if it does."""
        state = self._state
        if state == "starting" and member is not None:
            state = member.state
        return ProcessStatus(
            pool=self.spec.pool,
            index=self.spec.index,
            role=self.spec.role,
            cluster=self.spec.cluster,
            pid=self.recorded.pid if self.recorded else None,
            epoch=self.epoch,
            state=state,
            endpoint=member.endpoint if member else None,
            restarts=self.restarts,
            note=self.reason if state == "backoff" else next(reversed(self.log.tail), ""),
            seconds=now() - self._since,
        )

    async def _run(self) -> int | None:
        """One process, from start to end. Returns its exit code, None where it could not be started."""
        self.epoch, self.form = new_id("epoch"), self.spec.form
        self.log.tail.clear()
        key = WorkerKey(self.spec.pool, self.spec.index, self.epoch)
        self._become("starting")
        given = () if self.spec.listener is None else (self.spec.listener(),)
        try:
            # Its stdin stays open as long as this process lives: its end tells it to stop. A session of its own
            # keeps the terminal's Ctrl-C away from it, so that the launcher decides who stops when.
            process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                "--epoch",
                self.epoch,
                *(("--replaces",) if self.replaces else ()),
                *(option for descriptor in given for option in ("--fd", str(descriptor))),
                stdin=PIPE,
                stdout=PIPE,
                stderr=STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.spec.env},
                start_new_session=True,
                pass_fds=given,
            )
        except OSError as error:
            self.reason = f"it could not be started: {error.strerror}"
            return None
        self._process = process
        pump = asyncio.create_task(self._pump(process), name=f"log of {self.spec}")
        try:
            self.recorded = Recorded(self.spec.pool, self.spec.index, process.pid, birth(process.pid))
            self._on_change()
            if self._stopping.is_set():
                self._signal(signal.SIGKILL if self._killed else signal.SIGTERM)
                self._become("draining")
            code = await process.wait()
            await self._on_exit(key)
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS):
                    await asyncio.shield(pump)
        finally:
            if process.returncode is None:
                self._signal(signal.SIGKILL)
                await process.wait()
            pump.cancel()
            await asyncio.wait([pump])
            self._process, self.recorded = None, None
        for line in self.log.flush():
            self._on_line(self.spec, line)
        self.reason = f"{_exit(code)}: {self._said()}" if self.log.tail else _exit(code)
        return code

    async def _pump(self, process: Process) -> None:
        assert process.stdout is not None
        while data := await process.stdout.read(1 << 16):
            for line in self.log.feed(data):
                self._on_line(self.spec, line)
            # What it says while it starts is its progress.
            self._on_change()

    async def _back_off(self) -> None:
        self.restarts += 1
        self._become("backoff")
        note = f"{self.spec} ended ({self.reason}); it starts again in {self._delay:g} s"
        self.log.write(f"launcher: {note}")
        self._on_line(self.spec, f"launcher: {note}")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._delay):
                await self._stopping.wait()
        self._delay = min(self._delay * 2, LONGEST_DELAY)

    def _become(self, state: State) -> None:
        self._state, self._since = state, now()
        self._on_change()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _said(self) -> str:
        """What of its log says why it ended."""
        return telling(self.log.tail) or "it said nothing"


def _exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
