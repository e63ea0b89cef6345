"""`better`: the report's PDD beside ours, on the same hardware and line, for the same requests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from intervals import interval
from models import Fitted, fitted, pools, scenario, with_routing
from parameters import fitted_line, skewed
from published import deployment
from table import Table
from transfers import SEEDS as RUNS
from transfers import figures as transfer_figures
from transfers import run as transfer_run
from ttft import REQUESTS

from pdd_runtime.planner.simulate import LinkModel, Outcome, Scenario, simulate

SEEDS = range(8)
WARMUP = 1500
STREAMS = 8
"""Connections that one of our transfers is spread over."""
PROMPTS = 16
"""Prompts that share a pass of our prefill workers."""


def cases(numbers: Fitted) -> dict[str, Scenario]:
    """Each adds to the one before."""
    graph = deployment("pdd")
    theirs = scenario("pdd", numbers)
    line = theirs.link_model("wan")
    steps: dict[str, dict[str, Any]] = {
        "the report's": {},
        "KV is sent as it is made": {"overlap": True},
        f"… over {STREAMS} connections, shortest first": {"links": {"wan": _shortest(line)}},
        "… predictive routing": {"graph": with_routing(graph, "predictive", budget="100ms")},
        "… prompts share passes, shortest first": {"pools": _sharing(numbers)},
    }
    made, changes = {}, dict[str, Any]()
    for label, more in steps.items():
        changes |= more
        made[label] = scenario("pdd", numbers, **changes)
    return made


def _shortest(line: LinkModel) -> LinkModel:
    return replace(line, streams=STREAMS, discipline="shortest")


def _sharing(numbers: Fitted) -> Mapping[str, Any]:
    models = dict(pools("pdd", numbers))
    models["prefill"] = replace(models["prefill"], batch_limit=PROMPTS)
    return models


@dataclass
class Waits:
    """What users wait for, in seconds."""

    before: float
    second: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)

    def __call__(self, outcome: Outcome) -> None:
        if outcome.ttft is not None and outcome.tt2 is not None and outcome.longest_gap is not None:
            self.first.append(self.before + outcome.ttft)
            self.second.append(self.before + outcome.tt2)
            self.gap.append(outcome.longest_gap)


def run(case: Scenario, before: float, seed: int, requests: int = REQUESTS) -> dict[str, float]:
    """One run of it."""
    waits = Waits(before)
    found = simulate(case, skewed(), requests=requests, seed=seed, warmup=min(WARMUP, requests), observe=waits)
    return {
        **{f"second p{q}": float(np.quantile(waits.second, q / 100)) for q in (50, 90, 99)},
        "first p90": float(np.quantile(waits.first, 0.9)),
        "gap p99": float(np.quantile(waits.gap, 0.99)),
        "relay": found.relay_share,
    }  # fmt: skip


def _all(seed: int) -> dict[str, dict[str, float]]:
    numbers = fitted()
    return {label: run(case, numbers.before, seed) for label, case in cases(numbers).items()}


def tables() -> list[Table]:
    rows = []
    base: list[dict[str, float]] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(_all, SEEDS))
    for label in found[0]:
        runs = [one[label] for one in found]
        base = base or runs
        ratio = interval([ours["second p90"] / theirs["second p90"] for ours, theirs in zip(runs, base, strict=True)])
        mean = {key: float(np.mean([each[key] for each in runs])) for key in runs[0]}
        rows.append([
            label,
            *(f"{mean[key]:.1f}" for key in ("second p50", "second p90", "second p99")),
            ratio.text(1, 2),
            f"{mean['first p90']:.1f}",
            f"{mean['gap p99']:.2f}",
            f"{mean['relay']:.1%}".replace("%", " %"),
        ])  # fmt: skip
    columns = [
        "PDD, 11.5 requests/s", "TTFT P50, s", "P90", "P99", "P90 against the report's", "first token P90, s",
        "longest gap P99, s", "tokens by RLD",
    ]  # fmt: skip
    notes = [
        f"{len(SEEDS)} runs of {REQUESTS} requests, the same ones for each row. TTFT as the report has it: to "
        "the first token of a worker that decodes. Each row adds to the one above."
    ]
    return [Table("Where we beat it", columns, rows, notes), _transfers()]


def _transfers() -> Table:
    line = fitted_line()
    rows = []
    for kind in ("skewed", "narrow"):
        for discipline, label in (("fair", "TCP's share"), ("shortest", "shortest first")):
            runs = [transfer_figures(transfer_run(kind, line, seed, discipline=discipline)) for seed in RUNS]
            cells = [
                interval([each[key] for each in runs]).text(1e3, 0) for key in ("total p50", "total p90", "total p99")
            ]
            rows.append([f"{kind}: {label}", *cells])
    columns = ["80 requests/s over 20 Gbit/s", "P50, ms", "P90, ms", "P99, ms"]
    return Table("The transfer test, with the wait for a connection", columns, rows)
