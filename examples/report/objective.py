"""What `fit` makes small: how far all figures of `ttft` are from the report's, over what either side may be off by.

A figure's residual is the logarithm of ours (its mean over `SEEDS`) over the report's. Two things set them apart that
no parameter can help: the chance of the one run that the report shows (a standard deviation over `SEEDS`), and that the
model is not quite right: by `MODEL_ERROR`, the same for all figures of a kind. The objective is the sum of squared
residuals over both together. It takes figures for independent, though those of one run go up and down together: with
their covariances a fit leaves all TTFTs of a deployment wrong alike, as one run's might be, to have their ratios right.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from models import Fitted, as_dict, plugins
from numpy.typing import NDArray
from published import DEPLOYMENTS
from structures import STRUCTURES
from ttft import measured, rate, run

SEEDS = range(100, 112)
"""Others than those of `ttft`."""
PAIRED = SEEDS[:3]
"""Of them, those that differences are made of: the same random numbers on both sides."""
MODEL_ERROR: Mapping[str, float] = {"ttft": 0.05, "tpot": 0.03, "relay": 0.05}
"""Of a figure, by its kind: a standard deviation, relative. Chosen, not fitted."""
FEW = PAIRED[:2]
"""The same, where many places are looked at."""
Vector = NDArray[np.float64]
Task = tuple[str, Fitted, int, str]


@dataclass(frozen=True)
class Parameter:
    low: float
    high: float
    factor: float
    """By which it is changed for derivatives."""
    deployments: tuple[str, ...] = DEPLOYMENTS
    """Those that know of it."""


PARAMETERS: Mapping[str, Parameter] = {
    "pass_time": Parameter(0.01, 1.0, 1.15),
    "token_time": Parameter(1e-5, 1e-3, 1.02),
    "before": Parameter(0.05, 5.0, 1.1),
    "flow_rate": Parameter(1e6, 2.5e9, 1.1, ("cdc-pd", "pdd")),
    "lacking": Parameter(0.01, 0.5, 1.15, ("pdd",)),
    "h200": Parameter(0.02, 0.08, 1.03, ("cdc-pd", "pdd")),
    "h100": Parameter(0.02, 0.08, 1.01, ("idc-pd",)),
    "relay": Parameter(0.02, 0.08, 1.03, ("pdd",)),
    "growth": Parameter(0.005, 1.0, 1.5),
    "riding": Parameter(0.01, 1.0, 1.25, ("pdd",)),
}
"""Those that are found by steps. `slots`, which is whole, is found by trying."""
NAMES = tuple(PARAMETERS)


def point(numbers: Fitted, names: Sequence[str] = NAMES) -> Vector:
    """Logarithms of its parameters."""
    values = as_dict(numbers)
    return np.log([values[name] for name in names])


def at(numbers: Fitted, x: Vector, names: Sequence[str] = NAMES) -> Fitted:
    """It, with other parameters, of four digits as they are written."""
    values = {name: float(f"{np.exp(value):.4g}") for name, value in zip(names, x, strict=True)}
    return replace(numbers, **values)  # type: ignore[arg-type]


def bounds(names: Sequence[str] = NAMES) -> tuple[Vector, Vector]:
    """Of the logarithms."""
    both = np.log([(PARAMETERS[name].low, PARAMETERS[name].high) for name in names])
    return both[:, 0], both[:, 1]


def simulated(task: Task) -> dict[str, float]:
    """A deployment's figures."""
    name, numbers, seed, structure = task
    return run(STRUCTURES[structure].scenario(name, numbers), rate(name), seed, 0.0)


class Runs:
    """Simulations, each made once, as many at a time as there are cores."""

    def __init__(self) -> None:
        self._done: dict[Task, dict[str, float]] = {}
        plugins()  # Once, instead of in each process.

    def logs(self, numbers: Fitted, seeds: Sequence[int] = SEEDS, structure: str = "") -> Vector:
        """Logarithms of all figures that the report has: a row for each seed."""
        numbers = STRUCTURES[structure].complete(numbers)
        tasks = {(name, seed): self._task(name, numbers, seed, structure) for name in DEPLOYMENTS for seed in seeds}
        self._make(tasks.values())
        rows = []
        for seed in seeds:
            row = []
            for figure in measured():
                name, _, what = figure.partition(" ")
                # What passes before the simulation adds to all of its times.
                before = numbers.before if what.startswith("ttft") else 0.0
                row.append(np.log(self._done[tasks[name, seed]][what] + before))
            rows.append(row)
        return np.array(rows)

    def _make(self, tasks: Iterable[Task]) -> None:
        new = [task for task in dict.fromkeys(tasks) if task not in self._done]
        if new:
            with ProcessPoolExecutor(os.cpu_count()) as pool:
                self._done.update(zip(new, pool.map(simulated, new), strict=True))

    @staticmethod
    def _task(name: str, numbers: Fitted, seed: int, structure: str) -> Task:
        """Without what the deployment does not know of, so that it is simulated once."""
        unknown = {other: 1.0 for other, parameter in PARAMETERS.items() if name not in parameter.deployments}
        slots = numbers.slots if name == "idc-pd" else 1
        return name, replace(numbers, before=0.0, slots=slots, **unknown), seed, structure  # type: ignore[arg-type]


class Objective:
    """With the chance of one run as it is at some parameters."""

    def __init__(self, runs: Runs, numbers: Fitted) -> None:
        self.runs = runs
        self.theirs = np.log(list(measured().values()))
        self.chance = runs.logs(numbers).std(axis=0, ddof=1)
        """Of one run: a standard deviation of each figure."""
        model = [MODEL_ERROR[next(kind for kind in MODEL_ERROR if kind in name)] for name in measured()]
        self.deviation = np.sqrt(self.chance**2 * (1 + 1 / len(SEEDS)) + np.square(model))
        """With the model's, and that of our mean."""

    def off(self, numbers: Fitted) -> Vector:
        """By how much each figure is off: logarithms."""
        return self.runs.logs(numbers).mean(axis=0) - self.theirs

    def residuals(self, numbers: Fitted) -> Vector:
        """Over their standard deviations."""
        return self.off(numbers) / self.deviation

    def differences(
        self,
        numbers: Fitted,
        base: Fitted,
        structure: str = "",
        base_structure: str = "",
        seeds: Sequence[int] = PAIRED,
    ) -> Vector:
        """Of the residuals, from `base` on."""
        ours = self.runs.logs(numbers, seeds, structure) - self.runs.logs(base, seeds, base_structure)
        return np.asarray(ours.mean(axis=0) / self.deviation)

    def jacobian(
        self, numbers: Fitted, names: Sequence[str] = NAMES, structure: str = "", seeds: Sequence[int] = PAIRED
    ) -> Vector:
        """Derivatives of the residuals by logarithms of the parameters."""
        slopes = []
        values = as_dict(numbers)
        for name in names:
            parameter = PARAMETERS[name]
            factor = parameter.factor if values[name] * parameter.factor <= parameter.high else 1 / parameter.factor
            moved = replace(numbers, **{name: values[name] * factor})  # type: ignore[arg-type]
            slopes.append(self.differences(moved, numbers, structure, structure, seeds) / np.log(factor))
        return np.array(slopes).T
