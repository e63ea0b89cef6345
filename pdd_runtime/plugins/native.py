"""Whether each edge that carries KV suits its engines: portable KV needs a transport, native KV engines of one kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel

from pdd_runtime.errors import GraphError, PddError
from pdd_runtime.graph import Edge, LoadedGraph
from pdd_runtime.graph.document import Route
from pdd_runtime.plugins.engine import Capabilities, ModelSpec
from pdd_runtime.plugins.manager import PluginManager


@dataclass(frozen=True)
class KvKind:
    """What a pool's KV is, as its engine promises."""

    engine: str
    native: bool
    assisted: bool
    plane: str | None
    """Its setting `data_plane`; None: it has none."""
    block_size: int | None
    """Its setting of that name; None: it has none."""
    dtype: str

    def __str__(self) -> str:
        return self.engine if self.plane is None else f"{self.engine} with data_plane: {self.plane}"


def kv_kind(loaded: LoadedGraph, plugins: PluginManager, pool: str) -> KvKind:
    """Of an engine that does not say beforehand it is portable, as the contract has it."""
    declared, model = loaded.graph.spec.pools[pool].engine, loaded.graph.model_of(pool)
    engine = plugins.engine(declared.plugin)
    config: BaseModel = plugins.configure(engine, declared.config, "")
    promise = engine.promises(ModelSpec(**model.model_dump()), config) or Capabilities()
    plane = getattr(config, "data_plane", None)
    return KvKind(
        engine=declared.plugin,
        native=promise.kv == "native",
        assisted=promise.extend == "prefill_assisted",
        plane=None if plane is None else str(plane),
        block_size=getattr(config, "block_size", None),
        dtype=model.dtype,
    )


def native_faults(loaded: LoadedGraph, plugins: PluginManager) -> Iterator[PddError]:
    """Everything that is wrong, each with its place."""
    spec = loaded.graph.spec
    kinds = {name: kv_kind(loaded, plugins, name) for name in spec.pools}
    for name, pool in spec.pools.items():
        if pool.role == "aggregated" and kinds[name].assisted:
            yield GraphError(
                f'pool "{name}" is aggregated, and its engine cannot serve a request alone',
                where=loaded.locate(("spec", "pools", name, "role")),
                why=f"{kinds[name]} computes no prompt: a prefill pool does it for it",
                fix="set another data_plane, or make it a main pool that a prefill pool feeds",
            )
    for index, edge in enumerate(spec.edges):
        if edge.carries == "kv":
            yield from _edge(loaded, ("spec", "edges", index), edge, kinds[edge.source], kinds[edge.target])


def _edge(loaded: LoadedGraph, route: Route, edge: Edge, ours: KvKind, theirs: KvKind) -> Iterator[PddError]:
    arrow = f"edge {edge.source} → {edge.target}"
    if not ours.native and not theirs.native:
        if edge.transport is None:
            own = ", or give both pools another data_plane" if ours.plane and ours.engine == theirs.engine else ""
            yield GraphError(
                f"{arrow} carries kv and has no transport",
                where=loaded.locate(route),
                why="the KV of both pools is portable: it moves in bulk, block by block, which is a plugin's work",
                fix=f"add transport: {{plugin: …}} (`pdd-runtime plugins` lists them){own}",
            )
    elif ours.engine != theirs.engine:
        alone = ours if ours.native else theirs
        yield GraphError(
            f"{arrow} moves KV from engine {ours.engine} to engine {theirs.engine}",
            where=loaded.locate(route),
            why=f"the KV of engine {alone.engine} is its own: no other engine reads it",
            fix="give both pools one engine, or engines with portable KV",
        )
    elif (ours.native, ours.plane) != (theirs.native, theirs.plane):
        yield GraphError(
            f"{arrow} moves KV from data_plane: {ours.plane} to data_plane: {theirs.plane}",
            where=loaded.locate(route),
            why=f"what {ours.engine} moves itself is read only by one that moves it in the same way",
            fix="give both pools the same data_plane",
        )
    else:
        yield from _both_native(loaded, route, edge, arrow, ours)
        for what in ("block_size", "dtype"):
            if (here := getattr(ours, what)) != (there := getattr(theirs, what)):
                yield GraphError(
                    f"{arrow} moves KV with {what} {here} to a pool with {what} {there}",
                    where=loaded.locate(route),
                    why=f"{ours} moves KV as it lies, and converts nothing",
                    fix=f"give both pools the same {what}, or portable KV",
                )


def _both_native(loaded: LoadedGraph, route: Route, edge: Edge, arrow: str, kind: KvKind) -> Iterator[PddError]:
    if edge.transport is not None:
        yield GraphError(
            f"{arrow} has a transport, and its engines move KV themselves",
            where=loaded.locate((*route, "transport")),
            why=f"both pools have {kind}: no block passes a transport",
            fix="remove the transport, or give both pools portable KV",
        )
    if edge.link is not None and loaded.graph.spec.links[edge.link].emulate:
        yield GraphError(
            f'{arrow} crosses link "{edge.link}", which is emulated, and its engines move KV themselves',
            where=loaded.locate((*route, "link")),
            why="only what passes our own processes can be slowed: KV would cross at once, tokens would not",
            fix="remove `emulate` from the link, or give both pools portable KV",
        )
