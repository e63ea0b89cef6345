"""`pdd-runtime bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from pdd_runtime.cli.bars import Bars
from pdd_runtime.cli.console import FAILED, OK, USAGE, Consoles, plain
from pdd_runtime.cli.interrupt import run
from pdd_runtime.cli.report_file import Told, deliver, prepare
from pdd_runtime.cli.targets import UsageError, bench_targets
from pdd_runtime.experiments import (
    METRICS,
    GraphReport,
    Report,
    WorkloadError,
    bench,
    read_workload,
    report,
    require_scipy,
    to_html,
)
from pdd_runtime.experiments.aiperf import AiperfError, require_aiperf
from pdd_runtime.experiments.html import seconds, share, size
from pdd_runtime.plugins import load_plugins

_STATISTICS = ("mean", "p50", "p90", "p99")
_BUSY = 0.7
"""CPU seconds a second of the client above which its own work may be in the numbers."""
_WIDEST = 10_000
"""Columns: more than any table takes."""
_LATE = 0.05
"""Seconds by which a request may be late without a word."""


@dataclass(frozen=True)
class BenchOptions:
    """What `bench` was asked for."""

    graphs: Sequence[Path]
    workload: str
    requests: int
    seed: int
    overrides: Sequence[str]
    url: str | None
    wait_timeout: float | None
    """Seconds that each graph gets to be ready."""
    form: Literal["table", "json", "html"]
    out: Path | None
    driver: Literal["own", "aiperf"] = "own"


def run_bench(options: BenchOptions, consoles: Consoles) -> int:
    """Measure, print or write the report. Returns the exit code: 1 where a graph answered nothing."""
    require_scipy()
    try:
        workload = read_workload(options.workload)
        targets = bench_targets(options.graphs, options.url, options.overrides, consoles)
        sessions = workload.sessions(options.requests, options.seed)
        aiperf = require_aiperf(sessions) if options.driver == "aiperf" else None
    except (WorkloadError, UsageError, AiperfError) as error:
        consoles.error(error)
        return USAGE
    prepare(options.out)
    with Bars(consoles.err, options.requests) as bars:
        measured = run(
            bench(targets, workload, options.requests, options.seed, load_plugins(), bars, options.wait_timeout, aiperf)
        )
    made = report(workload, options.requests, options.seed, measured)
    told = Told(lambda: tables(made), lambda: to_html(made), made.to_json)
    deliver(told, options.form, options.out, consoles)
    for name, graph in made.graphs.items():
        for word in warnings(name, graph):
            consoles.err.print(word, style="yellow", markup=False)
    return FAILED if made.failed else OK


def tables(made: Report) -> RenderableType:
    """What happened, how long everything took, and how graphs compare."""
    return Group(facts(made.graphs), Text(), _Times(made))


class _Times:
    """Of all graphs beside each other; where that is too wide, of the first with each of the others."""

    def __init__(self, made: Report) -> None:
        self._made = made

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first, *others = self._made.graphs
        whole = _times(self._made, [first, *others])
        wanted = Measurement.get(console, options.update(width=_WIDEST), whole).maximum
        if wanted <= options.max_width or len(others) < 2:
            yield whole
            return
        for number, other in enumerate(others):
            if number:
                yield Text()
            yield _times(self._made, [first, other])


def facts(reports: Mapping[str, GraphReport]) -> Table:
    """What happened, a column for each graph."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in reports:
        table.add_column(name, justify="right")
    graphs = list(reports.values())

    def row(title: str, cells: Sequence[str]) -> None:
        table.add_row(Text(title, "dim"), *cells)

    row("answered", [f"{graph.requests - graph.errors} of {graph.requests}" for graph in graphs])
    if any(graph.errors for graph in graphs):
        row("first error", [plain(graph.first_error or "–").partition("\n")[0] for graph in graphs])
    row("requests/s offered", [_rate(graph.rate.offered) or "closed loop" for graph in graphs])
    row("requests/s achieved", [_rate(graph.rate.achieved) or "–" for graph in graphs])
    row("routes", [", ".join(f"{n} {route}" for route, n in graph.routes.items()) or "–" for graph in graphs])
    for tier in ("prefill", "relay", "main"):
        row(f"tokens by {tier}", [_share_of_tokens(graph, tier) for graph in graphs])
    for tier in ("prefill", "main"):
        row(f"cached at {tier}", [share(graph.cached_tokens[tier], graph.prompt_tokens) for graph in graphs])
    for link in dict.fromkeys(link for graph in graphs for link in graph.link_bytes):
        row(f"KV over {link}", [size(graph.link_bytes[link]) if link in graph.link_bytes else "–" for graph in graphs])
    if not any(graph.link_bytes for graph in graphs):
        for edge in dict.fromkeys(edge for graph in graphs for edge in graph.edge_bytes):
            row(f"KV {edge}", [size(graph.edge_bytes.get(edge, 0)) for graph in graphs])
    return table


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _share_of_tokens(graph: GraphReport, tier: str) -> str:
    return f"{graph.tokens[tier]} ({share(graph.tokens[tier], sum(graph.tokens.values()))})"


def _times(made: Report, names: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    graphs = {name: made.graphs[name] for name in names}
    table.add_column("")
    table.add_column("")
    for name in graphs:
        table.add_column(name, justify="right")
        if name in made.ratios:
            table.add_column(f"/ {made.baseline}", justify="right", style="cyan")
    for metric in METRICS:
        if all(getattr(graph, metric).mean is None for graph in graphs.values()):
            continue
        for statistic in _STATISTICS:
            cells = []
            for name, graph in graphs.items():
                value: float | None = getattr(getattr(graph, metric), statistic)
                around = made.ci.graphs[name][metric][statistic]
                cells.append(seconds(value) + (f" ({seconds(around[0])}–{seconds(around[1])})" if around else ""))
                if name in made.ratios:
                    times: float | None = getattr(made.ratios[name][metric], statistic)
                    between = made.ci.ratios[name][metric][statistic]
                    written = f"{times:.2f}" if times is not None else "–"
                    cells.append(written + (f" ({between[0]:.2f}–{between[1]:.2f})" if between else ""))
            table.add_row(metric if statistic == "mean" else "", Text(statistic, "dim"), *cells)
    return table


def warnings(name: str, graph: GraphReport) -> list[str]:
    """What may be wrong with a graph's numbers."""
    words = []
    if graph.errors:
        words.append(f"{name}: {graph.errors} of {graph.requests} requests failed; the first: {graph.first_error}")
    if graph.client_cpu > _BUSY:
        words.append(
            f"{name}: measuring took {graph.client_cpu:.0%} of a CPU, which may be in the numbers: ask less at once"
        )
    if graph.late > _LATE:
        words.append(f"{name}: a request was sent {seconds(graph.late)} after it was due; that counts as its latency")
    lacking = graph.requests - graph.errors - graph.timelines
    if lacking > 0:
        words.append(f"{name}: {lacking} requests have no timeline: tiers, bytes and handoff gaps lack them")
    return words
