"""`pdd-runtime validate`, and the same check before `up`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pdd_runtime.cli.console import OK, Consoles, exit_code, raise_first
from pdd_runtime.cli.picture import picture
from pdd_runtime.cli.port import port_fault
from pdd_runtime.errors import PddError
from pdd_runtime.graph import LoadedGraph, load
from pdd_runtime.launch import GraphState
from pdd_runtime.plugins import PluginManager, load_plugins
from pdd_runtime.plugins.exchange import UNREMARKABLE, Exchange, exchanges
from pdd_runtime.plugins.preflight import preflight


def load_checked(path: Path, overrides: Sequence[str], consoles: Consoles) -> tuple[LoadedGraph, PluginManager]:
    """The graph, once it is known that it can run. Raises `GraphError` or `PluginError`."""
    loaded = load(path, overrides)
    with consoles.busy("looking at the plugins"):
        plugins = load_plugins()
    raise_first(preflight(loaded, plugins), consoles)
    return loaded, plugins


def validate(path: Path, overrides: Sequence[str], as_json: bool, consoles: Consoles) -> int:
    """Returns the exit code; without JSON a fault is raised."""
    if as_json:
        return _validate_json(path, overrides, consoles)
    loaded, plugins = load_checked(path, overrides, consoles)
    consoles.out.print(picture(loaded.graph))
    for exchange in exchanges(loaded, plugins):
        if exchange.engines[0] != exchange.engines[1] or exchange.how not in UNREMARKABLE:
            engines, pools = " → ".join(exchange.engines), f"{exchange.source} → {exchange.target}"
            consoles.out.print(f"  KV {pools}: {engines}, {exchange.how}", style="dim", markup=False)
    consoles.out.print(f"{path} is right.", style="green", markup=False)
    for warning in _warnings(loaded):
        consoles.warning(warning)
    return OK


def _validate_json(path: Path, overrides: Sequence[str], consoles: Consoles) -> int:
    faults: Sequence[PddError]
    warnings: Sequence[PddError] = ()
    kv: Sequence[Exchange] = ()
    name = None
    try:
        loaded = load(path, overrides)
        name = loaded.graph.name
        plugins = load_plugins()
        faults = preflight(loaded, plugins)
        warnings = _warnings(loaded)
        kv = [] if faults else exchanges(loaded, plugins)
    except PddError as error:
        faults = getattr(error, "errors", ()) or (error,)
    consoles.json(
        {
            "name": name,
            "path": str(path),
            "right": not faults,
            "faults": [fault.to_wire() for fault in faults],
            "warnings": [warning.to_wire() for warning in warnings],
            "kv": [asdict(exchange) for exchange in kv],
        }
    )
    return exit_code(faults[0]) if faults else OK


def _warnings(loaded: LoadedGraph) -> list[PddError]:
    """What is right in the file, and would not work here and now."""
    if GraphState(loaded.graph.name).running():
        return []
    fault = port_fault(loaded)
    return [fault] if fault else []
