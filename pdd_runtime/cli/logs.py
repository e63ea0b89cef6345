"""`pdd-runtime logs`."""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from pdd_runtime.cli.console import Consoles, plain
from pdd_runtime.cli.find import find
from pdd_runtime.cli.log_lines import Lines, LogLine, OfRequest
from pdd_runtime.errors import LaunchError
from pdd_runtime.graph import nearest
from pdd_runtime.launch import GraphState
from pdd_runtime.launch.logs import LogReader

_POLL = 0.2
_STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red")


@dataclass(frozen=True)
class LogOptions:
    """Which lines, and how they are printed."""

    pool: str | None
    lines: int
    """Of each process, to begin with; with a request, all that is left of it."""
    follow: bool
    request: str | None
    as_json: bool


def logs(graph: str | None, options: LogOptions, consoles: Consoles) -> None:
    state = find(graph, running=False)
    shown = _Shown(state, options, consoles)
    try:
        while True:
            shown.more()
            if not options.follow:
                break
            time.sleep(_POLL)
    except KeyboardInterrupt:
        return
    finally:
        shown.close()
    if options.request and not shown.count:
        raise LaunchError(
            f"no process of graph {state.name} has logged {options.request}",
            why="the id is wrong, it was another graph's, or its lines are gone: a log keeps its last 8 to 16 MiB",
            fix="the id is in the response header x-pdd-request-id; `--graph` names the graph",
        )


class _Shown:
    """What has been read and printed so far."""

    def __init__(self, state: GraphState, options: LogOptions, consoles: Consoles) -> None:
        self.count = 0
        self._state, self._options, self._consoles = state, options, consoles
        self._wanted = OfRequest(options.request) if options.request else lambda line: True
        self._readers: dict[str, tuple[LogReader, Lines]] = {}

    def more(self) -> None:
        """Print what has come since the last time, in order of time."""
        found: list[LogLine] = []
        # A process that starts later gets its log later.
        for name, path in _chosen(self._state, self._options.pool).items():
            if name not in self._readers:
                lines = Lines(name)
                if self._options.request:
                    found += lines.take(_put_aside(path))
                length = sys.maxsize if self._options.request else self._options.lines
                self._readers[name] = LogReader(path, length), lines
            reader, lines = self._readers[name]
            found += lines.take(reader.read())
        for line in sorted(found, key=lambda line: line.time):
            if self._wanted(line):
                self.count += 1
                self._print(line)

    def close(self) -> None:
        for reader, _ in self._readers.values():
            reader.close()

    def _print(self, line: LogLine) -> None:
        out = self._consoles.out
        if self._options.as_json:
            out.out(json.dumps(line.json(), ensure_ascii=False), highlight=False)
            return
        names = list(self._readers)
        style = _STYLES[names.index(line.process) % len(_STYLES)]
        prefix = f"{line.process:>{max(map(len, names))}} | "
        out.print(Text.assemble((prefix, style), plain(line.text)), soft_wrap=True)


def _put_aside(path: Path) -> list[str]:
    """The lines of the log before this one."""
    reader = LogReader(path.with_name(f"{path.name}.1"), sys.maxsize)
    try:
        return list(reader.read())
    finally:
        reader.close()


def _chosen(state: GraphState, pool: str | None) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(state.logs.glob("*.log")):
        match = re.fullmatch(r"(.+)-(\d+)", path.stem)
        if match:
            found[f"{match[1]}/{match[2]}"] = path
    if state.launcher_log.exists():
        found["launcher"] = state.launcher_log
    if not found:
        names = [known.name for known in GraphState.all(stopped=True)]
        raise LaunchError(
            f"graph {state.name} has no logs",
            where=str(state.logs),
            fix=nearest(state.name, names) or "was it ever started?",
        )
    if pool is None:
        return found
    chosen = {name: path for name, path in found.items() if pool in (name, name.partition("/")[0])}
    if not chosen:
        names = sorted({name.partition("/")[0] for name in found})
        raise LaunchError(
            f'graph {state.name} has no log of "{pool}"',
            why=f"the logs are of: {', '.join(names)}",
            fix=nearest(pool, names),
        )
    return chosen
