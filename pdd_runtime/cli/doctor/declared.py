"""Whether a graph that does not run could run here."""

from __future__ import annotations

from collections.abc import Iterator

from pdd_runtime.cli.doctor.check import Check
from pdd_runtime.cli.doctor.host import available_memory, gpus, size
from pdd_runtime.cli.port import port_fault
from pdd_runtime.errors import PluginError
from pdd_runtime.graph import LoadedGraph
from pdd_runtime.plugins import PluginManager
from pdd_runtime.plugins.native import kv_kind

_CPU = ("cpu", "")


def declared(loaded: LoadedGraph, plugins: PluginManager) -> Iterator[Check]:
    yield _port(loaded)
    yield _memory(loaded, plugins)
    yield from _hardware(loaded)


def _port(loaded: LoadedGraph) -> Check:
    frontend = loaded.graph.spec.frontend
    fault = port_fault(loaded)
    if fault:
        return Check("graph", "port", "fail", f"{fault.what}: {fault.why}", fault.fix)
    return Check("graph", "port", "ok", f"{frontend.host}:{frontend.port or 'any free port'} is free")


def _memory(loaded: LoadedGraph, plugins: PluginManager) -> Check:
    """KV of all pools against what is free: pages exist only once they are touched, so a start proves nothing."""
    sizes = {name: _kv_bytes(loaded, plugins, name) for name in loaded.graph.spec.pools}
    known = {name: size_ for name, size_ in sizes.items() if size_}
    if not known:
        return Check("graph", "memory", "ok", "how much KV the pools hold is set in blocks: it is known once they run")
    total, free = sum(known.values()), available_memory()
    parts = ", ".join(f"{name} {size(count)}" for name, count in known.items())
    found = f"KV of up to {size(total)} ({parts})"
    if free is None:
        return Check("graph", "memory", "ok", found)
    found += f", {size(free)} free"
    if total > free:
        fix = "set a smaller kv_memory in the pools' engine config, or fewer replicas"
        return Check("graph", "memory", "warn", found, fix)
    return Check("graph", "memory", "ok", found)


def _kv_bytes(loaded: LoadedGraph, plugins: PluginManager, name: str) -> int:
    """See `Engine.Config`; 0: not known, or in the engine's own memory alone."""
    pool = loaded.graph.spec.pools[name]
    try:
        config = plugins.configure(plugins.engine(pool.engine.plugin), pool.engine.config, "")
        if kv_kind(loaded, plugins, name).native:
            return 0
    except PluginError:
        return 0
    count = getattr(config, "kv_memory", None)
    return pool.replicas * int(count) if isinstance(count, int) and getattr(config, "kv_blocks", None) is None else 0


def _hardware(loaded: LoadedGraph) -> Iterator[Check]:
    wanted = {name: pool.hardware for name, pool in loaded.graph.spec.pools.items() if pool.hardware}
    accelerated = {name: kind for name, kind in wanted.items() if kind.lower() not in _CPU}
    here = gpus().found
    if accelerated and here.startswith("none"):
        names = ", ".join(f"{name} ({kind})" for name, kind in accelerated.items())
        fix = "run it where they are; on this host the engines compute on the CPU"
        yield Check("graph", "hardware", "warn", f"pools want {names}, and no GPU is here", fix)
