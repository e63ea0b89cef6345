"""`pdd-runtime render engine`: how a pool's servers are started."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pdd_runtime.cli.console import Consoles
from pdd_runtime.errors import EngineError, GraphError
from pdd_runtime.graph import LoadedGraph, nearest
from pdd_runtime.plugins import PluginManager
from pdd_runtime.plugins.engine import Engine, ModelSpec
from pdd_runtime.server.launch import Launch

FIRST_PORT = 8001
"""Shown where `up` takes any free one; the next worker's is the next."""
HIDDEN = "***"
_SECRET = re.compile(r"(?:.*[-_])?(?:key|token|secret|password|passwd|credentials?)", re.IGNORECASE)
_END = "PDD_END"


@dataclass(frozen=True)
class Start:
    """Of one worker's server."""

    worker: str
    """POOL/INDEX."""
    engine: str
    launch: Launch
    env: dict[str, str]
    """All that is added to the environment."""
    directory: Path
    """Where it runs, and where its files are."""
    port: int
    socket: Path
    any_place: bool
    """Whether `up` would take another port, socket and directory at each start."""


def starts(loaded: LoadedGraph, plugins: PluginManager, pool: str) -> list[Start]:
    """By the very `launch` that a worker starts its server with. Raises `GraphError` where there is no such pool,
    `EngineError` where its engine is no server."""
    pools = loaded.graph.spec.pools
    if pool not in pools:
        raise GraphError(
            f'there is no pool "{pool}"',
            where=str(loaded.path),
            why=f"its pools are: {', '.join(pools)}",
            fix=nearest(pool, pools) or "name one of these",
        )
    reference = pools[pool].engine
    cls = plugins.engine(reference.plugin)
    config = plugins.configure(cls, reference.config, f"spec.pools.{pool}.engine.config")
    engine = cls(config, ModelSpec(**loaded.graph.model_of(pool).model_dump()))
    engine.role = pools[pool].role
    return [_start(loaded, pool, index, engine) for index in range(pools[pool].replicas)]


def print_starts(found: Sequence[Start], as_json: bool, consoles: Consoles) -> None:
    if as_json:
        consoles.json([_to_json(start) for start in found])
        return
    for start in found:
        consoles.out.out("\n".join(_script(start)), highlight=False)


def _start(loaded: LoadedGraph, pool: str, index: int, engine: Engine) -> Start:
    try:
        from pdd_runtime.server.engine import ServerEngine
    except ImportError:  # then no installed engine is one
        ServerEngine = None  # type: ignore[assignment, misc]  # noqa: N806
    if ServerEngine is None or not isinstance(engine, ServerEngine):
        raise EngineError(
            f'the engine of pool "{pool}" is no server',
            where=loaded.locate(("spec", "pools", pool, "engine")),
            why=f"{engine.name} computes in the worker's process: there is nothing to start beside it",
            fix="`pdd-runtime up --dry-run` says what is started",
        )
    config = engine.config
    directory = Path(tempfile.gettempdir()) / f"pdd-{loaded.graph.name}-{pool}-{index}"
    socket = config.socket or directory / "agent"
    port = config.port or (urlsplit(config.url).port if config.url else None) or FIRST_PORT + index
    launch = engine.launch(_model(engine.model.source), port, str(socket))
    return Start(
        worker=f"{pool}/{index}",
        engine=engine.name,
        launch=launch,
        env={**loaded.graph.spec.pools[pool].env, "PYTHONUNBUFFERED": "1", **launch.env},
        directory=directory / "server",
        port=port,
        socket=socket,
        any_place=config.url is None,
    )


def _model(source: str) -> Path:
    """The model's directory as the worker's host has it: it need not be on this one."""
    return Path(source).expanduser().resolve()


def _to_json(start: Start) -> dict[str, Any]:
    return {
        "worker": start.worker,
        "engine": start.engine,
        "argv": _shown_arguments(start.launch.argv),
        "env": _shown_env(start.env),
        "path": start.launch.programs,
        "files": dict(start.launch.files),
        "directory": str(start.directory),
        "port": start.port,
        "socket": str(start.socket),
    }


def _script(start: Start) -> Iterator[str]:
    yield f"# {start.worker}: engine {start.engine}"
    if start.any_place:
        yield f"# At each start `up` takes any free port instead of {start.port}, and a new directory."
    yield f"mkdir -p -m 700 {shlex.quote(str(start.directory))} && cd {shlex.quote(str(start.directory))} || exit"
    for name, text in start.launch.files.items():
        if (parent := str(Path(name).parent)) != ".":
            yield f"mkdir -p {shlex.quote(parent)}"
        yield f"cat > {shlex.quote(name)} <<'{_END}'"
        yield text.removesuffix("\n")
        yield _END
    if start.launch.programs is not None:
        yield f'export PATH={shlex.quote(start.launch.programs)}:"$PATH"'
    for name, value in _shown_env(start.env).items():
        yield f"export {name}={shlex.quote(value)}"
    yield " \\\n  ".join(_lines(_shown_arguments(start.launch.argv)))
    yield ""


def _lines(arguments: Sequence[str]) -> Iterator[str]:
    """A flag and its values a line."""
    line: list[str] = []
    for argument in arguments:
        if argument.startswith("--") and line:
            yield shlex.join(line)
            line = []
        line.append(argument)
    yield shlex.join(line)


def _shown_env(env: dict[str, str]) -> dict[str, str]:
    return {name: HIDDEN if _SECRET.fullmatch(name) else value for name, value in env.items()}


def _shown_arguments(argv: Sequence[str]) -> list[str]:
    """Without the values of flags that are secrets by their names."""
    shown: list[str] = []
    hide = False
    for argument in argv:
        flag, is_set, _ = argument.partition("=")
        secret = flag.startswith("--") and _SECRET.fullmatch(flag[2:]) is not None
        if hide and not argument.startswith("--"):
            shown.append(HIDDEN)
        else:
            shown.append(f"{flag}={HIDDEN}" if secret and is_set else argument)
        hide = secret and not is_set
    return shown
