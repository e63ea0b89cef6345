"""`pdd-runtime plugins`."""

from __future__ import annotations

from rich.table import Table

from pdd_runtime.cli.console import Consoles
from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.schema import settings_schema


def plugins(as_json: bool, consoles: Consoles) -> None:
    with consoles.busy("looking at the plugins"):
        manager = load_plugins()
    rows = [
        {
            "kind": entry.kind.noun,
            "name": entry.name,
            "plugin": entry.origin.plugin,
            "distribution": entry.origin.distribution,
            "version": entry.origin.version,
            "class": f"{entry.cls.__module__}.{entry.cls.__qualname__}",
            "config": settings_schema(entry.cls.Config).get("properties", {}),
        }
        for entry in sorted(manager.registered, key=lambda entry: (entry.kind.noun, entry.name))
    ]
    if as_json:
        problems = [problem.to_wire() for problem in manager.problems]
        consoles.json({"plugins": rows, "problems": problems})
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("KIND", "NAME", "DISTRIBUTION", "SETTINGS"):
        table.add_column(column, no_wrap=column != "SETTINGS")
    for row in rows:
        table.add_row(row["kind"], row["name"], f"{row['distribution']} {row['version']}", ", ".join(row["config"]))
    consoles.out.print(table)
    for problem in manager.problems:
        consoles.error(problem)
