"""Published figures of chips and models: packaged tables, and how one is found by its name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict

from pdd_runtime.errors import PddError
from pdd_runtime.graph import nearest


class FigureError(PddError):
    """What is asked for is not known, or does not fit."""

    code = "figure"


class Figures(BaseModel):
    """One entry of such a table. `like` begins with another entry of the same table, and changes it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    source: str = ""
    """Where the figures are from."""


Entry = TypeVar("Entry", bound=Figures)


def find(form: type[Entry], file: str, noun: str, name: str, own: Mapping[str, Entry] | None = None) -> Entry:
    """The entry `name` of `own`, else of the packaged table. Raises `FigureError`."""
    known: dict[str, Entry] = {**packaged(form, file), **(own or {})}
    if name not in known:
        close = nearest(name, sorted(known))
        raise FigureError(
            f'no figures of a {noun} called "{name}" are known',
            why=f"those that are: {', '.join(sorted(known))}",
            fix=close or f"give the {noun}'s own figures",
        )
    return known[name]


def merged(value: Any, file: str) -> Any:
    """An entry as written: with `like`, what the packaged entry of that name has and this one does not say."""
    if not isinstance(value, Mapping) or "like" not in value:
        return value
    table = _raw(file)
    name = str(value["like"])
    if name not in table:
        fix = nearest(name, sorted(table)) or f"those that are: {', '.join(sorted(table))}"
        raise ValueError(f'there is none called "{name}" to be like: {fix}')
    return {
        **merged(table[name], file),
        "source": f"like {name}",
        **{key: said for key, said in value.items() if key != "like"},
    }


@cache
def packaged(form: type[Entry], file: str) -> dict[str, Entry]:
    """The packaged table `file`."""
    return {name: form.model_validate(entry) for name, entry in _raw(file).items()}


@cache
def _raw(file: str) -> dict[str, Any]:
    table: dict[str, Any] = yaml.safe_load((Path(__file__).parent / file).read_text())
    return table
