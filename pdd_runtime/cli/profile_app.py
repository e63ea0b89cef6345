"""The command `profile`, its options and its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdd_runtime.cli.console import Consoles
from pdd_runtime.cli.options import (
    Format,
    GraphOrName,
    Output,
    Overrides,
    WaitTimeout,
    examples,
)

EXAMPLES = examples(
    "pdd-runtime profile graphs/quickstart.yaml",
    "pdd-runtime profile graphs/quickstart.yaml --longest 1024 --out laptop.yaml",
)


def profile(
    graph: GraphOrName,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Where to write the profile. Default: NAME.profile.yaml."),
    ] = None,
    longest: Annotated[
        int, typer.Option("--longest", min=64, metavar="TOKENS", help="Of the prompts that it measures with.")
    ] = 4096,
    batch: Annotated[
        int, typer.Option("--batch", min=1, max=4096, metavar="N", help="The most requests decoded at once.")
    ] = 16,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, max=1000, metavar="N", help="Of each pass; the median counts.")
    ] = 3,
    seed: Annotated[int, typer.Option("--seed", help="The same seed makes the same prompts.")] = 0,
    overrides: Overrides = None,
    wait_timeout: WaitTimeout = None,
    output: Output = Format.table,
) -> None:
    """Measure how fast a graph's engines and links are. The simulator and the planner take what it writes. Nobody else
    should use the graph, or its computers, meanwhile."""
    from pdd_runtime.cli.profile import ProfileOptions, run_profile
    from pdd_runtime.experiments.pool_times import Extent

    options = ProfileOptions(
        graph, out, Extent(longest, batch, repeats), seed, overrides or [], wait_timeout, output is Format.json
    )
    raise typer.Exit(run_profile(options, Consoles()))
