"""`pdd-runtime plan`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pdd_runtime.cli.console import OK, USAGE, Consoles
from pdd_runtime.errors import PddError
from pdd_runtime.planner.cost import PriceError
from pdd_runtime.planner.figures import FigureError
from pdd_runtime.planner.plan_html import to_html
from pdd_runtime.planner.plan_report import PlanReport, changed, pools, ranged, told, traits
from pdd_runtime.planner.plan_spec import PlanError
from pdd_runtime.planner.profile import ProfileError
from pdd_runtime.planner.search.crew import crew
from pdd_runtime.planner.search.find import Finder
from pdd_runtime.planner.search.otherwise import what_if
from pdd_runtime.planner.search.setting import Setting, judge
from pdd_runtime.planner.workload_error import WorkloadError

if TYPE_CHECKING:
    from pdd_runtime.planner.search.deployment import Deployment
    from pdd_runtime.planner.search.otherwise import WhatIf


_SHOWN = ("p50", "p90", "p99")


@dataclass(frozen=True)
class PlanOptions:
    """What `plan` was asked for."""

    spec: Path
    overrides: Sequence[str]
    out: Path | None
    """Where the best graph goes."""
    html: Path | None
    processes: int | None
    what_if: bool
    as_json: bool


def run_plan(options: PlanOptions, consoles: Consoles) -> int:
    """Search, print, write. Returns the exit code; a plan that is wrong is 2, one that cannot be met 1."""
    for path in (options.out, options.html):
        if path is not None and not path.parent.is_dir():
            raise PlanError(
                "the result could not be written", where=str(path), why="there is no such directory", fix="make it"
            )
    try:
        setting = Setting.read(options.spec, options.overrides)
        # Models, bounds and promise are looked at here, so that what is wrong with them is told before processes start.
        setting.check_prices()
        assert setting.bounds
    except (PlanError, WorkloadError, FigureError, PriceError, ProfileError) as error:
        consoles.error(error)
        return USAGE
    for long in {str(each): each for each in map(setting.too_long, range(setting.choices)) if each}.values():
        consoles.warning(long)
    processes = options.processes or min(os.cpu_count() or 1, 8)
    with Bar(consoles.err) as bar, crew(processes, judge, str(options.spec), tuple(options.overrides)) as workers:
        finder = Finder(setting, workers, bar)
        found = finder.find()
        others = what_if(finder, found) if options.what_if else None
    report = PlanReport(setting, found, others)
    _write(options.out, report.graph_yaml, consoles)
    _write(options.html, lambda: to_html(report), consoles)
    if options.as_json:
        consoles.json(report.to_json())
    else:
        consoles.out.print(tables(report))
    return OK


class Bar:
    """On a terminal a bar of the trials so far; elsewhere a line when another kind of work begins."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            TextColumn("{task.completed} simulations"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("reads the plan", total=None)
        self._doing = ""

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def __call__(self, doing: str, done: int) -> None:
        if doing != self._doing:
            self._doing = doing
            if not self._console.is_terminal:
                self._console.out(doing, highlight=False)
        self._progress.update(self._task, description=doing, advance=done)


def tables(report: PlanReport) -> RenderableType:
    """The best, whether a relay pays, the front, what binds, what if."""
    parts: list[RenderableType] = [_head(report), Text(), _relay(report), Text(), _front(report)]
    if report.what_if is not None:
        parts += [Text(), _binds(report.what_if), Text(), _others(report), Text(), _falls(report.what_if)]
    parts += [Text(), *(Text(sentence) for sentence in report.sentences)]
    sources = dict.fromkeys(f"times of {', '.join(_of(report, each))}: {each}" for each in report.sources.values())
    return Group(*parts, Text(), *(Text(source, "dim") for source in sources))


def _of(report: PlanReport, source: str) -> list[str]:
    return [name for name, each in report.sources.items() if each == source]


