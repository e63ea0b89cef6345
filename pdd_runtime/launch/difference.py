"""What must be done so that a running graph becomes another one. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from pdd_runtime.discovery.mark import differing, shown
from pdd_runtime.errors import LaunchError
from pdd_runtime.graph import Graph
from pdd_runtime.graph.secrets import redacted
from pdd_runtime.launch.forms import Form
from pdd_runtime.launch.slot import FRONTEND, Slot

Kind = Literal["add", "replace", "remove"]


class Change(msgspec.Struct, frozen=True):
    """One process that is not as it is wanted."""

    kind: Kind
    pool: str
    index: int
    why: tuple[str, ...] = ()
    """Of one that is replaced: what has changed, as `spec.pools.main.env.A: "b" → "c"`."""

    @property
    def slot(self) -> Slot:
        return Slot(self.pool, self.index)


def difference(running: Mapping[Slot, Form], wanted: Mapping[Slot, Form]) -> tuple[Change, ...]:
    """In the order in which it is to be done: what is new first, so that what is replaced finds it there; frontends
    when all workers are as wanted, so that each finds the routes that it knows; last what nobody uses any more."""
    added = [Change("add", slot.pool, slot.index) for slot in wanted if slot not in running]
    replaced = [
        Change("replace", slot.pool, slot.index, tuple(changes(running[slot], form)))
        for slot, form in wanted.items()
        if slot in running and running[slot] != form
    ]
    removed = [Change("remove", slot.pool, slot.index) for slot in running if slot not in wanted]
    return tuple(sorted([*added, *replaced], key=lambda change: change.pool == FRONTEND)) + tuple(removed)


def changes(before: Form, after: Form) -> Iterator[str]:
    """What is different in two forms, in words."""
    for part, old, new in differing("spec", before, after):
        a, b = (shown(redacted(value, part.rpartition(".")[2])) for value in (old, new))
        yield f"{part}: {a} → {b}"


def unchangeable(before: Graph, after: Graph) -> list[LaunchError]:
    """What is different in two graphs and cannot be applied to processes that run, each with what to do instead."""
    old, new = (graph.model_dump(mode="json", by_alias=True)["spec"] for graph in (before, after))
    return [
        LaunchError(
            f"{part} cannot be changed while the graph runs: {shown(a)} → {shown(b)}",
            why=why,
            fix=f"end it with `pdd-runtime down {before.name}` and start it anew, or start the other one beside it "
            "with --set metadata.name=…",
        )
        for at, why in _FIXED.items()
        for part, a, b in differing(f"spec.{at}", _at(old, at), _at(new, at))
    ] + list(_models(before, after))


_FIXED = {
    "discovery": "old and new processes would not find each other",
    "security": "old and new processes would refuse each other",
    "frontend.host": "the launcher keeps the address for the frontends that come",
    "frontend.port": "the launcher keeps the port for the frontends that come",
}
"""What no process can be alone with, and why."""


def _models(before: Graph, after: Graph) -> Iterator[LaunchError]:
    for part, old, new in dict.fromkeys(_model_changes(before, after)):
        yield LaunchError(
            f"{part} cannot be changed while the graph runs: {old} → {new}",
            why="a request's workers must have one model, and for a while there would be two",
            fix="start the other one beside it, with --set metadata.name=… and a port of its own, and let users move",
        )


def _model_changes(before: Graph, after: Graph) -> Iterator[tuple[str, str, str]]:
    for name in after.spec.pools:
        if name in before.spec.pools:
            own = before.spec.pools[name].model or after.spec.pools[name].model
            where = f"spec.pools.{name}.model" if own else "spec.model"
            old, new = (graph.model_of(name).model_dump() for graph in (before, after))
            yield from ((part, shown(a), shown(b)) for part, a, b in differing(where, old, new))


def _at(spec: Mapping[str, object], path: str) -> object:
    value: object = spec
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
