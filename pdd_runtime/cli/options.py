"""Options and arguments that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pdd_runtime.cli import complete


def examples(*lines: str) -> str:
    """The end of a command's help: one example a line."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


class Format(StrEnum):
    """How a listing is printed."""

    table = "table"
    json = "json"


class ReportFormat(StrEnum):
    """How a report is printed."""

    table = "table"
    json = "json"
    html = "html"


class Driver(StrEnum):
    """Who sends the load."""

    own = "own"
    aiperf = "aiperf"


class Drawing(StrEnum):
    """How a graph is drawn."""

    text = "text"
    mermaid = "mermaid"
    dot = "dot"
    svg = "svg"
    json = "json"


Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Change a value of the graph; may be repeated. VALUE is YAML."),
]
GraphFile = Annotated[
    Path, typer.Argument(metavar="GRAPH", help="The graph's YAML file.", autocompletion=complete.graph_files)
]
Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME|GRAPH",
        help="A running graph's name, or its file. Default: the one.",
        autocompletion=complete.graph_names,
    ),
]
Running = Annotated[
    str | None,
    typer.Option(
        "--graph",
        "-g",
        metavar="NAME|GRAPH",
        help="Which graph. Default: the one running.",
        autocompletion=complete.logged_names,
    ),
]
Patience = Annotated[
    float,
    typer.Option(
        "--patience",
        min=0.0,
        metavar="SECONDS",
        help="How long a process that is replaced may finish what it has begun.",
    ),
]
Surge = Annotated[
    bool | None,
    typer.Option(
        "--surge/--no-surge",
        help="Start a replacement beside the old worker, or drain that first. Default: beside it where it is alone.",
    ),
]
GraphOrName = Annotated[
    str,
    typer.Argument(
        metavar="GRAPH|NAME",
        help="A graph's file, which is brought up for it, or the name of one that runs.",
        autocompletion=complete.names_and_files,
    ),
]
WaitTimeout = Annotated[
    float | None,
    typer.Option("--wait-timeout", min=0.0, metavar="SECONDS", help="Fail a graph that takes longer to be ready."),
]
WorkloadSpec = Annotated[
    str,
    typer.Option("--workload", "-w", metavar="SPEC", help="A file, a name, or e.g. prompt=1000,output=100,rate=0.5."),
]
ReportOutput = Annotated[ReportFormat, typer.Option("--format", help="How to print it.")]
ReportFile = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the report here instead of to stdout.")
]
DriverOption = Annotated[
    Driver, typer.Option("--driver", help="Who sends the requests. `aiperf` must be installed: docs/benchmarks.md.")
]
Output = Annotated[Format, typer.Option("--format", help="How to print it.")]
