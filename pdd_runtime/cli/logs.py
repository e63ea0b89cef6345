"""`pdd-runtime logs`."""

from __future__ import annotations

import re
import time
from pathlib import Path

from rich.text import Text

from pdd_runtime.cli.console import Consoles, plain
from pdd_runtime.cli.find import find
from pdd_runtime.errors import LaunchError
from pdd_runtime.graph import nearest
from pdd_runtime.launch import GraphState
from pdd_runtime.launch.logs import LogReader

_POLL = 0.2
_STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red")


def logs(graph: str | None, pool: str | None, lines: int, follow: bool, consoles: Consoles) -> None:
    state = find(graph, running=False)
    readers: dict[str, LogReader] = {}
    try:
        while True:
            # A process that starts later gets its log later.
            for name, path in _chosen(state, pool).items():
                readers.setdefault(name, LogReader(path, lines))
            width = max(map(len, readers))
            for index, (name, reader) in enumerate(readers.items()):
                prefix = (f"{name:>{width}} | ", _STYLES[index % len(_STYLES)])
                for line in reader.read():
                    consoles.out.print(Text.assemble(prefix, plain(line)), soft_wrap=True)
            if not follow:
                return
            time.sleep(_POLL)
    except KeyboardInterrupt:
        return
    finally:
        for reader in readers.values():
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
        raise LaunchError(f"graph {state.name} has no logs", where=str(state.logs), fix="was it ever started?")
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
