"""The commands about the variants of a running graph, their options and their help."""

from __future__ import annotations

from typing import Annotated

import typer

from pdd_runtime.cli.console import Consoles
from pdd_runtime.cli.options import Format, Name, Output, Running, examples

Why = Annotated[str | None, typer.Option("--why", metavar="TEXT", help="To be kept with the decision.")]


def add_live(app: typer.Typer) -> None:
    """To the commands about A/B tests."""

    @app.command(epilog=examples("pdd-runtime ab status", "pdd-runtime ab status quickstart --format json"))
    def status(graph: Name = None, output: Output = Format.table) -> None:
        """How the variants of a running graph do. Intervals are at 99 %, against the control."""
        from pdd_runtime.cli.ab_live import status as run

        run(graph, output is Format.json, Consoles())

    @app.command(epilog=examples("pdd-runtime ab promote candidate --why 'P90 is 20 % better'"))
    def promote(
        variant: Annotated[str, typer.Argument(metavar="VARIANT", help="Which.")],
        graph: Running = None,
        why: Why = None,
        output: Output = Format.table,
    ) -> None:
        """Give a variant all requests of a running graph. What has begun elsewhere ends there."""
        _decide("promote", variant, why, graph, output)

    @app.command(epilog=examples("pdd-runtime ab abort", "pdd-runtime ab abort candidate --why 'wrong answers'"))
    def abort(
        variant: Annotated[
            str | None, typer.Argument(metavar="VARIANT", help="Which. Default: all but the control.")
        ] = None,
        graph: Running = None,
        why: Why = None,
        output: Output = Format.table,
    ) -> None:
        """Give a variant no more requests. What it has begun it ends."""
        _decide("abort", variant, why, graph, output)

    @app.command(epilog=examples("pdd-runtime ab resume candidate"))
    def resume(
        variant: Annotated[str | None, typer.Argument(metavar="VARIANT", help="Which. Default: all.")] = None,
        graph: Running = None,
        why: Why = None,
        output: Output = Format.table,
    ) -> None:
        """Give a variant its weight again. It was aborted or rolled back, or another was promoted."""
        _decide("resume", variant, why, graph, output)


def _decide(do: str, variant: str | None, why: str | None, graph: str | None, output: Format) -> None:
    from pdd_runtime.cli.ab_live import decide

    decide(do, variant, why or "", graph, output is Format.json, Consoles())
