"""The commands about API keys, their options and their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdd_runtime.cli.options import Format, Output, examples

app = typer.Typer(
    no_args_is_help=True,
    epilog=examples("pdd-runtime keys add alice"),
    rich_markup_mode=None,
)

File = Annotated[
    Path, typer.Option("--file", "-f", metavar="FILE", help="The file of keys: spec.frontend.keys of a graph.")
]
Owner = Annotated[str, typer.Argument(metavar="NAME", help="Whose key it is.")]
_DEFAULT = Path("keys.jsonl")


@app.callback()
def keys() -> None:
    """Make, list and remove keys of a graph's HTTP API. A running graph takes up within a second what changes."""


@app.command(
    epilog=examples(
        "pdd-runtime keys add alice --file keys.jsonl",
        "pdd-runtime keys add batch --requests 8 --requests-per-minute 120 --tokens-per-minute 200000 --priority 10",
        "pdd-runtime keys add prometheus --admin",
    )
)
def add(
    name: Owner,
    file: File = _DEFAULT,
    admin: Annotated[bool, typer.Option("--admin", help="For the operators' endpoints, and not for the API.")] = False,
    requests: Annotated[int | None, typer.Option("--requests", min=1, help="So many requests at once.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option("--requests-per-minute", min=1, help="So many.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option("--tokens-per-minute", min=1, help="Of prompts and answers together.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="The longest answer.")] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", help="The lowest, so most urgent, that it may ask for.")
    ] = None,
    share: Annotated[
        bool | None, typer.Option("--share/--no-share", help="Share cached KV with other keys. Default: as the graph.")
    ] = None,
    output: Output = Format.table,
) -> None:
    """Make a key and print it, this once: the file has only its hash."""
    from pdd_runtime.cli.keys import add as run

    limits = {
        "admin": admin,
        "requests": requests,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_tokens": max_tokens,
        "priority": priority,
        "share": share,
    }
    run(file, name, limits, output is Format.json)


@app.command(epilog=examples("pdd-runtime keys show", "pdd-runtime keys show --file keys.jsonl --format json"))
def show(file: File = _DEFAULT, output: Output = Format.table) -> None:
    """List whose keys there are, and what they may."""
    from pdd_runtime.cli.keys import show as run

    run(file, output is Format.json)


@app.command(epilog=examples("pdd-runtime keys remove alice"))
def remove(name: Owner, file: File = _DEFAULT, output: Output = Format.table) -> None:
    """Remove all keys of a name. Requests that run go on."""
    from pdd_runtime.cli.keys import remove as run

    run(file, name, output is Format.json)
