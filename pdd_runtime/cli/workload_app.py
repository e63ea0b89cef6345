"""The command `workload`, its options and its help."""

from __future__ import annotations

from typing import Annotated

import typer

from pdd_runtime.cli.console import Consoles
from pdd_runtime.cli.options import Format, Output, examples

EXAMPLES = examples(
    "pdd-runtime workload",
    "pdd-runtime workload report",
    "pdd-runtime workload prompt=2000,hit=beta(9,1),turns=6,rate=0.5 --requests 1000",
    "pdd-runtime workload trace=mooncake:conversation_trace.jsonl.gz --format json",
)


def workload(
    spec: Annotated[
        str | None,
        typer.Argument(metavar="SPEC", help="A file, a name, or KEY=VALUE,…, as for `bench`. None lists the names."),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            "-n",
            min=1,
            max=10_000_000,
            metavar="N",
            help="How many of its requests to look at. Default: 10000, or all that a trace has.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="The same seed makes the same requests.")] = 0,
    output: Output = Format.table,
) -> None:
    """Say what a workload is like, or list those that come along. Nothing is sent."""
    from pdd_runtime.cli.workload import list_workloads, run_workload

    consoles, as_json = Consoles(), output is Format.json
    code = list_workloads(consoles, as_json) if spec is None else run_workload(spec, requests, seed, consoles, as_json)
    raise typer.Exit(code)
