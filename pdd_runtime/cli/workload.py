"""`pdd-runtime workload`."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from pdd_runtime.cli.console import OK, USAGE, Consoles
from pdd_runtime.planner import WorkloadError, presets, read_workload
from pdd_runtime.planner.workload_file import summary
from pdd_runtime.planner.workload_statistics import Described, Spread, describe

_ENOUGH, _ALL = 10_000, 10_000_000


def list_workloads(consoles: Consoles, as_json: bool) -> int:
    """The workloads that come along."""
    summaries = {name: summary(name) for name in presets()}
    if as_json:
        consoles.json(summaries)
        return OK
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, text in summaries.items():
        table.add_row(Text(name, "bold"), Text(text))
    consoles.out.print(table)
    return OK


def run_workload(spec: str, requests: int | None, seed: int, consoles: Consoles, as_json: bool) -> int:
    """Print what it is like. Returns the exit code."""
    try:
        workload = read_workload(spec)
        with consoles.busy("looking at its requests"):
            described = describe(workload, requests or (_ENOUGH if workload.trace is None else _ALL), seed)
    except WorkloadError as error:
        consoles.error(error)
        return USAGE
    if as_json:
        consoles.json({"workload": workload.model_dump(mode="json", exclude_unset=True), **described.to_json()})
        return OK
    consoles.out.print(_spreads(described))
    for title, text in _sentences(described):
        consoles.out.print(Text.assemble((f"{title:<10}", "dim"), text))
    return OK


def _spreads(told: Described) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for heading in ("mean", "p10", "p50", "p90", "p99", "least", "most"):
        table.add_column(heading, justify="right")

    def row(title: str, spread: Spread | None, form: str = ",.0f") -> None:
        if spread is not None:
            numbers = (spread.mean, spread.p10, spread.p50, spread.p90, spread.p99, spread.least, spread.most)
            table.add_row(Text(title, "dim"), *(format(number, form) for number in numbers))

    row("prompt, tokens", told.prompt)
    row("of it new", told.uncached)
    row("of it known", told.hit.share, ".1%")
    row("answer, tokens", told.output)
    row("turns of a session", told.turns)
    row("pause between turns, s", told.think, ",.1f")
    row("from session to session, s", told.gap, ",.3g")
    return table


def _sentences(told: Described) -> list[tuple[str, str]]:
    hit = told.hit
    shorter = ", ".join(f"{share:.1%} below {limit:,}" for limit, share in told.outputs_below.items())
    arrivals = "a closed loop, or one session"
    if told.rate is not None:
        variation = told.gap_variation or 0.0
        arrivals = f"{told.rate:,.3g} requests/s; gaps vary by {variation:.2f} of their mean (Poisson: 1)"
    return [
        ("requests", f"{told.requests:,} in {told.sessions:,} sessions"),
        ("known", f"{hit.of_tokens:.1%} of all prompts' tokens, were everything kept that was seen"),
        ("", f"more than 95 % of {hit.above_95:.1%} of the prompts, less than 90 % of {hit.below_90:.1%}"),
        ("answers", shorter),
        ("arrivals", arrivals),
    ]
