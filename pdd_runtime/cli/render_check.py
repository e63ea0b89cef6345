"""`pdd-runtime render engine --check`: whether the installed server knows the flags that it would be given."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from pdd_runtime.cli.console import FAILED, OK, Consoles
from pdd_runtime.cli.render_engine import Start
from pdd_runtime.errors import EngineError
from pdd_runtime.graph import nearest

PATIENCE = 300.0
"""Seconds: an engine may import all it has before it prints its help."""
_FLAG = re.compile(r"(?<![\w-])--[A-Za-z][\w.-]*")
_ALL = "--help=all"
"""How a server whose help is in parts prints all of it."""


def check_flags(start: Start, as_json: bool, consoles: Consoles) -> int:
    """Prints what it finds and returns the exit code. Raises `EngineError` where the server prints no help."""
    with consoles.busy("asking the server for its help"):
        known = _known(start)
    given = list(dict.fromkeys(_flags(start.launch.argv)))
    unknown = [flag for flag in given if flag not in known]
    if as_json:
        consoles.json({"engine": start.engine, "right": not unknown, "flags": given, "unknown": unknown})
        return FAILED if unknown else OK
    for flag in unknown:
        consoles.error(
            EngineError(
                f"the installed {start.engine} server has no flag {flag}",
                where=start.worker,
                why="its --help does not name it",
                fix=nearest(flag, known) or "install a version that the plugin was tried with, or take it out of args",
            )
        )
    if not unknown:
        consoles.out.print(f"The installed {start.engine} server knows all {len(given)} flags.", style="green")
    return FAILED if unknown else OK


def _known(start: Start) -> list[str]:
    """Every flag that its help names."""
    command = _command(start.launch.argv)
    with tempfile.TemporaryDirectory(prefix="pdd-") as name:
        start.launch.write_files(Path(name))
        help = _ask([*command, "--help"], start, name)
        if _ALL in help:
            help = _ask([*command, _ALL], start, name)
    return sorted(set(_FLAG.findall(help)))


def _ask(command: Sequence[str], start: Start, directory: str) -> str:
    env = {**start.launch.environment({**os.environ, **start.env}), "COLUMNS": "500"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=directory, env=env
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        why = error.strerror if isinstance(error, OSError) else f"nothing came within {PATIENCE:g} s"
        raise _no_help(command, why or str(error)) from error
    if done.returncode or not _FLAG.search(done.stdout):
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise _no_help(command, said[-1].strip() if said else f"exit code {done.returncode}")
    return done.stdout


def _no_help(command: Sequence[str], why: str) -> EngineError:
    return EngineError(
        "the server prints no help",
        where=" ".join(command),
        why=why,
        fix="set `python` in the pool's config to the interpreter of the environment where the server is installed",
    )


def _command(argv: Sequence[str]) -> list[str]:
    """What stands before the first flag."""
    first = next((index for index, argument in enumerate(argv) if argument.startswith("--")), len(argv))
    return list(argv[:first])


def _flags(argv: Sequence[str]) -> Iterator[str]:
    """Of `--config.level=3`, which sets a part of what `--config` takes, the flag."""
    for argument in argv:
        if found := _FLAG.match(argument):
            yield found[0].partition(".")[0]
