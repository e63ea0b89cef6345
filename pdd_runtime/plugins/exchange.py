"""Which pools exchange KV, and what happens to it on the way: what can be told before an engine has started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from pdd_runtime.errors import EngineError, GraphError, PddError
from pdd_runtime.graph import Edge, LoadedGraph
from pdd_runtime.kv import KvLayout
from pdd_runtime.kv.convert import obstacle
from pdd_runtime.plugins.engine import Engine, ModelSpec
from pdd_runtime.plugins.manager import PluginManager
from pdd_runtime.plugins.native import kv_kind

_UNSETTLED = "portable; whether and how it is converted is settled when both have started"
_UNCHANGED = "portable; it arrives as it was sent"
UNREMARKABLE = (_UNSETTLED, _UNCHANGED)
"""What happens to most KV between pools of one engine."""


@dataclass(frozen=True)
class Exchange:
    """KV over one edge."""

    source: str
    target: str
    engines: tuple[str, str]
    """Of the two pools."""
    how: str
    """A sentence's end: what happens to the KV."""


def exchanges(loaded: LoadedGraph, plugins: PluginManager) -> list[Exchange]:
    """Of every edge that carries KV, in a graph in which nothing is wrong."""
    layouts = _layouts(loaded, plugins)
    return [_exchange(loaded, plugins, layouts, edge) for edge in loaded.graph.spec.edges if edge.carries == "kv"]


def obstacles(loaded: LoadedGraph, plugins: PluginManager) -> Iterator[PddError]:
    """Models that an engine can never serve, and edges whose KV the receiver could not use."""
    graph, layouts, told = loaded.graph, {}, set()
    for name, pool in graph.spec.pools.items():
        try:
            layouts[name] = _layout(loaded, plugins, name)
        except EngineError as error:
            if (pool.engine.plugin, str(error)) in told:
                continue
            told.add((pool.engine.plugin, str(error)))
            yield GraphError(
                f'engine {pool.engine.plugin} of pool "{name}" cannot serve this model',
                where=_model_at(loaded, name),
                why=f"{error.what}{f' ({error.where})' if error.where else ''}{f': {error.why}' if error.why else ''}",
                fix=error.fix,
            )
    for index, edge in enumerate(graph.spec.edges):
        ours, theirs = layouts.get(edge.source), layouts.get(edge.target)
        if edge.carries == "kv" and ours and theirs and (why := obstacle(ours, theirs)):
            yield GraphError(
                f"edge {edge.source} → {edge.target} moves KV that {edge.target} cannot use",
                where=loaded.locate(("spec", "edges", index)),
                why=f"{why} ({ours}; {theirs})",
                fix="give both pools engines whose KV is of one kind",
            )


def _exchange(
    loaded: LoadedGraph, plugins: PluginManager, layouts: Mapping[str, KvLayout | None], edge: Edge
) -> Exchange:
    pools = loaded.graph.spec.pools
    first, second = (pools[name].engine.plugin for name in (edge.source, edge.target))
    kind, ours, theirs = kv_kind(loaded, plugins, edge.source), layouts[edge.source], layouts[edge.target]
    if kind.native:
        how = f"native; {first} moves it itself" + (f" (data_plane: {kind.plane})" if kind.plane else "")
    elif ours is None or theirs is None:
        how = _UNSETTLED
    elif ours == theirs:
        how = _UNCHANGED
    else:
        how = f"portable; converted as it arrives: {', '.join(_changes(ours, theirs))}"
    return Exchange(edge.source, edge.target, (first, second), how)


def _changes(ours: KvLayout, theirs: KvLayout) -> Iterator[str]:
    for field in ours.__struct_fields__:
        if (before := getattr(ours, field)) != (after := getattr(theirs, field)):
            yield f"{field} {before} → {after}"


def _layouts(loaded: LoadedGraph, plugins: PluginManager) -> dict[str, KvLayout | None]:
    return {name: _layout(loaded, plugins, name) for name in loaded.graph.spec.pools}


def _layout(loaded: LoadedGraph, plugins: PluginManager, pool: str) -> KvLayout | None:
    return _engine(loaded, plugins, pool).foresee(_spec(loaded, pool), _config(loaded, plugins, pool))


def _engine(loaded: LoadedGraph, plugins: PluginManager, pool: str) -> type[Engine]:
    return plugins.engine(loaded.graph.spec.pools[pool].engine.plugin)


def _config(loaded: LoadedGraph, plugins: PluginManager, pool: str) -> BaseModel:
    settings = loaded.graph.spec.pools[pool].engine.config
    config: BaseModel = plugins.configure(_engine(loaded, plugins, pool), settings, "")
    return config


def _spec(loaded: LoadedGraph, pool: str) -> ModelSpec:
    return ModelSpec(**loaded.graph.model_of(pool).model_dump())


def _model_at(loaded: LoadedGraph, pool: str) -> str:
    own = ("spec", "pools", pool, "model") if loaded.graph.spec.pools[pool].model else ("spec", "model")
    return loaded.locate((*own, "source"))
