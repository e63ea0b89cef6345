"""What `ps` and the live status show."""

from __future__ import annotations

from typing import Literal

import msgspec

from pdd_runtime.plugins.routing import Role

State = Literal["starting", "ready", "draining", "backoff", "stopped"]


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a graph. The first eight fields are what `ps --format json` prints."""

    pool: str
    index: int
    role: Role | Literal["frontend"]
    cluster: str
    pid: int | None
    """None: it does not run."""
    epoch: str
    """Of its last start; empty before the first."""
    state: State
    endpoint: str | None
    """None: it has not said yet."""
    restarts: int = 0
    note: str = ""
    """Why it is in back-off; else the last line that it logged."""
    seconds: float = 0.0
    """How long it has been in this state."""


class GraphStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A running graph."""

    name: str
    source: str
    """The YAML it came from."""
    pid: int
    """The launcher's."""
    url: str
    """Of the frontend; empty while it is not up, and where it is in another cluster's part."""
    admin: str = ""
    """At which the frontend answers operators, where that is another."""
    ready: bool
    """A whole route exists: requests are answered. Of a part without a frontend: all its processes are ready."""
    why_not_ready: str
    stopping: bool
    trouble: str = ""
    """Why processes of other clusters cannot be found at this moment, or logs cannot be written."""
    changing: str = ""
    """The step of a change that is being made; empty: none is."""
    failed: str = ""
    """Why the last change was not made whole; empty: it was."""
    processes: tuple[ProcessStatus, ...]

    @property
    def missing(self) -> str:
        """What a graph that is not ready still lacks, in words; empty where it lacks nothing."""
        if not self.processes:
            return "no process is there"
        starting = [
            f"{process.pool}/{process.index} is {process.state}" + (f" ({process.note})" if process.note else "")
            for process in self.processes
            if process.state != "ready"
        ]
        return "; ".join([*([self.trouble] if self.trouble else []), *starting]) or self.why_not_ready
