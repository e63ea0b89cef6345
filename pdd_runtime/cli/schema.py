"""`pdd-runtime schema`."""

from __future__ import annotations

from pdd_runtime.cli.console import Consoles
from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.schema import graph_schema


def schema(consoles: Consoles) -> None:
    with consoles.busy("looking at the plugins"):
        plugins = load_plugins()
    consoles.json(graph_schema(plugins))
    for problem in plugins.problems:
        consoles.error(problem)
