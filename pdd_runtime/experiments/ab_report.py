"""What an A/B test found, as `--format json` prints it. Times are seconds."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from pydantic import BaseModel, ConfigDict

from pdd_runtime.experiments.ab import Design, Result
from pdd_runtime.experiments.answers import Answers, compare_answers, should_be_equal
from pdd_runtime.experiments.outcome import METRICS
from pdd_runtime.experiments.paired import paired_test
from pdd_runtime.experiments.report import GraphReport, Measured, graph_report
from pdd_runtime.experiments.trial import Verdict, Word, verdict_of
from pdd_runtime.experiments.worth import Promise, Worth, worth
from pdd_runtime.planner import Workload
from pdd_runtime.planner.prices import Prices

Ends = tuple[float | None, float | None]
"""Of an interval; None: it has none, since too little is known."""


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Answer(_Form):
    """To one question about one graph, against the baseline."""

    verdict: Word
    decided_at: int | None
    """Requests of each graph after which it stood; null: it is open."""
    requests: int
    """That both answered and that have the metric."""
    blocks: int
    """That are independent of each other."""
    base: float | None
    other: float | None
    difference: float | None
    difference_interval: Ends
    ratio: float | None
    """`other / base`."""
    ratio_interval: Ends


class Failures(_Form):
    """Requests that one of two graphs failed."""

    base_only: int
    other_only: int
    p: float | None
    """How likely such a split is where both fail alike: McNemar's exact test. Null: none failed at one only."""


class Comparison(_Form):
    """One graph against the baseline."""

    verdict: Word | None
    """Over all questions; null: better in some, worse in others."""
    answers: dict[str, Answer]
    """By question, as `ttft.p90`."""
    paired_p: dict[str, float | None]
    """By metric, of Wilcoxon's signed-rank test of the pairs, for one look: beside the verdicts, not under them."""
    texts: Answers
    failures: Failures


class Side(GraphReport):
    """One graph."""

    source: str
    """Its file, or where it runs."""
    graph: str | None
    worth: Worth


class AbReport(_Form):
    """The whole."""

    workload: Workload
    seed: int
    together: bool
    driver: str
    requests: int
    """That each graph was asked."""
    planned: int
    """The most that it would have been asked."""
    looks: list[int]
    """After how many requests there was a look at the numbers."""
    stopped: str | None
    """Why it ended before all requests were asked."""
    minimum_effect: float
    error: float
    """The chance that any verdict is wrong."""
    promise: dict[str, float | None]
    baseline: str
    graphs: dict[str, Side]
    comparisons: dict[str, Comparison]

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = self.model_dump(mode="json")
        return data

    @property
    def failed(self) -> bool:
        """A graph has answered nothing."""
        return any(graph.errors == graph.requests for graph in self.graphs.values())


def ab_report(
    design: Design, result: Result, sources: Mapping[str, str], promise: Promise, prices: Prices | None = None
) -> AbReport:
    """`sources`: where each graph came from. Raises `PriceError` where `prices` lack what a graph has."""
    trial = result.trial
    base, *others = result.measured
    early = trial.asked < trial.requests
    return AbReport(
        workload=design.workload,
        seed=design.seed,
        together=design.together,
        driver=design.driver,
        requests=trial.asked,
        planned=trial.requests,
        looks=trial.looks,
        stopped=(result.failure or ("every question has its verdict" if trial.decided else "interrupted"))
        if early
        else None,
        minimum_effect=design.rules.minimum_effect,
        error=design.rules.error,
        promise={"ttft": promise.ttft, "tpot": promise.tpot},
        baseline=base.name,
        graphs={one.name: _side(one, design, result, sources[one.name], promise, prices) for one in result.measured},
        comparisons={one.name: _comparison(base, one, result) for one in others},
    )


def _side(one: Measured, design: Design, result: Result, source: str, promise: Promise, prices: Prices | None) -> Side:
    told = graph_report(one, design.workload, result.trial.asked)
    seconds = result.seconds[one.name]
    gain = worth(one.outcomes, seconds, promise, one.graph, prices, told.link_bytes)
    # Between its blocks a graph had nothing to do.
    told.seconds = seconds
    told.rate.achieved = (told.requests - told.errors) / seconds if seconds else None
    return Side(
        **{name: getattr(told, name) for name in GraphReport.model_fields},
        source=source,
        graph=None if one.graph is None else one.graph.name,
        worth=gain,
    )


def _comparison(base: Measured, other: Measured, result: Result) -> Comparison:
    verdicts = result.trial.verdicts[other.name]
    return Comparison(
        verdict=verdict_of(verdicts.values()),
        answers={str(question): _answer(verdict) for question, verdict in verdicts.items()},
        paired_p={metric: paired_test(base.values(metric), other.values(metric)) for metric in METRICS},
        texts=compare_answers(base.outcomes, other.outcomes, should_be_equal(base.graph, other.graph)),
        failures=_failures(base, other),
    )


def _answer(verdict: Verdict) -> Answer:
    effect = verdict.effect
    return Answer(
        verdict=verdict.word,
        decided_at=verdict.decided_at,
        requests=0 if effect is None else effect.requests,
        blocks=0 if effect is None else effect.blocks,
        base=None if effect is None else effect.base,
        other=None if effect is None else effect.other,
        difference=None if effect is None else effect.difference,
        difference_interval=_ends(verdict.difference_interval),
        ratio=None if effect is None else effect.ratio,
        ratio_interval=_ends(verdict.ratio_interval),
    )


def _ends(interval: tuple[float, float]) -> Ends:
    """None for both where one is infinite: nothing is known then."""
    low, high = interval
    return (low, high) if isfinite(low) and isfinite(high) else (None, None)


def _failures(base: Measured, other: Measured) -> Failures:
    from scipy.stats import binomtest

    ours, theirs = ({one.key for one in side.outcomes if one.error is not None} for side in (base, other))
    left, right = len(ours - theirs), len(theirs - ours)
    return Failures(
        base_only=left,
        other_only=right,
        p=float(binomtest(left, left + right).pvalue) if left + right else None,
    )
