"""The commands that print what is run, for those who run it otherwise; their options and their help."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from pdd_runtime.cli import complete
from pdd_runtime.cli.console import OK, Consoles
from pdd_runtime.cli.options import GraphFile, Overrides, examples

app = typer.Typer(
    no_args_is_help=True,
    epilog=examples("pdd-runtime render engine graphs/vllm.yaml main"),
    rich_markup_mode=None,
)


class Rendering(StrEnum):
    """How a start is printed."""

    text = "text"
    json = "json"


@app.callback()
def render() -> None:
    """Print what would be run, to be read, or run elsewhere."""


@app.command(
    epilog=examples(
        "pdd-runtime render engine graphs/vllm.yaml main",
        "pdd-runtime render engine graphs/vllm.yaml main --format json | jq -r '.[0].argv[]'",
        "pdd-runtime render engine graphs/sglang.yaml prefill --check",
    )
)
def engine(
    graph: GraphFile,
    pool: Annotated[str, typer.Argument(metavar="POOL", help="One of its pools.", autocompletion=complete.pools)],
    overrides: Overrides = None,
    output: Annotated[
        Rendering, typer.Option("--format", help="How to print it; text is a shell script.")
    ] = Rendering.text,
    check: Annotated[
        bool, typer.Option("--check", help="Ask the installed server whether it knows every flag, instead.")
    ] = False,
) -> None:
    """Print how `up` starts the server of each of a pool's workers: command line, environment and files."""
    from pdd_runtime.cli.render_check import check_flags
    from pdd_runtime.cli.render_engine import print_starts, starts
    from pdd_runtime.cli.validate import load_checked

    consoles = Consoles()
    loaded, plugins = load_checked(graph, overrides or [], consoles)
    found = starts(loaded, plugins, pool)
    if check:
        raise typer.Exit(check_flags(found[0], output is Rendering.json, consoles))
    print_starts(found, output is Rendering.json, consoles)
    raise typer.Exit(OK)
