"""The commands about A/B tests, their options and their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pdd_runtime.cli import complete
from pdd_runtime.cli.ab_live_app import add_live
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


class FilesOrCommand(TyperGroup):
    """A group that is a command itself: where the first word is none of its commands, all words are its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        command = bool(args) and args[0] in self.commands
        ctx.meta[__name__] = command
        ctx.allow_interspersed_args = not command
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> list[Any]:
        return [] if ctx.meta.get(__name__) else super().get_params(ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        own = super().collect_usage_pieces(ctx)[:-1]
        return [*own, f"| {self.subcommand_metavar}"] if self.commands else own


app = typer.Typer(
    cls=FilesOrCommand,
    invoke_without_command=True,
    no_args_is_help=True,
    epilog=examples(
        "pdd-runtime ab graphs/quickstart-torch.yaml graphs/quickstart.yaml -w prompt=300,output=50 -n 60",
        "pdd-runtime ab graph.yaml graph.yaml --set B:spec.handoff.plugin=one-shot --in-turn",
        "pdd-runtime ab http://10.0.0.1:8000 http://10.0.0.2:8000 -w chat.yaml --format html --out report.html",
    ),
    rich_markup_mode=None,
)


@app.callback()
def ab(
    context: typer.Context,
    graphs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="GRAPH|URL",
            help="The graphs' YAML files, or where they run; the first is A, which the others are compared with.",
            autocompletion=complete.graph_files,
        ),
    ] = None,
    workload: WorkloadSpec = "prompt=500,output=50",
    requests: Annotated[
        int, typer.Option("--requests", "-n", min=1, help="How many at most, of each graph; fewer, where that decides.")
    ] = 100,
    seed: Annotated[int, typer.Option("--seed", help="The same seed makes the same requests in the same order.")] = 0,
    together: Annotated[
        bool,
        typer.Option(
            "--together/--in-turn",
            help="All graphs are up at once and are asked one after the other; or only one is up at a time, in rounds.",
        ),
    ] = True,
    rounds: Annotated[
        int, typer.Option("--rounds", min=2, max=1000, help="How often each graph is brought up, with --in-turn.")
    ] = 8,
    block: Annotated[
        int | None,
        typer.Option("--block", min=1, help="Requests of one graph until it is another's turn. Default: as few as do."),
    ] = None,
    decide: Annotated[
        str,
        typer.Option(
            "--decide",
            metavar="METRIC.STATISTIC,…",
            help="What there is a verdict on; statistics are typical, mean, p50, p90, p99.",
        ),
    ] = "ttft.typical,ttft.p90,tt10.typical,tpot.typical,tpot.p90,longest_gap.typical,e2e.typical",
    effect: Annotated[
        float, typer.Option("--minimum-effect", min=0.0, max=1.0, help="A smaller difference does not matter.")
    ] = 0.03,
    error: Annotated[
        float,
        typer.Option("--error", min=0.0001, max=0.5, help="How likely a wrong verdict may be, over all of them."),
    ] = 0.05,
    early: Annotated[
        bool, typer.Option("--early-stop/--no-early-stop", help="Whether to end when every verdict is there.")
    ] = True,
    slo: Annotated[
        str | None,
        typer.Option("--slo", metavar="ttft=TIME,tpot=TIME", help="For goodput. Default: that of the first graph."),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option("--prices", metavar="FILE", help="For cost and BCR: a plan's YAML file, or its `prices` alone."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="[A:]PATH=VALUE", help="As for `up`; with a letter or a file's name, of that graph only."
        ),
    ] = None,
    driver: DriverOption = Driver.own,
    wait_timeout: WaitTimeout = None,
    output: ReportOutput = ReportFormat.table,
    out: ReportFile = None,
) -> None:
    """Say whether one graph is better than another. They get the same requests in turn, pair by pair, until it is
    clear, or the requests are used up."""
    if context.invoked_subcommand is not None:
        return
    from pdd_runtime.cli.ab import AbOptions, run_ab

    options = AbOptions(
        graphs=graphs or [],
        workload=workload,
        requests=requests,
        seed=seed,
        together=together,
        rounds=rounds,
        block=block,
        decide=decide,
        effect=effect,
        error=error,
        early=early,
        slo=slo,
        prices=prices,
        overrides=overrides or [],
        driver=driver.value,
        wait_timeout=wait_timeout,
        form=output.value,
        out=out,
    )
    raise typer.Exit(run_ab(options, Consoles()))


add_live(app)
