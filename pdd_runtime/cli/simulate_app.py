"""The command `simulate`, its options and its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdd_runtime.cli.console import Consoles
from pdd_runtime.cli.options import Format, GraphFile, Output, Overrides, examples

EXAMPLES = examples(
    "pdd-runtime simulate examples/report/graphs/pdd.yaml --workload report",
    "pdd-runtime simulate graphs/quickstart.yaml --profile quickstart.profile.yaml --workload prompt=500,rate=0.5",
    "pdd-runtime simulate pdd.yaml -w report --set spec.links.wan.bandwidth=40Gbit/s --seeds 10",
    "pdd-runtime simulate pdd.yaml -w report --fail main/3@60s+30s --fail wan@200s+5s",
)


def simulate(
    graph: GraphFile,
    workload: Annotated[
        str,
        typer.Option("--workload", "-w", metavar="SPEC", help="A file, a name, or KEY=VALUE,…, as for `bench`."),
    ],
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            "-p",
            metavar="FILE",
            help="How fast its pools are, as `profile` has measured. Without it each pool's `hardware` says so.",
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option("--requests", "-n", min=1, max=100_000_000, metavar="N", help="Requests of each run.")
    ] = 10_000,
    seeds: Annotated[
        int, typer.Option("--seeds", min=1, max=1000, metavar="K", help="Runs, for confidence intervals.")
    ] = 5,
    seed: Annotated[int, typer.Option("--seed", help="Of the first run; the others have the next ones.")] = 0,
    warmup: Annotated[
        int | None,
        typer.Option("--warmup", min=0, metavar="N", help="Requests before those that count. Default: a tenth more."),
    ] = None,
    fail: Annotated[
        list[str] | None,
        typer.Option(
            "--fail",
            metavar="WHAT@TIME+TIME",
            help="A worker or link that fails then, for so long: main/3@60s+30s, wan@60s+5s. May be repeated.",
        ),
    ] = None,
    overrides: Overrides = None,
    output: Output = Format.table,
) -> None:
    """Say what a graph would do under a workload. The times that users see, where the work is done, what crosses the
    links, what is busy; nothing is started."""
    from pdd_runtime.cli.simulate import SimulateOptions, run_simulate

    options = SimulateOptions(
        graph, workload, profile, requests, seeds, seed, warmup, fail or [], overrides or [], output is Format.json
    )
    raise typer.Exit(run_simulate(options, Consoles()))
