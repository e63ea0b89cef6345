"""What a running launcher is asked for, and what it tells of it."""

from __future__ import annotations

from typing import Any

import msgspec

from pdd_runtime.launch.difference import Change

PATIENCE = 60.0
"""Seconds that a process which is replaced or removed has for what it has begun."""
START = 600.0
"""Seconds that a process has to become ready: big models load slowly."""


class Down(msgspec.Struct, frozen=True):
    """Stop the graph."""

    patience: float
    """Seconds that running requests get."""


class Manner(msgspec.Struct, frozen=True, kw_only=True):
    """How processes of a running graph are replaced."""

    patience: float = PATIENCE
    start: float = START
    surge: bool | None = None
    """Start each replacement beside the old process, which is drained when it is ready, or drain the old one first.
    None: beside it where it is the only one of its pool, so that the pool is never without."""


class Wanted(msgspec.Struct, frozen=True):
    """The graph as it should be."""

    graph: dict[str, Any]
    source: str
    """Names its YAML to people."""


class Plan(msgspec.Struct, frozen=True):
    """What that takes."""

    changes: tuple[Change, ...]
    refused: tuple[dict[str, str], ...] = ()
    """Errors, as they cross the wire: what cannot be changed while the graph runs."""


class Apply(msgspec.Struct, frozen=True):
    """Make it so."""

    wanted: Wanted
    manner: Manner


class Restart(msgspec.Struct, frozen=True):
    """Replace processes by new ones that are made from the same."""

    pool: str
    """Or `frontend`; empty: all."""
    index: int | None
    """None: all of the pool."""
    manner: Manner


class Progress(msgspec.Struct, frozen=True):
    """One step of a change: it begins, or has been done."""

    what: str
    """`main/0: drains`; of the first, what will be done."""
