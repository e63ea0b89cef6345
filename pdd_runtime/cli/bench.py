"""`pdd-runtime bench`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pdd_runtime.cli.console import FAILED, OK, USAGE, Consoles, plain
from pdd_runtime.cli.interrupt import run
from pdd_runtime.cli.validate import load_checked
from pdd_runtime.clock import now
from pdd_runtime.errors import PddError
from pdd_runtime.experiments import (
    METRICS,
    GraphReport,
    Outcome,
    Report,
    Target,
    WorkloadError,
    bench,
    read_workload,
    report,
    require_scipy,
    to_html,
)
from pdd_runtime.experiments.html import seconds, share, size
from pdd_runtime.launch import GraphStatus
from pdd_runtime.plugins import load_plugins

_FOR_ONE = re.compile(r"([A-Za-z0-9_.-]+):(?=[A-Za-z]+[.=])")
"""`pd-cross:spec.links…=…`: an override of one graph, by its file's name."""
OWN_FRONTEND = (
    *("spec.frontend.host=127.0.0.1", "spec.frontend.port=0"),
    *("spec.frontend.admin=null", "spec.frontend.keys=null", "spec.frontend.tls=null"),
)
"""A graph that is up for a measurement only is for this process alone."""
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


def run_bench(options: BenchOptions, consoles: Consoles) -> int:
    """Measure, print or write the report. Returns the exit code: 1 where a graph answered nothing."""
    require_scipy()
    try:
        workload = read_workload(options.workload)
        targets = _targets(options, consoles)
    except (WorkloadError, BenchUsageError) as error:
        consoles.error(error)
        return USAGE
    if options.out is not None:
        # Before the measurement, not behind it.
        _write(options.out, "")
    with Bars(consoles.err, options.requests) as bars:
        measured = run(
            bench(targets, workload, options.requests, options.seed, load_plugins(), bars, options.wait_timeout)
        )
    made = report(workload, options.requests, options.seed, measured)
    text = {"json": lambda: json.dumps(made.to_json(), indent=2), "html": lambda: to_html(made)}.get(options.form)
    if options.out is None and text is None:
        consoles.out.print(tables(made))
    elif options.out is None:
        assert text is not None
        consoles.out.out(text(), highlight=False)
    elif text is not None:
        _write(options.out, text() + "\n")
    else:
        with options.out.open("w", encoding="utf-8") as file:
            Console(file=file, width=200, no_color=True).print(tables(made))
    for word in _warnings(made):
        consoles.err.print(word, style="yellow", markup=False)
    if options.out is not None:
        consoles.err.print(f"written to {options.out}", markup=False)
    return FAILED if made.failed else OK


def _targets(options: BenchOptions, consoles: Consoles) -> list[Target]:
    """Raises `GraphError` and `PluginError`, and `BenchUsageError` for what does not go together."""
    if options.url is None and not options.graphs:
        raise BenchUsageError("there is nothing to measure", fix="name a graph's file, or a running graph by --url")
    if options.url is not None and len(options.graphs) > 1:
        raise BenchUsageError("one --url is one graph, but several are named", fix="name its own graph only, or none")
    stems = {path.stem for path in options.graphs}
    shared, single = [], []
    for override in options.overrides:
        match = _FOR_ONE.match(override)
        if match is None:
            shared.append(override)
        elif match[1] in stems:
            single.append((match[1], override[match.end() :]))
        else:
            names = ", ".join(sorted(stems)) or "none"
            raise BenchUsageError(f'--set is for "{match[1]}", which is not measured', fix=f"the graphs are {names}")
    url = None if options.url is None else base_of(options.url)
    targets: list[Target] = []
    for path in options.graphs:
        own = [override for stem, override in single if stem == path.stem]
        loaded, _ = load_checked(path, [*shared, *own, *OWN_FRONTEND], consoles)
        if loaded.graph.name in [target.name for target in targets]:
            raise BenchUsageError(
                f"two graphs are called {loaded.graph.name}",
                where=str(path),
                fix=f"call one otherwise: --set {path.stem}:metadata.name=NAME, or in its file",
            )
        targets.append(Target(loaded.graph.name, loaded.graph, str(path), url or ""))
    return targets or [Target(str(url), None, url=str(url))]


def base_of(url: str) -> str:
    """As people paste it: with or without a scheme, or as OpenAI clients want it, with /v1."""
    whole = url if "://" in url else f"http://{url}"
    return whole.rstrip("/").removesuffix("/v1")


class BenchUsageError(PddError):
    """Arguments that do not go together."""

    code = "bench-usage"


class Bars:
    """A bar for each graph on a terminal; elsewhere a line when one begins and when it has ended."""

    def __init__(self, console: Console, requests: int) -> None:
        self._console, self._requests = console, requests
        self._progress = Progress(
            TextColumn("{task.fields[name]:<16}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: dict[str, TaskID] = {}
        self._errors: dict[str, int] = {}
        self._ended: dict[str, int] = {}
        self._begun = 0.0

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def starting(self, name: str, status: GraphStatus) -> None:
        ready = sum(process.state == "ready" for process in status.processes)
        self._say(name, f"starts: {ready} of {len(status.processes)} processes are ready")

    def warming(self, name: str) -> None:
        self._say(name, "warms up")
        self._begun = now()

    def ended(self, name: str, outcome: Outcome) -> None:
        self._ended[name] = self._ended.get(name, 0) + 1
        self._errors[name] = self._errors.get(name, 0) + (outcome.error is not None)
        errors = f"{self._errors[name]} errors" if self._errors[name] else ""
        self._say(name, errors)
        self._progress.update(self._task[name], completed=self._ended[name])
        if not self._console.is_terminal and self._ended[name] == self._requests:
            self._console.out(f"{name}: {self._requests} requests, {errors or 'no errors'}", highlight=False)

    def _say(self, name: str, text: str) -> None:
        if name not in self._task:
            self._task[name] = self._progress.add_task(text, total=self._requests, name=name)
            if not self._console.is_terminal:
                self._console.out(f"{name}: begins", highlight=False)
        self._progress.update(self._task[name], description=text)


def tables(made: Report) -> RenderableType:
    """What happened, how long everything took, and how graphs compare."""
    return Group(_facts(made), Text(), _Times(made))


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


def _facts(made: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in made.graphs:
        table.add_column(name, justify="right")
    graphs = list(made.graphs.values())

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


def _warnings(made: Report) -> list[str]:
    words = []
    for name, graph in made.graphs.items():
        if graph.errors:
            words.append(f"{name}: {graph.errors} of {graph.requests} requests failed; the first: {graph.first_error}")
        if graph.client_cpu > _BUSY:
            words.append(
                f"{name}: measuring took {graph.client_cpu:.0%} of a CPU, which may be in the numbers: ask less at once"
            )
        if graph.late > _LATE:
            words.append(
                f"{name}: a request was sent {seconds(graph.late)} after it was due; that counts as its latency"
            )
        lacking = graph.requests - graph.errors - graph.timelines
        if lacking > 0:
            words.append(f"{name}: {lacking} requests have no timeline: tiers, bytes and handoff gaps lack them")
    return words


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PddError("the report cannot be written", where=str(path), why=error.strerror or str(error)) from error
