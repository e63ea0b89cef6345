"""A report goes to stdout or to a file, in the form that was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console, RenderableType

from pdd_runtime.cli.console import Consoles
from pdd_runtime.errors import PddError

_WIDTH = 200
"""Columns of a table in a file."""


class Told(NamedTuple):
    """A report in each form; only the one that is asked for is made."""

    table: Callable[[], RenderableType]
    html: Callable[[], str]
    data: Callable[[], dict[str, Any]]


def prepare(out: Path | None) -> None:
    """Raises `PddError` where nothing can be written: before the measurement, not behind it."""
    if out is not None:
        _write(out, "")


def deliver(told: Told, form: Literal["table", "json", "html"], out: Path | None, consoles: Consoles) -> None:
    """Print it, or write it to `out`. Raises `PddError`."""
    if form == "table" and out is None:
        consoles.out.print(told.table())
        return
    if form == "table":
        assert out is not None
        with out.open("w", encoding="utf-8") as file:
            Console(file=file, width=_WIDTH, no_color=True).print(told.table())
    else:
        text = told.html() if form == "html" else json.dumps(told.data(), indent=2)
        if out is None:
            consoles.out.out(text, highlight=False)
            return
        _write(out, text + "\n")
    consoles.err.print(f"written to {out}", markup=False)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PddError("the report cannot be written", where=str(path), why=error.strerror or str(error)) from error
