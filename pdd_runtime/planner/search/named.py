"""What a plan names: files beside it, presets, short texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pdd_runtime.errors import PddError
from pdd_runtime.graph.document import Document
from pdd_runtime.planner.plan_spec import PlanError

T = TypeVar("T")


def named(document: Document, key: str, name: str, read: Callable[[], T]) -> T:
    """What a plan names. Where there is nothing of that name, the plan is wrong."""
    try:
        return read()
    except PddError as error:
        if not isinstance(error.__context__, OSError):
            raise
        raise PlanError(
            f"the {key} {name} cannot be read",
            where=document.locate(("spec", key)),
            why=error.why or error.what,
            fix=error.fix or "name a file; paths are relative to the plan's",
        ) from error


def placed(directory: Path, name: str) -> str:
    """A file beside the plan, where there is one of that name; else the name, for presets and short texts."""
    there = directory / Path(name).expanduser()
    return str(there) if there.exists() else name
