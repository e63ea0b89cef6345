"""Whether the installed plugins can run a graph: names, settings, and what they need from its edges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pdd_runtime.errors import GraphError, PddError, PluginError
from pdd_runtime.graph import LoadedGraph, PluginRef
from pdd_runtime.graph.document import Route
from pdd_runtime.plugins.manager import PluginManager

_Find = Callable[[str], type[Any]]


def preflight(loaded: LoadedGraph, plugins: PluginManager) -> list[PddError]:
    """Everything that is wrong, each with its place in the graph's file."""
    return [*_references(loaded, plugins), *_handoff_edges(loaded, plugins)]


def _references(loaded: LoadedGraph, plugins: PluginManager) -> Iterator[PddError]:
    spec = loaded.graph.spec
    references: list[tuple[Route, PluginRef, _Find]] = [
        (("spec", "pools", name, "engine"), pool.engine, plugins.engine) for name, pool in spec.pools.items()
    ]
    references += [
        (("spec", "edges", index, "transport"), edge.transport, plugins.transport)
        for index, edge in enumerate(spec.edges)
        if edge.transport is not None
    ]
    references += [
        (("spec", "routing"), spec.routing, plugins.routing),
        (("spec", "handoff"), spec.handoff, plugins.handoff),
        (("spec", "discovery"), spec.discovery, plugins.discovery),
    ]
    for route, reference, find in references:
        try:
            cls = find(reference.plugin)
        except PluginError as error:
            yield PluginError(error.what, where=loaded.locate((*route, "plugin")), why=error.why, fix=error.fix)
            continue
        config = (*route, "config")
        try:
            plugins.configure(cls, reference.config, partial(_locate, loaded, config))
        except PluginError as error:
            yield error


def _locate(loaded: LoadedGraph, config: Route, setting: Route) -> str:
    return loaded.locate((*config, *setting))


def _handoff_edges(loaded: LoadedGraph, plugins: PluginManager) -> Iterator[PddError]:
    """What the strategy sends from relay to main needs an edge that carries it."""
    spec = loaded.graph.spec
    try:
        carries = plugins.handoff(spec.handoff.plugin).carries
    except PluginError:
        return
    for name, pool in spec.pools.items():
        feeds = {edge.carries for edge in spec.edges if edge.source == name}
        if pool.role == "relay" and carries not in feeds:
            more = ", transport: …" if carries == "kv" else ""
            yield GraphError(
                f'handoff strategy {spec.handoff.plugin} moves {carries}, but no edge carries {carries} from "{name}"',
                where=loaded.locate(("spec", "handoff")),
                why=f"the relay pool has edges for {', '.join(sorted(feeds)) or 'nothing'}",
                fix=f"add an edge {{from: {name}, to: MAIN, carries: {carries}{more}}}, or choose another strategy",
            )
