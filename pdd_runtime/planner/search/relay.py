"""Does a relay pay? The best deployment without one, where all requests go P-MD, against the best with one."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pdd_runtime.planner.prices import Range
from pdd_runtime.planner.search.deployment import Deployment, interval
from pdd_runtime.planner.search.setting import Setting
from pdd_runtime.planner.search.worth import SHORT

Verdict = Literal["pays", "does not pay", "no difference shown", "not known"]
By = Literal["goodput / cost", "goodput", "cost"]
"""What decides: the ratio, the goodput for a budget, or the cost of a goodput that is needed."""


@dataclass(frozen=True)
class Difference:
    """What the deployment with a relay has more, as a part of what the one without has; below 0: less."""

    middle: float
    interval: Range
    """95 % over the seeds, which both have in common, and over the range of prices where they count."""


@dataclass(frozen=True)
class RelayPays:
    """The answer, under the plan's promise and by what the plan asks for."""

    verdict: Verdict
    by: By
    without: Deployment | None
    """The best without a relay; None: there is none, and `why` says why."""
    beside: Deployment | None
    """The best with one; None: likewise."""
    why: str = ""
    """Why one of them is not there, or why it is not shown although they differ."""
    compared: Literal["", "without", "with"] = ""
    """Which of the two the plan does not let choose: it was simulated for this only."""
    goodput: Difference | None = None
    """None: there are not both."""
    cost: Difference | None = None
    """Of the goodput that is needed, or of what each serves."""
    bcr: Difference | None = None


def relay_pays(setting: Setting, best: Mapping[bool, Deployment], faults: Mapping[bool, str]) -> RelayPays:
    """`best`: by whether it has a relay. `faults`: what the search said where it found none."""
    spec = setting.plan.spec
    compared: Literal["", "without", "with"] = ""
    if setting.compared:
        compared = "with" if setting.relayed(setting.choices) else "without"
    without, beside = best.get(False), best.get(True)
    by: By = "cost" if spec.goodput is not None else "goodput" if spec.budget is not None else "goodput / cost"
    if setting.lacking:
        return RelayPays("not known", by, without, beside, setting.lacking)
    if without is None or beside is None:
        why = faults.get(without is not None, "measured for longer, it keeps the promise at no rate")
        return RelayPays("pays" if without is None else "does not pay", by, without, beside, why, compared)
    goodput, cost, ratio = _differences(spec.goodput, without, beside)
    verdict, why = _verdict({"goodput / cost": ratio, "goodput": goodput, "cost": cost}[by].interval, by == "cost"), ""
    if by == "cost" and verdict == "no difference shown":
        verdict = _verdict(goodput.interval, False) if cost.interval == Range(0.0, 0.0) else verdict
    elif spec.goodput is not None:
        cheaper = beside if verdict == "pays" else without
        if cheaper.interval.low < (1 - SHORT) * spec.goodput:
            low, high = cheaper.interval
            why = f"the cheaper one serves {low:.3g} to {high:.3g} requests/s, perhaps too few; more seeds would tell"
            verdict = "no difference shown"
    return RelayPays(verdict, by, without, beside, why, compared, goodput, cost, ratio)


def _differences(
    needed: float | None, without: Deployment, beside: Deployment
) -> tuple[Difference, Difference, Difference]:
    """Goodput, cost, and their ratio."""
    costs = [deployment.spent(needed or deployment.goodput) for deployment in (without, beside)]
    spent = [b / a - 1 for a, b in zip(*costs, strict=True)]
    cost = Difference(costs[1].middle / costs[0].middle - 1, Range(min(spent), max(spent)))
    seeds = sorted(without.rates.keys() & beside.rates.keys())
    served = [beside.rates[seed] / without.rates[seed] - 1 for seed in seeds]
    goodput = Difference(statistics.fmean(served), interval(served))
    # At one end of the prices after the other: both are paid in the same.
    ratios = [
        [
            beside.rates[seed] / beside.spent(beside.rates[seed])[end]
            / (without.rates[seed] / without.spent(without.rates[seed])[end])
            - 1
            for seed in seeds
        ]
        for end in (0, 1)
    ]  # fmt: skip
    ends = [interval(some) for some in ratios]
    middle = statistics.fmean(statistics.fmean(some) for some in ratios)
    ratio = Difference(middle, Range(min(end.low for end in ends), max(end.high for end in ends)))
    return goodput, cost, ratio


def _verdict(interval: Range, less: bool) -> Verdict:
    """`less`: less is better."""
    if interval.low <= 0 <= interval.high:
        return "no difference shown"
    return "pays" if (interval.low > 0) != less else "does not pay"
