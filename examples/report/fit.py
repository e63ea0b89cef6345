"""`fit`: what of parameters.yaml the tables tell, and how well.

A Gauss-Newton step on the logarithms of all figures of `ttft`, each of the same weight. A figure's derivatives are
differences of simulations with the same random numbers. One run of as many requests as the report's shows each figure
with an error, by which the parameters that would be found have one too: the intervals are those errors, carried over
(the delta method).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
from line import first, payloads
from models import Fitted, as_dict, fitted, scenario
from numpy.typing import NDArray
from parameters import fitted_line, narrow
from parameters import parameters as all_parameters
from published import DEPLOYMENTS, published
from table import Table, off
from transfers import figures as transfer_figures
from transfers import run as transfer_run
from ttft import measured, rate, run

SEEDS = range(100, 108)
"""Others than those of `ttft`."""
PAIRED = 3
"""Of them, those that derivatives are made of."""
STEPS: Mapping[str, tuple[float, tuple[str, ...]]] = {
    "pass_time": (1.15, DEPLOYMENTS),
    "token_time": (1.02, DEPLOYMENTS),
    "before": (1.1, DEPLOYMENTS),
    "flow_rate": (1.1, ("cdc-pd", "pdd")),
    "lacking": (1.15, ("pdd",)),
    "slots": (30 / 29, ("idc-pd",)),
    "h200": (1.03, ("cdc-pd", "pdd")),
    "h100": (1.01, ("idc-pd", "pdd")),
    "growth": (1.5, DEPLOYMENTS),
}
"""By how much each parameter is changed, and which deployments it concerns."""
Vector = NDArray[np.float64]
Task = tuple[str, Fitted, int]


def figures(task: Task) -> dict[str, float]:
    """Logarithms of a deployment's figures that the report has."""
    name, numbers, seed = task
    wanted = {figure.removeprefix(f"{name} ") for figure in measured() if figure.startswith(f"{name} ")}
    found = run(scenario(name, numbers), rate(name), seed, numbers.before)
    return {f"{name} {figure}": float(np.log(value)) for figure, value in found.items() if figure in wanted}


class Runs:
    """Simulations, each made once, as many at a time as there are cores."""

    def __init__(self) -> None:
        self._done: dict[Task, dict[str, float]] = {}

    def make(self, tasks: Iterable[Task]) -> None:
        new = [task for task in dict.fromkeys(tasks) if task not in self._done]
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            self._done.update(zip(new, pool.map(figures, new), strict=True))

    def vector(
        self, numbers: Fitted, seed: int, changed: tuple[str, ...] = DEPLOYMENTS, base: Fitted | None = None
    ) -> Vector:
        """All figures; of deployments that are not `changed`, those of `base`."""
        found: dict[str, float] = {}
        for name in DEPLOYMENTS:
            found |= self._done[name, numbers if name in changed or base is None else base, seed]
        return np.array([found[name] for name in measured()])


def changed(numbers: Fitted, name: str) -> Fitted:
    value = getattr(numbers, name)
    return replace(numbers, **{name: value + 1 if name == "slots" else value * STEPS[name][0]})


def tasks(numbers: Fitted) -> list[Task]:
    """All that a step needs."""
    made = [(name, numbers, seed) for seed in SEEDS for name in DEPLOYMENTS]
    for parameter, (_, names) in STEPS.items():
        made += [(name, changed(numbers, parameter), seed) for seed in SEEDS[:PAIRED] for name in names]
    return made


def step(numbers: Fitted, runs: Runs) -> tuple[Fitted, Vector, Vector, Vector]:
    """The next parameters; the errors of their logarithms (covariance); the figures' mean logarithms at `numbers`, and
    what they change by, by parameter."""
    runs.make(tasks(numbers))
    each = np.array([runs.vector(numbers, seed) for seed in SEEDS])
    slopes = []
    for parameter, (factor, names) in STEPS.items():
        moved = [
            runs.vector(changed(numbers, parameter), seed, names, numbers) - runs.vector(numbers, seed)
            for seed in SEEDS[:PAIRED]
        ]
        slopes.append(np.mean(moved, axis=0) / np.log(factor))
    jacobian = np.array(slopes).T
    solve = np.linalg.pinv(jacobian, rcond=1e-3)
    move = solve @ (np.log(list(measured().values())) - each.mean(axis=0))
    values = as_dict(numbers)
    found = {
        name: values[name] * float(np.exp(np.clip(delta, -0.3, 0.3))) for name, delta in zip(STEPS, move, strict=True)
    }
    found["slots"] = round(found["slots"])
    errors = solve @ np.cov(each.T) @ solve.T
    return replace(numbers, **found), errors, each, jacobian  # type: ignore[arg-type]


