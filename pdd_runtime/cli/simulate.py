"""`pdd-runtime simulate`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from rich.console import Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pdd_runtime.cli.console import FAILED, OK, USAGE, Consoles
from pdd_runtime.experiments.html import seconds, share, size
from pdd_runtime.graph import Graph, load
from pdd_runtime.graph.units import Duration
from pdd_runtime.planner import WorkloadError, read_workload
from pdd_runtime.planner.figures import FigureError
from pdd_runtime.planner.pool_model import PoolModel, pool_models
from pdd_runtime.planner.profile import ProfileError, read_profile
from pdd_runtime.planner.simulate import (
    METRICS,
    Failure,
    Interval,
    Outcome,
    Repeated,
    Scenario,
    Simulated,
    SimulationError,
    measured_links,
    simulate,
)
from pdd_runtime.planner.workload import Workload
from pdd_runtime.plugins import load_plugins

_FAILURE = re.compile(r"([a-z0-9-]+)(?:/(\d+))?@([^+]+)\+(.+)")
_DURATION: TypeAdapter[float] = TypeAdapter(Duration)
_STATISTICS = ("mean", "p50", "p90", "p99")
_TICK = 256
"""Requests between two steps of the bar."""


@dataclass(frozen=True)
class SimulateOptions:
    """What `simulate` was asked for."""

    graph: Path
    workload: str
    profile: Path | None
    requests: int
    seeds: int
    seed: int
    warmup: int | None
    failures: Sequence[str]
    overrides: Sequence[str]
    as_json: bool


def run_simulate(options: SimulateOptions, consoles: Consoles) -> int:
    """Simulate and print. Returns the exit code: 1 where no request was answered."""
    graph = load(options.graph, options.overrides).graph
    plugins = load_plugins()
    try:
        workload = read_workload(options.workload)
        profile = read_profile(options.profile) if options.profile is not None else None
        scenario = Scenario(
            graph,
            pool_models(graph, plugins, profile),
            plugins,
            links=measured_links(graph, profile) if profile is not None else {},
            failures=tuple(read_failure(text, graph) for text in options.failures),
        )
        repeated = Repeated(_runs(options, scenario, workload, consoles))
    except (WorkloadError, ProfileError, FigureError, SimulationError) as error:
        consoles.error(error)
        return USAGE
    if options.as_json:
        sources = {name: model.latency.source for name, model in scenario.pools.items()}
        asked = {"graph": graph.name, "requests": options.requests, "seed": options.seed, "seeds": options.seeds}
        context = scenario.context._asdict() if scenario.context is not None else None
        told = {
            "workload": workload.model_dump(mode="json", exclude_unset=True),
            "sources": sources,
            "context": context,
        }
        consoles.json({**asked, **told, **repeated.to_json()})
    else:
        consoles.out.print(tables(repeated, scenario.pools))
    if (long := _too_long(repeated, scenario)) is not None:
        consoles.warning(long)
    for warning in _warnings(repeated):
        consoles.err.print(warning, style="yellow", markup=False)
    return OK if all(run.answered for run in repeated.runs) else FAILED


def _runs(
    options: SimulateOptions, scenario: Scenario, workload: Workload, consoles: Consoles
) -> tuple[Simulated, ...]:
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=consoles.err,
        disable=not consoles.err.is_terminal,
        transient=True,
    )
    warmup: int | float = 0.1 if options.warmup is None else options.warmup
    runs = []
    with bars:
        task = bars.add_task("simulating", total=options.requests * options.seeds)
        for seed in range(options.seed, options.seed + options.seeds):
            observe = _advancing(bars, task) if consoles.err.is_terminal else None
            runs.append(
                simulate(scenario, workload, requests=options.requests, seed=seed, warmup=warmup, observe=observe)
            )
    return tuple(runs)


def _advancing(bars: Progress, task: object) -> Callable[[Outcome], None]:
    count = 0

    def observe(_: Outcome) -> None:
        nonlocal count
        count += 1
        if count % _TICK == 0:
            bars.advance(task, _TICK)  # type: ignore[arg-type]

    return observe


def read_failure(text: str, graph: Graph) -> Failure:
    """`main/3@60s+30s`: worker 3 of pool main fails after a minute, for half of one; `wan@60s+5s`: a link. Raises
    `SimulationError`."""
    match = _FAILURE.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError
        at, lasting = (_DURATION.validate_python(part.strip()) for part in match.groups()[2:])
    except (ValueError, ValidationError):
        raise SimulationError(
            f'"{text}" is no failure', where="--fail", fix="write it as main/3@60s+30s or wan@60s+5s"
        ) from None
    name, index = match[1], match[2]
    if index is None and name in graph.spec.links:
        return Failure(at, lasting, "link", name)
    return Failure(at, lasting, "worker", name, int(index or 0))


def tables(repeated: Repeated, pools: Mapping[str, PoolModel]) -> RenderableType:
    """What came of it, the times that users see, what was busy, and where all this is known from."""
    return Group(_facts(repeated), Text(), _times(repeated), Text(), _busy(repeated), Text(), _sources(pools))


def _facts(repeated: Repeated) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    runs = repeated.runs

    def row(title: str, text: str) -> None:
        table.add_row(Text(title, "dim"), text)

    def both(figure: Callable[[Simulated], float | None], form: Callable[[float], str]) -> str:
        return _around(repeated.interval(figure), form)

    requests = sum(run.requests for run in runs)
    row("answered", f"{sum(run.answered for run in runs):,} of {requests:,}, in {len(runs)} runs")
    for title, count in (
        ("refused by admission", sum(run.rejected - run.too_long for run in runs)),
        ("refused as too long", sum(run.too_long for run in runs)),
        ("lost with their workers", sum(run.failed for run in runs)),
    ):
        if count:
            row(title, f"{count:,} ({share(count, requests)})")
    row("requests/s offered", both(lambda run: run.offered_rate, lambda value: f"{value:.3g}"))
    row("requests/s answered", both(lambda run: run.achieved_rate, lambda value: f"{value:.3g}"))
    for route in dict.fromkeys(route for run in runs for route in run.routes):
        row(f"route {route}", share(sum(run.routes.get(route, 0) for run in runs), sum(run.answered for run in runs)))
    for tier in ("prefill", "relay", "main"):
        row(
            f"tokens by {tier}",
            both(lambda run, tier=tier: run.tokens[tier] / max(1, sum(run.tokens.values())), _percent),  # type: ignore[misc]
        )
    for tier in ("prefill", "main"):
        row(f"cached at {tier}", both(lambda run, tier=tier: run.hit_rates[tier], _percent))  # type: ignore[misc]
    return table


def _times(repeated: Repeated) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for statistic in _STATISTICS:
        table.add_column(statistic, justify="right")
    for metric in METRICS:
        found = [repeated.metric(metric, statistic) for statistic in _STATISTICS]
        if any(found):
            table.add_row(Text(metric, "dim"), *(_around(each, seconds) for each in found))
    return table


def _busy(repeated: Repeated) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "busy", "requests there", "waits", "carried"):
        table.add_column(heading, justify="right" if heading else "left")
    first = repeated.runs[0]
    for place, pool in enumerate(first.pools):
        table.add_row(
            Text(f"{pool.pool}, each worker", "dim"),
            _around(repeated.interval(lambda run, place=place: run.pools[place].utilisation), _percent),  # type: ignore[misc]
            _around(repeated.interval(lambda run, place=place: run.pools[place].requests), _short),  # type: ignore[misc]
        )
    for place, link in enumerate(first.links):
        if any(run.links[place].bytes for run in repeated.runs):
            table.add_row(
                Text(f"{link.link}, from {link.source}", "dim"),
                _around(repeated.interval(lambda run, place=place: run.links[place].busy), _percent),  # type: ignore[misc]
                "",
                _around(repeated.interval(lambda run, place=place: run.links[place].queue), size),  # type: ignore[misc]
                _around(repeated.interval(lambda run, place=place: run.links[place].bytes), size),  # type: ignore[misc]
            )
    return table


def _sources(pools: Mapping[str, PoolModel]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, model in pools.items():
        table.add_row(Text(f"{name} is as fast as", "dim"), model.latency.source)
    return table


def _around(found: Interval | None, form: Callable[[float], str]) -> str:
    if found is None:
        return "–"
    if found.low is None or found.high is None:
        return form(found.mean)
    return f"{form(found.mean)} ({form(max(0.0, found.low))}–{form(found.high)})"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _short(value: float) -> str:
    return f"{value:.3g}"


def _too_long(repeated: Repeated, scenario: Scenario) -> SimulationError | None:
    """What is to be done about requests that no route holds; None: there were none."""
    long, requests = (sum(getattr(run, each) for run in repeated.runs) for each in ("too_long", "requests"))
    if not long or scenario.context is None:
        return None
    limit = scenario.context
    what = f"{long:,} of {requests:,} requests ({share(long, requests)}) are longer than the context, and refused"
    return SimulationError(what, why=limit.why, fix=limit.fix)


def _warnings(repeated: Repeated) -> list[str]:
    words = []
    offered = repeated.interval(lambda run: run.offered_rate * (1 - run.too_long / max(1, run.requests)))
    achieved = repeated.interval(lambda run: run.achieved_rate)
    if offered and achieved and achieved.mean < 0.9 * offered.mean:
        words.append(
            f"{offered.mean:.3g} requests/s were to be served and {achieved.mean:.3g} were: it is asked for more than "
            "it can do, and its times grow with the number of requests"
        )
    if len(repeated.runs) == 1:
        words.append("one run has no confidence intervals: use --seeds")
    return words
