"""`pdd-runtime bench`: its options and its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdd_runtime.cli import complete
from pdd_runtime.cli.console import Consoles
from pdd_runtime.cli.options import (
    Driver,
    DriverOption,
    ReportFile,
    ReportFormat,
    ReportOutput,
    WaitTimeout,
    WorkloadSpec,
    examples,
)

EXAMPLES = examples(
    "pdd-runtime bench graphs/pd-cross.yaml graphs/quickstart.yaml "
    "--workload prompt=1000,output=100,rate=0.2 --requests 30",
    "pdd-runtime bench --url http://127.0.0.1:8000 --workload chat.yaml --format html --out report.html",
)


def bench(
    graphs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="GRAPH",
            help="The graphs' YAML files; the first is what others are compared with.",
            autocompletion=complete.graph_files,
        ),
    ] = None,
    workload: WorkloadSpec = "prompt=1000,output=100",
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, help="How many, of each graph.")] = 20,
    seed: Annotated[int, typer.Option("--seed", help="The same seed makes the same requests.")] = 0,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="[FILE:]PATH=VALUE", help="As for `up`; with FILE (without .yaml), for that graph only."
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="Measure the graph that runs here, bring none up.")
    ] = None,
    driver: DriverOption = Driver.own,
    wait_timeout: WaitTimeout = None,
    output: ReportOutput = ReportFormat.table,
    out: ReportFile = None,
) -> None:
    """Measure graphs under the same load, and compare them. They are brought up one after the other."""
    from pdd_runtime.cli.bench import BenchOptions, run_bench

    options = BenchOptions(
        graphs or [], workload, requests, seed, overrides or [], url, wait_timeout, output.value, out, driver.value
    )
    raise typer.Exit(run_bench(options, Consoles()))
