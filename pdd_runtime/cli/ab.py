"""`pdd-runtime ab`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pdd_runtime.cli.ab_tables import ab_tables, ab_warnings
from pdd_runtime.cli.bars import Bars
from pdd_runtime.cli.console import FAILED, OK, USAGE, Consoles
from pdd_runtime.cli.interrupt import run
from pdd_runtime.cli.report_file import Told, deliver, prepare
from pdd_runtime.cli.targets import UsageError, ab_targets
from pdd_runtime.experiments import WorkloadError, read_workload, require_scipy
from pdd_runtime.experiments.ab import AbTest, Design
from pdd_runtime.experiments.ab_html import ab_html
from pdd_runtime.experiments.ab_report import ab_report
from pdd_runtime.experiments.aiperf import AiperfError
from pdd_runtime.experiments.paired import Question
from pdd_runtime.experiments.trial import Rules, Trial, Word
from pdd_runtime.experiments.worth import Promise, WorthError, read_prices
from pdd_runtime.planner.cost import PriceError, graph_cost
from pdd_runtime.plugins import load_plugins


@dataclass(frozen=True)
class AbOptions:
    """What `ab` was asked for."""

    graphs: Sequence[str]
    """Files and URLs."""
    workload: str
    requests: int
    seed: int
    together: bool
    rounds: int
    block: int | None
    decide: str
    effect: float
    error: float
    early: bool
    slo: str | None
    prices: Path | None
    overrides: Sequence[str]
    driver: Literal["own", "aiperf"]
    wait_timeout: float | None
    """Seconds that each graph gets to be ready."""
    form: Literal["table", "json", "html"]
    out: Path | None


def run_ab(options: AbOptions, consoles: Consoles) -> int:
    """Measure, print or write the report. Returns the exit code: 1 where a graph answered nothing, or the test broke
    off."""
    require_scipy()
    try:
        targets = ab_targets(options.graphs, options.overrides, consoles)
        promise = Promise.of(targets[0].graph) if options.slo is None else Promise.parse(options.slo)
        prices = None if options.prices is None else read_prices(options.prices)
        for target in targets:
            if prices is not None and target.graph is not None:
                graph_cost(target.graph, prices)
        design = _design(options)
        bars = AbBars(consoles.err, design.requests)
        test = AbTest(targets, design, load_plugins(), bars, options.wait_timeout)
    except (WorkloadError, UsageError, WorthError, PriceError, AiperfError) as error:
        consoles.error(error)
        return USAGE
    prepare(options.out)
    try:
        with bars:
            result = run(test.run())
    except KeyboardInterrupt:
        if not test.trial.asked:
            raise
        # Whoever ends a test early still wants to know what it has shown.
        result = test.result()
    made = ab_report(design, result, {target.name: target.source for target in targets}, promise, prices)
    told = Told(lambda: ab_tables(made), lambda: ab_html(made, result), made.to_json)
    deliver(told, options.form, options.out, consoles)
    for word in ab_warnings(made):
        consoles.err.print(word, style="yellow", markup=False)
    return FAILED if made.failed or result.failure else OK


def _design(options: AbOptions) -> Design:
    """Raises `WorkloadError` and `UsageError`."""
    try:
        questions = tuple(dict.fromkeys(map(Question.parse, options.decide.split(","))))
    except ValueError as error:
        raise UsageError("--decide cannot be read", why=str(error), fix="--decide ttft.p90,tpot.p50") from error
    return Design(
        workload=read_workload(options.workload),
        requests=options.requests,
        seed=options.seed,
        rules=Rules(questions, options.effect, options.error, options.early),
        together=options.together,
        rounds=options.rounds,
        block=options.block,
        driver=options.driver,
    )


class AbBars(Bars):
    """Says what every look has shown, too."""

    def looked(self, trial: Trial) -> None:
        verdicts = [verdict for found in trial.verdicts.values() for verdict in found.values()]
        decided = sum(verdict.word is not Word.open for verdict in verdicts)
        text = f"after {trial.asked} of {trial.requests} requests: {decided} of {len(verdicts)} verdicts"
        self.tell(text)
