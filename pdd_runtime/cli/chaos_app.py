"""`pdd-runtime chaos`: its options and its help."""

from __future__ import annotations

from typing import Annotated

import typer

from pdd_runtime.cli.console import Consoles
from pdd_runtime.cli.options import Format, GraphOrName, Output, Overrides, WaitTimeout, examples

EXAMPLES = examples(
    "pdd-runtime chaos graphs/two-by-two.yaml --for 10m --kill-every 20s",
    "pdd-runtime chaos graphs/quickstart.yaml --faults kill,hang,cut --seed 7 --format json > chaos.json",
    "pdd-runtime chaos quickstart --strike-running --for 1m",
)


def chaos(
    graph: GraphOrName,
    span: Annotated[str, typer.Option("--for", metavar="TIME", help="How long there are faults: 30s, 10m, 1h.")] = "1m",
    every: Annotated[
        str, typer.Option("--kill-every", metavar="TIME", help="From one fault to the next, about.")
    ] = "20s",
    faults: Annotated[
        str, typer.Option("--faults", metavar="KIND,…", help="Which: kill, hang, cut, cluster, etcd, disk.")
    ] = "kill",
    lasting: Annotated[
        str, typer.Option("--lasting", metavar="TIME", help="How long those faults last that do.")
    ] = "5s",
    streams: Annotated[int, typer.Option("--streams", min=1, max=1000, help="How many answers at once.")] = 8,
    workload: Annotated[
        str, typer.Option("--workload", "-w", metavar="SPEC", help="Lengths of prompts and answers, as for `bench`.")
    ] = "prompt=uniform(100, 500),output=uniform(100, 300),timeout=120",
    longest_gap: Annotated[
        str, typer.Option("--longest-gap", metavar="TIME", help="A longer wait between two tokens is no pass.")
    ] = "2s",
    recovery: Annotated[
        str, typer.Option("--recovery", metavar="TIME", help="For all to be ready again after the last fault.")
    ] = "2m",
    seed: Annotated[int, typer.Option("--seed", help="The same seed makes the same requests and faults.")] = 0,
    overrides: Overrides = None,
    wait_timeout: WaitTimeout = None,
    strike_running: Annotated[
        bool, typer.Option("--strike-running", help="Strike a graph that runs already. Its users will feel it.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave it up afterwards, for `timeline` and `logs`.")] = False,
    output: Output = Format.table,
) -> None:
    """Make faults in a graph, and say whether its users notice. Every answer of the live traffic is compared with the
    same one undisturbed, token for token. Ctrl-C ends it early, with a verdict."""
    from pdd_runtime.cli.chaos import ChaosOptions, duration, run_chaos
    from pdd_runtime.experiments.chaos import ChaosPlan

    plan = ChaosPlan(
        span=duration(span),
        every=duration(every),
        kinds=tuple(dict.fromkeys(kind.strip() for kind in faults.split(",") if kind.strip())),
        lasting=duration(lasting),
        streams=streams,
        seed=seed,
        longest_gap=duration(longest_gap),
        recovery=duration(recovery),
    )
    options = ChaosOptions(
        graph, plan, workload, overrides or [], wait_timeout, strike_running, keep, output is Format.json
    )
    raise typer.Exit(run_chaos(options, Consoles()))
