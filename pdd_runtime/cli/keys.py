"""`pdd-runtime keys`: the file of API keys."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from pdd_runtime.cli.console import Consoles
from pdd_runtime.errors import LaunchError
from pdd_runtime.frontend.keys import Key, digest, new_key, parse, read

_MAY = ("requests", "requests_per_minute", "tokens_per_minute", "max_tokens", "priority", "share")


def add(file: Path, name: str, limits: Mapping[str, Any], as_json: bool) -> None:
    """Raises `GraphError` and `LaunchError`."""
    clear, consoles = new_key(), Consoles()
    try:
        key = msgspec.convert({"name": name, "sha256": digest(clear.encode()), **limits}, Key)
    except msgspec.ValidationError as error:
        raise LaunchError(
            "this is no name for a key", where=name, why=str(error), fix="letters, digits, and .-_ between them"
        ) from None
    _write(file, [*_known(file), key])
    if as_json:
        consoles.json({"name": name, "key": clear, "file": str(file)})
        return
    consoles.out.print(clear, markup=False, soft_wrap=True, highlight=False)
    consoles.err.print(
        f"That is the key of {name}; it is shown this once, {file} has only its hash.", markup=False, soft_wrap=True
    )


def show(file: Path, as_json: bool) -> None:
    """Raises `GraphError`."""
    keys, consoles = parse(read(str(file)), str(file)), Consoles()
    if as_json:
        consoles.json([{"name": key.name, "admin": key.admin} | _may(key) for key in keys])
        return
    table = Table("NAME", "FOR", "MAY", "SHA-256", box=None, pad_edge=False)
    for key in keys:
        may = ", ".join(f"{what.replace('_', ' ')} {value}" for what, value in _may(key).items())
        table.add_row(key.name, "operators" if key.admin else "the API", may or "anything", f"{key.sha256[:12]}…")
    consoles.out.print(table)


def remove(file: Path, name: str, as_json: bool) -> None:
    """Raises `GraphError` and `LaunchError`."""
    keys, consoles = parse(read(str(file)), str(file)), Consoles()
    left = [key for key in keys if key.name != name]
    if len(left) == len(keys):
        names = ", ".join(dict.fromkeys(key.name for key in keys)) or "none"
        raise LaunchError(f"there is no key of {name}", where=str(file), why=f"the names are: {names}")
    _write(file, left)
    if as_json:
        consoles.json({"name": name, "removed": len(keys) - len(left)})
    else:
        consoles.out.print(f"removed: {len(keys) - len(left)} of {name}", markup=False)


def _may(key: Key) -> dict[str, Any]:
    return {what: value for what in _MAY if (value := getattr(key, what)) is not None}


def _known(file: Path) -> list[Key]:
    return parse(read(str(file)), str(file)) if file.exists() else []


def _write(file: Path, keys: Sequence[Key]) -> None:
    """Whole or not at all: a frontend may read it at any moment. For the user alone."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(msgspec.json.Encoder().encode_lines(keys))
        fresh.replace(file)
    except OSError as error:
        raise LaunchError(
            "the file of API keys cannot be written", where=str(file), why=error.strerror or str(error)
        ) from error
