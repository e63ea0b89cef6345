"""Secrets: a graph names them, as `${NAME}` of the environment or `${file:/PATH}`, and never has them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pdd_runtime.errors import GraphError
from pdd_runtime.graph.document import Route
from pdd_runtime.graph.scene import Scene
from pdd_runtime.hiding import HIDDEN

LONGEST = 64 << 10
_REFER = "write ${NAME} for a variable of the environment, or ${file:/PATH} for what a file has"
_REFERENCE = re.compile(r"\$(?P<escaped>\$(?=\{))|\$\{(?:file:(?P<file>[^{}]*)|(?P<name>[^{}]*))\}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SECRET = re.compile(r"(?:.*[-_])?(?:key|token|secret|password|passwd|credentials?)", re.IGNORECASE)
_SAID = re.compile(
    r"""(?:^|(?<=[\s{\[,"']))(?P<name>[\w-]+)["']?\s*(?:[:=]\s*|,\s*)(?P<value>"[^"]*"|'[^']*'|[^\s,{}\[\]][^,}\]]*)"""
)
"""`NAME: VALUE`, `--NAME=VALUE` or `--NAME, VALUE`."""
_COLUMN = re.compile(r"(?<=\d):\d+$")
_IN_URL = re.compile(r"(://[^/@\s:]*:)[^/@\s$]+@")


def is_secret(name: str) -> bool:
    """Whether the value of a variable or of a flag of that name is a secret."""
    return _SECRET.fullmatch(name) is not None


def refers(text: str) -> bool:
    """Whether it names a secret instead of being one."""
    return any(match["escaped"] is None for match in _REFERENCE.finditer(text))


def shown(name: str, value: object) -> object:
    """`value`, or `HIDDEN` where it is a secret by its name, and stands there itself."""
    secret = is_secret(name) and not (isinstance(value, str) and (refers(value) or not value))
    return HIDDEN if secret else value


def redacted(value: Any, name: str = "") -> Any:
    """The same to be shown, without values that are secrets by their names, or by the URL they stand in."""
    if isinstance(value, Mapping):
        return {key: redacted(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(item, name) for item in value]
    if isinstance(value, str):
        value = _IN_URL.sub(rf"\g<1>{HIDDEN}@", value)
    return shown(name, value)


def in_line(line: str) -> str:
    """A line of a graph's file to be shown: as long as it is, with stars for what is a secret by its name."""

    def stars(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        secret = is_secret(name.removeprefix("--")) and not refers(value)
        return match[0][: -len(value)] + ("*" * len(value) if secret else value)

    return _IN_URL.sub(lambda match: match[1] + "*" * (len(match[0]) - len(match[1]) - 1) + "@", _SAID.sub(stars, line))


def written_out(what: str, where: str) -> GraphError:
    """`where` as it is located: its line is told, and not shown with its column."""
    return GraphError(
        f"{what} stands in the graph itself",
        where=_COLUMN.sub("", where),
        why="files of graphs are shared, kept and shown; a secret is only where it is needed",
        fix=_REFER,
    )


def revealed(value: Any, where: str, environment: Mapping[str, str] = os.environ) -> Any:
    """The same with every reference replaced by what it stands for. `$${` is a plain `${`. Raises `GraphError`, which
    tells the reference and no value."""
    if isinstance(value, Mapping):
        return {key: revealed(item, f"{where}.{key}", environment) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(revealed(item, f"{where}.{index}", environment) for index, item in enumerate(value))
    if isinstance(value, str) and "${" in value:
        return _REFERENCE.sub(lambda match: _stands_for(match, where, environment), value)
    return value


def values(value: Any, environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """What the references in it stand for, of those that can be found here: to be hidden in what processes write."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from values(item, environment)
    elif isinstance(value, str) and "${" in value:
        for match in _REFERENCE.finditer(value):
            try:
                if match["escaped"] is None:
                    yield _stands_for(match, "", environment)
            except GraphError:
                continue


def check_secrets(scene: Scene) -> Iterator[GraphError]:
    """A value that is a secret by its name or its place, and stands in the file itself."""
    for name, pool in scene.spec.pools.items():
        route: Route = ("spec", "pools", name)
        yield from _in_environment(scene, (*route, "env"), pool.env)
        config: Route = (*route, "engine", "config")
        environment, arguments = pool.engine.config.get("env"), pool.engine.config.get("args")
        yield from _in_environment(scene, (*config, "env"), environment)
        yield from _in_arguments(scene, (*config, "args"), arguments)
    yield from _in_urls(scene, (), scene.document.data)


def _in_environment(scene: Scene, route: Route, environment: object) -> Iterator[GraphError]:
    for name, value in environment.items() if isinstance(environment, Mapping) else ():
        if _is_written_out(str(name), value):
            yield _written_out(scene, (*route, str(name)), str(name))


def _in_arguments(scene: Scene, route: Route, arguments: object) -> Iterator[GraphError]:
    before = ""
    for index, argument in enumerate(arguments if isinstance(arguments, (list, tuple)) else ()):
        flag, is_set, value = str(argument).partition("=")
        name = flag.removeprefix("--") if flag.startswith("--") else ""
        if is_set and name and _is_written_out(name, value):
            yield _written_out(scene, (*route, index), f"--{name}")
        elif before and not name and _is_written_out(before, argument):
            yield _written_out(scene, (*route, index), f"--{before}")
        before = "" if is_set else name


def _in_urls(scene: Scene, route: Route, value: object) -> Iterator[GraphError]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _in_urls(scene, (*route, str(key)), item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _in_urls(scene, (*route, index), item)
    elif isinstance(value, str) and _IN_URL.search(value):
        yield _written_out(scene, route, "the password of a URL")


def _is_written_out(name: str, value: object) -> bool:
    return is_secret(name) and isinstance(value, str) and bool(value) and not value.isdecimal() and not refers(value)


def _written_out(scene: Scene, route: Route, what: str) -> GraphError:
    return written_out(what, scene.document.locate(route))


def _stands_for(match: re.Match[str], where: str, environment: Mapping[str, str]) -> str:
    if match["escaped"] is not None:
        return "$"
    if match["file"] is not None:
        return _of_file(match["file"], where)
    name = match["name"]
    if not _VARIABLE.fullmatch(name):
        raise GraphError(f"${{{name}}} names no variable", where=where, fix=f"{_REFER}; a plain ${{ is written $${{")
    if name not in environment:
        raise GraphError(
            f"the environment has no {name}",
            where=where,
            why=f"the graph has ${{{name}}} there",
            fix=f"export {name} where `pdd-runtime up` is run",
        )
    return environment[name]


def _of_file(name: str, where: str) -> str:
    path = Path(name).expanduser()
    try:
        if not path.is_absolute():
            raise ValueError("it is no whole path")
        with path.open("rb") as file:
            raw = file.read(LONGEST + 1)
        if len(raw) > LONGEST:
            raise ValueError(f"it has more than {LONGEST} bytes")
        return raw.decode().strip()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or (
            "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        )
        raise GraphError(f"the secret in {name} cannot be read", where=where, why=why, fix=_REFER) from None
