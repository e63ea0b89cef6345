"""The commands of a graph's processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from pdd_runtime.graph import Graph
from pdd_runtime.graph.secrets import revealed, values
from pdd_runtime.launch.child import ChildSpec
from pdd_runtime.launch.forms import forms
from pdd_runtime.launch.part import Part
from pdd_runtime.launch.slot import FRONTEND, Slot


def child_specs(
    graph: Graph, part: Part, common: Sequence[str], secret: str, listener: Callable[[int], int]
) -> dict[Slot, ChildSpec]:
    """Of every process of the part, in the order in which they are started. `common`: options that all take;
    `listener`: of a frontend, by its index. Raises `GraphError` where a secret of theirs is not to be found."""
    hidden = (secret, *values(graph.spec.model_dump()))
    return {
        slot: ChildSpec(
            pool=slot.pool,
            index=slot.index,
            role="frontend" if slot.pool == FRONTEND else graph.spec.pools[slot.pool].role,
            cluster=graph.frontends[slot.index] if slot.pool == FRONTEND else graph.spec.pools[slot.pool].cluster,
            command=(sys.executable, "-m", *_command(slot), *common),
            env={**_env(graph, slot), "PDD_SECRET": secret},
            secrets=hidden,
            form=form,
            listener=partial(listener, slot.index) if slot.pool == FRONTEND else None,
        )
        for slot, form in forms(graph, part).items()
    }


def _env(graph: Graph, slot: Slot) -> dict[str, str]:
    if slot.pool == FRONTEND:
        return {}
    own: dict[str, str] = revealed(graph.spec.pools[slot.pool].env, f"spec.pools.{slot.pool}.env")
    return own


def _command(slot: Slot) -> tuple[str, ...]:
    if slot.pool == FRONTEND:
        return ("pdd_runtime.frontend", "--index", str(slot.index))
    return ("pdd_runtime.worker", "--pool", slot.pool, "--index", str(slot.index))
