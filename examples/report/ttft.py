"""`ttft`: TTFT, TPOT and RLD's share of the three deployments, under the report's workload."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np
from intervals import Interval, interval
from models import Fitted, fitted, scenario
from parameters import skewed
from published import DEPLOYMENTS, published
from table import Table, off

from pdd_runtime.planner.simulate import Outcome, Scenario, simulate

REQUESTS = 4394
"""Of a run: as many as the report's tokens are, at 1,000 a request."""
WARMUP = 3000
"""Requests before them: until long answers have filled the batches."""
SEEDS = range(12)
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass
class Seen:
    """A run's times, as the report has them: there a request's first token comes from the worker that decodes, here it
    is the second, since prefill's own is shown at once."""

    before: float
    """Seconds that pass before what is simulated."""
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    relay: int = 0
    made: int = 0
    """Tokens that relay and main made."""

    def __call__(self, outcome: Outcome) -> None:
        self.relay += outcome.relay_tokens
        self.made += outcome.output - 1
        if outcome.tt2 is not None and outcome.e2e is not None:
            self.ttft.append(self.before + outcome.tt2)
            if outcome.output > 2:
                self.tpot.append((outcome.e2e - outcome.tt2) / (outcome.output - 2))

    def figures(self) -> dict[str, float]:
        found = {"ttft mean": float(np.mean(self.ttft)), "relay": self.relay / self.made}
        for name, q in QUANTILES.items():
            found[f"ttft {name}"] = float(np.quantile(self.ttft, q))
            found[f"tpot {name}"] = float(np.quantile(self.tpot, q))
        return found


def rate(name: str) -> float:
    """Requests/s that the report asks of it: its goodput, and of CDC-PD PDD's."""
    goodput: dict[str, float] = published()["goodput"]
    return goodput.get(name, goodput["pdd"])


def run(
    case: Scenario,
    requests_a_second: float,
    seed: int,
    before: float,
    requests: int = REQUESTS,
    warmup: int = WARMUP,
) -> dict[str, float]:
    """The figures of one run."""
    seen = Seen(before)
    workload = skewed().model_copy(update={"rate": requests_a_second})
    simulate(case, workload, requests=requests, seed=seed, warmup=warmup, observe=seen)
    return seen.figures()


def measured() -> dict[str, float]:
    """What the report measured, by `DEPLOYMENT FIGURE`."""
    theirs = published()
    found = {
        f"{name} {metric} {statistic}": value
        for metric in ("ttft", "tpot")
        for name, row in theirs[metric].items()
        for statistic, value in row.items()
    }
    relay, main = theirs["tokens"]["relay"], theirs["tokens"]["main"]
    return found | {"pdd relay": relay / (relay + main)}


def simulated(
    numbers: Fitted,
    seeds: Sequence[int] = SEEDS,
    requests: int = REQUESTS,
    warmup: int = WARMUP,
    names: Sequence[str] = DEPLOYMENTS,
) -> list[dict[str, float]]:
    """The same figures, by seed; of some deployments only."""
    runs = []
    for seed in seeds:
        found = {}
        for name in names:
            figures = run(scenario(name, numbers), rate(name), seed, numbers.before, requests, warmup)
            found |= {f"{name} {figure}": value for figure, value in figures.items()}
        runs.append({name: found[name] for name in measured() if name in found})
    return runs


def tables() -> list[Table]:
    theirs, numbers = measured(), fitted()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        runs = [one for part in pool.map(simulated, repeat(numbers), [(seed,) for seed in SEEDS]) for one in part]
    ours = {name: interval([run[name] for run in runs]) for name in theirs}
    rows = []
    for name in DEPLOYMENTS:
        for metric, scale, digits, unit in (("ttft", 1.0, 1, "s"), ("tpot", 1e3, 1, "ms")):
            cells = [
                _cell(ours, theirs, f"{name} {metric} {statistic}", scale, digits) for statistic in (*QUANTILES, "mean")
            ]
            if any(cell != "–" for cell in cells):
                rows.append([f"{name.upper()} {metric.upper()}, {unit}", *cells])
    rows.append(["PDD: tokens by RLD, %", _cell(ours, theirs, "pdd relay", 1e2, 1), "", "", ""])
    notes = [
        f"Ours [95 of 100 runs] / the report's, and by how much ours is off. {len(SEEDS)} runs of {REQUESTS} requests.",
        "One set of parameters for all rows: parameters.yaml, `fitted`.",
    ]
    return [Table("TTFT, TPOT and RLD's share", ["", "P50", "P90", "P99", "mean"], rows, notes)]


def _cell(ours: Mapping[str, Interval], theirs: Mapping[str, float], name: str, scale: float, digits: int) -> str:
    if name not in theirs:
        return "–"
    reported = theirs[name]
    return f"{ours[name].text(scale, digits)} / {reported * scale:.3g} ({off(ours[name].middle, reported)})"
