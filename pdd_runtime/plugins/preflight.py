"""Whether the installed plugins can run a graph: names, settings, and what they need from its edges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from pydantic import BaseModel

from pdd_runtime.errors import GraphError, PddError, PluginError
from pdd_runtime.graph import LoadedGraph, PluginRef
from pdd_runtime.graph.document import Route
from pdd_runtime.graph.secrets import refers, written_out
from pdd_runtime.plugins.encryption import in_clear
from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.plugins.exchange import obstacles
from pdd_runtime.plugins.exposure import exposed
from pdd_runtime.plugins.fixed_ports import clashes
from pdd_runtime.plugins.manager import PluginManager
from pdd_runtime.plugins.native import kv_kind, native_faults
from pdd_runtime.plugins.settings import secret_fields

_Find = Callable[[str], type[Any]]


def preflight(loaded: LoadedGraph, plugins: PluginManager) -> list[PddError]:
    """Everything that is wrong, each with its place in the graph's file."""
    faults = [*_references(loaded, plugins)]
    # What compares settings needs settings that are right.
    checks = (_handoff_edges, _attached, clashes, _capabilities, native_faults, obstacles, in_clear, exposed)
    return faults or [fault for check in checks for fault in check(loaded, plugins)]


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
    for name, variant in spec.variants.items():
        own: tuple[tuple[str, PluginRef | None, _Find], ...] = (
            ("routing", variant.routing, plugins.routing),
            ("handoff", variant.handoff, plugins.handoff),
        )
        references += [
            (("spec", "variants", name, key), reference, find) for key, reference, find in own if reference is not None
        ]
    for route, reference, find in references:
        try:
            cls = find(reference.plugin)
        except PluginError as error:
            yield PluginError(error.what, where=loaded.locate((*route, "plugin")), why=error.why, fix=error.fix)
            continue
        config = (*route, "config")
        for setting in secret_fields(cls.Config):
            value = reference.config.get(setting)
            if isinstance(value, str) and value and not refers(value):
                yield written_out(f"the secret {setting} of {cls.name}", loaded.locate((*config, setting)))
        try:
            plugins.configure(cls, reference.config, partial(_locate, loaded, config, cls.Config))
        except PluginError as error:
            yield error


def _locate(loaded: LoadedGraph, config: Route, form: type[BaseModel], setting: Route) -> str:
    """Where a setting's value stands; of one that the plugin does not know, the setting itself."""
    known = {field.alias or name for name, field in form.model_fields.items()}
    route = (*config, *setting)
    return loaded.locate(route) if not setting or setting[0] in known else loaded.document.locate_key(route)


def _handoff_edges(loaded: LoadedGraph, plugins: PluginManager) -> Iterator[PddError]:
    """What a strategy sends from relay to main needs an edge that carries it."""
    spec = loaded.graph.spec
    plain: set[str] = set() if spec.variants else set(spec.pools)
    for name, variant in spec.variants.items():
        pools = set(variant.pools or spec.pools)
        if variant.handoff is None:
            plain |= pools
        else:
            yield from _handoff_of(loaded, plugins, variant.handoff, ("spec", "variants", name, "handoff"), pools)
    yield from _handoff_of(loaded, plugins, spec.handoff, ("spec", "handoff"), plain)


def _handoff_of(
    loaded: LoadedGraph, plugins: PluginManager, strategy: PluginRef, route: Route, pools: set[str]
) -> Iterator[PddError]:
    spec = loaded.graph.spec
    carries = plugins.handoff(strategy.plugin).carries
    for name, pool in spec.pools.items():
        if pool.role != "relay" or name not in pools:
            continue
        feeds = {edge.carries for edge in spec.edges if edge.source == name}
        if carries == "kv" and (kind := kv_kind(loaded, plugins, name)).native:
            yield GraphError(
                f'handoff strategy {strategy.plugin} moves kv, and that of pool "{name}" is native',
                where=loaded.locate(route),
                why=f"{kind} gives out what it has prefilled, not what it is decoding",
                fix="choose a strategy that hands off token IDs, e.g. catch-up",
            )
        elif carries not in feeds:
            more = ", transport: …" if carries == "kv" else ""
            yield GraphError(
                f'handoff strategy {strategy.plugin} moves {carries}, but no edge carries {carries} from "{name}"',
                where=loaded.locate(route),
                why=f"the relay pool has edges for {', '.join(sorted(feeds)) or 'nothing'}",
                fix=f"add an edge {{from: {name}, to: MAIN, carries: {carries}{more}}}, or choose another strategy",
            )


def _attached(loaded: LoadedGraph, plugins: PluginManager) -> Iterator[PddError]:
    """A server that runs already shares memory with one worker: no other can have it."""
    taken: dict[tuple[str, str], str] = {}
    for name, pool in loaded.graph.spec.pools.items():
        route = ("spec", "pools", name, "engine")
        config = plugins.configure(plugins.engine(pool.engine.plugin), pool.engine.config, loaded.locate(route))
        for setting in ("url", "socket"):
            value = getattr(config, setting, None)
            if value is None:
                continue
            other = taken.setdefault((setting, str(value)), name)
            if other != name or (pool.replicas > 1 and setting == "url"):
                rival = f'pool "{other}" has it as well' if other != name else f'"{name}" has {pool.replicas} workers'
                yield GraphError(
                    f"one worker alone can attach to {setting} {value}",
                    where=loaded.locate((*route, "config", setting)),
                    why=f"{rival}, and a server shares memory with one",
                    fix=f"run a server for each worker, each in a pool of its own with its own {setting}",
                )


def _capabilities(loaded: LoadedGraph, plugins: PluginManager) -> Iterator[PddError]:
    """What the graph asks of engines that say beforehand what they can do."""
    graph = loaded.graph
    for name, pool in graph.spec.pools.items():
        model = graph.model_of(name)
        engine = plugins.engine(pool.engine.plugin)
        config = plugins.configure(engine, pool.engine.config, "")
        promise = engine.promises(ModelSpec(**model.model_dump()), config)
        if promise is not None and model.mode == "exact" and not promise.exact:
            own = ("spec", "pools", name, "model") if pool.model else ("spec", "model")
            yield GraphError(
                f'pool "{name}" cannot compute in exact mode',
                where=loaded.locate((*own, "mode")),
                why=f"engine {pool.engine.plugin} has only the fast one",
                fix="set mode: fast, or choose another engine",
            )
    for index, edge in enumerate(graph.spec.edges):
        if edge.transport is not None and "exact" in {graph.model_of(pool).mode for pool in (edge.source, edge.target)}:
            transport = plugins.transport(edge.transport.plugin)
            if not transport.lossless(plugins.configure(transport, edge.transport.config, "")):
                yield GraphError(
                    f"transport {transport.name} is lossy with these settings, and the model is computed in exact mode",
                    where=loaded.locate(("spec", "edges", index, "transport")),
                    why="KV that does not arrive bit for bit changes logits",
                    fix="leave the lossy setting out of its config, or set mode: fast",
                )
