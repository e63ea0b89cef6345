"""The commands about plugins, their options and their help."""

from __future__ import annotations

from typing import Annotated

import typer

from pdd_runtime.cli import complete
from pdd_runtime.cli.console import Consoles
from pdd_runtime.cli.options import Format, Output, examples

app = typer.Typer(
    invoke_without_command=True,
    epilog=examples("pdd-runtime plugins", "pdd-runtime plugins list --format json"),
    rich_markup_mode=None,
)


@app.callback()
def plugins(context: typer.Context, output: Output = Format.table) -> None:
    """List the installed plugins, and what is wrong with broken ones. A subcommand does something else with them."""
    if context.invoked_subcommand is None:
        plugins_list(output)


@app.command("list", epilog=examples("pdd-runtime plugins list --format json"))
def plugins_list(output: Output = Format.table) -> None:
    """List the installed plugins, and what is wrong with broken ones. This is what `plugins` alone does."""
    from pdd_runtime.cli.plugins import plugins as run

    run(output is Format.json, Consoles())


@app.command(
    "check",
    epilog=examples(
        "pdd-runtime plugins check pdd-tcp", "pdd-runtime plugins check pdd-shortest-queue --format json | jq .ok"
    ),
)
def plugins_check(
    distribution: Annotated[
        str,
        typer.Argument(
            metavar="DIST",
            help="An installed distribution, by its name.",
            autocompletion=complete.distributions,
        ),
    ],
    output: Output = Format.table,
) -> None:
    """Check that a distribution's plugins keep their contracts.

    Needs pytest: pip install pdd-runtime[testing]."""
    from pdd_runtime.cli.plugins_check import plugins_check as run

    raise typer.Exit(run(distribution, output is Format.json, Consoles()))