def tables() -> list[Table]:
    numbers, runs = fitted(), Runs()
    found, errors, each, jacobian = step(numbers, runs)
    spread = np.sqrt(np.diag(errors))
    old, new = as_dict(numbers), as_dict(found)
    correlation = errors / np.outer(spread, spread)
    names = list(STEPS)
    parameters = []
    for place, name in enumerate(names):
        others = [(abs(correlation[place, other]), names[other]) for other in range(len(names)) if other != place]
        most, which = max(others)
        low, high = old[name] * np.exp(-1.96 * spread[place]), old[name] * np.exp(1.96 * spread[place])
        parameters.append(
            [name, f"{old[name]:.4g}", f"{low:.4g} to {high:.4g}", f"{new[name]:.4g}", f"{which} ({most:.2f})"]
        )
    theirs = measured()
    residuals = []
    for place, (name, value) in enumerate(theirs.items()):
        logs = each[:, place]
        middle, low, high = np.exp([logs.mean(), *np.quantile(logs, [0.025, 0.975])])
        inside = "yes" if low <= value <= high else "no"
        residuals.append(
            [name, f"{value:.4g}", f"{middle:.4g}", f"{low:.4g} to {high:.4g}", off(middle, value), inside]
        )
    singular = np.linalg.svd(jacobian, compute_uv=False)
    notes = [
        f"{len(theirs)} figures, {len(names)} parameters; singular values of the derivatives: "
        + ", ".join(f"{value:.2g}" for value in singular)
    ]
    return [
        Table("Parameters", ["", "value", "95 % interval", "after one more step", "goes most with"], parameters, notes),
        Table("Residuals", ["", "report", "ours", "95 of 100 runs", "off", "within them"], residuals),
        _line(),
    ]


def _line() -> Table:
    """The line's parameters, each by one figure."""
    everything, theirs = all_parameters(), published()
    given, rtt, used = everything["given"], everything["assumed"]["rtt"], fitted_line()
    size = float(np.mean(first(payloads(narrow(), 0, given["kv"]), 100_000)))
    handoff = theirs["handoff"]
    least = handoff["kv"]["min"] - handoff["kv"]["copies"] - rtt / 2

    def mean(kind: str, figure: str, **changes: float) -> float:
        runs = [transfer_run(kind, fitted_line(**changes), seed) for seed in SEEDS]
        return float(np.mean([transfer_figures(each)[figure] for each in runs]))

    pool = {value: mean("skewed", "pool", fresh=value) for value in (used.fresh - 0.02, used.fresh, used.fresh + 0.02)}
    queueing = {value: mean("narrow", "queueing", transfers=value) for value in (6000, used.transfers, 10_000)}
    rows = [
        ["connections", f"{used.connections}", "narrow P50 x line / mean payload",
         f"{theirs['transfers']['narrow']['p50'] * given['line'] / size:.1f}"],
        ["flow_rate", f"{used.flow_rate:.3g}", "payload of a handoff / its least time, less copies and half an RTT",
         f"{handoff['kv']['payload'] / least:.3g}"],
        ["extend", f"{everything['fitted']['extend']:g}", "mean time of a handoff by IDs, less half an RTT",
         f"{handoff['tokens']['mean'] - rtt / 2:.3g}"],
        ["fresh", f"{used.fresh:g}", f"skewed connections in use: {theirs['transfers']['skewed']['pool']:.1%}",
         ", ".join(f"{value:g}: {share:.1%}" for value, share in pool.items())],
        ["transfers", f"{used.transfers}", f"narrow queueing: {theirs['transfers']['narrow']['queueing']:.2f} s",
         ", ".join(f"{value}: {seconds:.2f} s" for value, seconds in queueing.items())],
    ]  # fmt: skip
    return Table("The transfer test's line", ["", "value", "by", "which gives"], rows)
