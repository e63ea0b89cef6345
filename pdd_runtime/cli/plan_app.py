"""The command `plan`, its options and its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdd_runtime.cli import complete
from pdd_runtime.cli.console import Consoles
from pdd_runtime.cli.options import Format, Output, examples

EXAMPLES = examples(
    "pdd-runtime plan examples/plan/report.yaml",
    "pdd-runtime plan examples/plan/report.yaml --set spec.budget=70 --out best.yaml --html plan.html",
    "pdd-runtime plan examples/plan/report.yaml --no-what-if --format json | jq .best",
)


def plan(
    spec: Annotated[
        Path, typer.Argument(metavar="SPEC", help="The plan's YAML file.", autocompletion=complete.graph_files)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a value of the plan; may be repeated. VALUE is YAML."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="GRAPH", help="Write the best graph here, for `up`.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a report with plots here.")] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, max=256, help="That simulate. Default: one a CPU, at most 8.")
    ] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if/--no-what-if", help="Look at what binds, and at other links, hits and prices.")
    ] = True,
    output: Output = Format.table,
) -> None:
    """Search the cheapest deployment that keeps a promise. How many workers, on which chips, over which links: the same
    plan gives the same answer. docs/planner.md has the plan's keys."""
    from pdd_runtime.cli.plan import PlanOptions, run_plan

    options = PlanOptions(spec, overrides or [], out, html, processes, what_if, output is Format.json)
    raise typer.Exit(run_plan(options, Consoles()))
