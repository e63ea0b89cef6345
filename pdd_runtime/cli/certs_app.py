"""The commands about certificates, their options and their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdd_runtime.cli import complete
from pdd_runtime.cli.options import Format, Output, examples

app = typer.Typer(
    no_args_is_help=True,
    epilog=examples("pdd-runtime certs init --graph graph.yaml"),
    rich_markup_mode=None,
)

Directory = Annotated[Path, typer.Argument(metavar="[DIR]", help="Where the certificates are.")]


@app.callback()
def certs() -> None:
    """Make and list certificates for a graph's own TLS."""


@app.command(
    epilog=examples(
        "pdd-runtime certs init --graph graph.yaml",
        "pdd-runtime certs init /etc/pdd/certs --name two --cluster dc-a --cluster dc-b --days 30",
    )
)
def init(
    directory: Directory = Path("certs"),
    graph: Annotated[
        Path | None,
        typer.Option(
            "--graph",
            "-g",
            metavar="GRAPH",
            help="The graph's YAML file, whose clusters get one each.",
            autocompletion=complete.graph_files,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Without a file: the graph's name.")
    ] = None,
    clusters: Annotated[
        list[str] | None, typer.Option("--cluster", metavar="NAME", help="With --name: a cluster; may be repeated.")
    ] = None,
    days: Annotated[float, typer.Option("--days", min=0.01, max=3650.0, help="How long they are valid.")] = 365.0,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    output: Output = Format.table,
) -> None:
    """Make a CA for development, and a certificate for each cluster by it. Keys are readable by you alone.

    Needs cryptography: pip install pdd-runtime[certs]."""
    from pdd_runtime.cli.certs import init as run
    from pdd_runtime.cli.certs import names_in

    if (graph is None) == (name is None) or (name is None) != (not clusters):
        raise typer.BadParameter("give --graph FILE, or --name NAME with a --cluster or several")
    if graph is not None:
        name, clusters = names_in(graph)
    raise typer.Exit(run(directory, name or "", clusters or [], days, force, output is Format.json))


@app.command(epilog=examples("pdd-runtime certs show", "pdd-runtime certs show /etc/pdd/certs --format json"))
def show(directory: Directory = Path("certs"), output: Output = Format.table) -> None:
    """List certificates: whose they are, and until when. Exit code 1: one is not valid now.

    Needs cryptography: pip install pdd-runtime[certs]."""
    from pdd_runtime.cli.certs import show as run

    raise typer.Exit(run(directory, output is Format.json))