def _head(report: PlanReport) -> Table:
    best, table = report.found.best, _table("", "")
    verdict, unit = best.verdict, report.unit
    rows = {
        "best": pools(best),
        "": traits(best),
        "promise": report.promise,
        "goodput": f"{best.goodput:.3g} requests/s ({ranged(best.interval, '.3g')})",
        "cost": f"{ranged(best.cost.total)} {unit}",
        "goodput / cost": f"{ranged(best.bcr)} requests/s for each {unit}",
        "first token": " / ".join(f"{verdict.ttft[key]:.3g} s" for key in _SHOWN) + "  (P50 / P90 / P99)",
        "each token": " / ".join(f"{verdict.tpot[key] * 1e3:.3g} ms" for key in _SHOWN if verdict.tpot),
        "relay's tokens": f"{verdict.relay_share:.1%}",
        "cached": ", ".join(f"{hit:.1%} at {tier}" for tier, hit in verdict.hits.items()),
        "searched": f"{report.found.deployments} deployments by {report.found.trials} simulations",
    }
    for title, text in rows.items():
        if not text:
            continue
        table.add_row(Text(title, "dim"), Text(text))
    return table


def _relay(report: PlanReport) -> Table:
    answer = report.found.relay
    table = _table("Does a relay pay?", *_columns(report), "relay's tokens")
    for name, each in (("without: ", answer.without), ("with: ", answer.beside)):
        if each is None:
            table.add_row(Text(f"{name}none"))
            continue
        share = "" if each.verdict.relay_share == 0 else f"{each.verdict.relay_share:.1%}"
        cost, served, *rest = _figures(each)
        served = f"{served} ({ranged(each.interval, '.3g')})"
        table.add_row(_named(name, each, bold=each is report.found.best), cost, served, *rest, share)
    if answer.cost is not None and answer.goodput is not None and answer.bcr is not None:
        table.add_row("difference", changed(answer.cost), changed(answer.goodput), changed(answer.bcr))
    return table


def _front(report: PlanReport) -> Table:
    table = _table("Worth their money", *_columns(report))
    given = [report.found.given] if report.found.given is not None else []
    for each in (*report.found.front, *given):
        best = each is report.found.best
        table.add_row(_named("▶ " if best else "  ", each, bold=best), *_figures(each))
    return table


def _columns(report: PlanReport) -> tuple[str, ...]:
    return "cost", "requests/s", "for each " + report.unit, "first token P90", "each token P90"


def _named(mark: str, each: Deployment, bold: bool) -> Text:
    name = Text(mark + pools(each), "bold" if bold else "")
    rest = traits(each)
    return name.append(f"  {rest}" if rest else "", "dim")


def _figures(each: Deployment) -> tuple[str, ...]:
    verdict = each.verdict
    return (
        ranged(each.cost.total),
        f"{each.goodput:.3g}",
        ranged(each.bcr, ".3g"),
        f"{verdict.ttft['p90']:.3g} s",
        f"{verdict.tpot['p90'] * 1e3:.3g} ms" if verdict.tpot else "",
    )


def _binds(found: WhatIf) -> Table:
    table = _table("What binds", "used", "goodput with more")
    for each in found.binds:
        table.add_row(Text(each.name, "bold" if each.binds else ""), f"{each.used:.0%}", f"{each.gain:+.1%}")
    return table


def _others(report: PlanReport) -> Table:
    found = report.what_if
    assert found is not None
    table = _table("What if", "requests/s", "change", "goodput / cost")
    for each in found.others:
        table.add_row(each.what, f"{each.goodput:.3g}", f"{each.change:+.1%}", f"{each.bcr:.3g}")
    for priced in found.priced:
        best = "the same is best" if priced.best is report.found.best else pools(priced.best)
        table.add_row(f"price of {priced.what}", f"{priced.best.goodput:.3g}", Text(best, "dim"), f"{priced.bcr:.3g}")
    return table


def _falls(found: WhatIf) -> Table:
    table = _table(
        "When hits fall",
        "cached at main",
        "requests/s",
        "goodput / cost",
        "relay's tokens",
        "first token P90, same rate",
    )
    for each in found.falls:
        table.add_row(
            f"× {each.kept:g}",
            f"{each.hits.get('main', 0.0):.1%}",
            f"{each.goodput:.3g}",
            f"{each.bcr:.3g}",
            f"{each.relay_share:.1%}",
            told(each.ttft),
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=bool(first))
    table.add_column(first)
    for title in others:
        table.add_column(title, justify="right" if first else "left")
    return table


def _write(path: Path | None, text: Callable[[], str], consoles: Consoles) -> None:
    if path is None:
        return
    try:
        path.write_text(text(), encoding="utf-8")
    except OSError as error:
        raise PddError("the result cannot be written", where=str(path), why=error.strerror or str(error)) from error
    consoles.err.print(f"written to {path}", markup=False)
