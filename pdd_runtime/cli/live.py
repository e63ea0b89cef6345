"""The status of a graph that is starting or stopping, as it changes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from pdd_runtime.cli.console import plain
from pdd_runtime.cli.picture import ROLE_STYLE
from pdd_runtime.clock import now
from pdd_runtime.launch import GraphStatus, ProcessStatus

STATE_STYLE = {"starting": "yellow", "ready": "green", "draining": "yellow", "backoff": "bold red", "stopped": "dim"}

_TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d+ ")
"""What log lines begin with."""


def all_ready(status: GraphStatus) -> bool:
    """Requests are answered, and no process is still missing."""
    return status.ready and all(process.state == "ready" for process in status.processes)


class LiveStatus:
    """On a terminal a table that is drawn anew below what is printed, one line while all is well; elsewhere a line for
    each change of a process's state."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: GraphStatus | None = None
        self._at = now()
        self._spinner = Spinner("dots", style="yellow")
        self._trouble = ""
        self._told: dict[tuple[str, int, str], str] = {}
        self._live = Live(self, console=console, refresh_per_second=8, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    async def until_ready(self, statuses: AsyncIterator[GraphStatus]) -> GraphStatus | None:
        """Show until the graph is ready; returns that status, or None when it is stopped before."""
        async for status in statuses:
            self.show(status)
            if status.stopping:
                return None
            if all_ready(status):
                return status
        return None

    def show(self, status: GraphStatus) -> None:
        self._status, self._at = status, now()
        if self._live is None:
            self._tell_trouble(status.trouble)
            for process in status.processes:
                self._tell(process)

    def _line(self, status: GraphStatus) -> Text:
        """All is well."""
        restarts = sum(process.restarts for process in status.processes)
        return Text.assemble(
            ("✓ ", STATE_STYLE["ready"]),
            (status.name, "bold"),
            (f"  {len(status.processes)} processes ready", STATE_STYLE["ready"]),
            (f", {restarts} restarts" if restarts else "", "yellow"),
            f"  {status.url}",
            ("  Ctrl-C stops it", "dim"),
            no_wrap=True,
            overflow="ellipsis",
        )

    def _tell_trouble(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            self._console.out(plain(trouble) or "all processes can find each other again", highlight=False)

    def _tell(self, process: ProcessStatus) -> None:
        # A place has two processes while one replaces the other.
        key = (process.pool, process.index, process.epoch)
        if self._told.get(key) == process.state or (process.state == "starting" and not process.pid):
            return
        news = key in self._told or process.state != "ready"
        self._told[key] = process.state
        if news:
            note = f": {plain(process.note)}" if process.state == "backoff" else ""
            pid = f" (pid {process.pid})" if process.pid and process.state == "starting" else ""
            self._console.out(f"{process.pool}/{process.index} {process.state}{pid}{note}", highlight=False)

    def __rich__(self) -> RenderableType:
        if self._status is None:
            return self._spinner
        trouble = Text(plain(self._status.trouble), "yellow", no_wrap=True, overflow="ellipsis")
        if all_ready(self._status) and not self._status.stopping:
            return Group(trouble, self._line(self._status)) if trouble else self._line(self._status)
        table = Table.grid(padding=(0, 2))
        for process in self._status.processes:
            seconds = process.seconds + now() - self._at
            busy = process.state in ("starting", "draining", "backoff")
            table.add_row(
                self._spinner if busy else Text("✓" if process.state == "ready" else "·", STATE_STYLE[process.state]),
                Text(f"{process.pool}/{process.index}", ROLE_STYLE[process.role]),
                Text(process.cluster, "dim"),
                Text(process.state, STATE_STYLE[process.state]),
                Text(f"{seconds:.0f} s" if busy else "", "dim"),
                Text(_TIME.sub("", plain(process.note)) if busy else "", "dim", no_wrap=True, overflow="ellipsis"),
            )
        return Group(trouble, table) if trouble else Group(table)
