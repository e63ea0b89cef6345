"""`pdd-runtime validate`, and the same check before `up`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdd_runtime.cli.console import Consoles, raise_first
from pdd_runtime.cli.picture import picture
from pdd_runtime.graph import LoadedGraph, load
from pdd_runtime.plugins import PluginManager, load_plugins
from pdd_runtime.plugins.preflight import preflight


def load_checked(path: Path, overrides: Sequence[str], consoles: Consoles) -> tuple[LoadedGraph, PluginManager]:
    """The graph, once it is known that it can run. Raises `GraphError` or `PluginError`."""
    loaded = load(path, overrides)
    plugins = load_plugins()
    raise_first(preflight(loaded, plugins), consoles)
    return loaded, plugins


def validate(path: Path, overrides: Sequence[str], consoles: Consoles) -> None:
    loaded, _ = load_checked(path, overrides, consoles)
    consoles.out.print(picture(loaded.graph))
    consoles.out.print(f"{path} is right.", style="green", markup=False)
