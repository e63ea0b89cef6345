"""`python examples/report [NAME …]`: the report's tables, by the planner."""

from __future__ import annotations

import argparse
import importlib
import sys
from time import perf_counter

from rich.console import Console

TABLES = ("cost", "ttft", "transfers", "handoff", "collapse", "better")
MORE = ("fit", "profiles", "rivals")
"""Only where they are named: minutes, or tens of them."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python examples/report", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(TABLES)}, which are shown where none is named, and {', '.join(MORE)}",
    )
    parser.add_argument("--write", action="store_true", help="what `fit` finds, into parameters.yaml")
    parser.add_argument("--markdown", action="store_true", help="for a document")
    parser.add_argument("--width", type=int, default=150, help="columns of a terminal")
    options = parser.parse_args()
    if unknown := set(options.names) - {*TABLES, *MORE}:
        parser.error(f"no table is called {', '.join(sorted(unknown))}: they are {', '.join((*TABLES, *MORE))}")
    if options.write and "fit" not in options.names:
        parser.error("--write is for fit, which is not named")
    console = Console(width=options.width)
    for name in options.names or TABLES:
        began = perf_counter()
        module = importlib.import_module(name)
        for table in module.tables(writing=True) if name == "fit" and options.write else module.tables():
            if options.markdown:
                print(table.markdown(), end="\n\n")
            else:
                table.show(console)
        print(f"{name}: {perf_counter() - began:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
