"""`fit`: what of parameters.yaml the tables tell. `--write` puts it there.

Bounded least squares on the logarithms of the parameters (SciPy's trust region reflective steps) over all figures of
`ttft`: objective.py has what is made small. Derivatives are differences of simulations with the same random numbers.
A whole number, `slots`, is tried one more and one less. The chance of one run is then taken anew, from where that
ended, until a round moves no parameter by more than `MOVED`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace

import numpy as np
import yaml
from line import first, payloads
from models import Fitted, as_dict, fitted
from objective import MODEL_ERROR, NAMES, SEEDS, Objective, Runs, Vector, at, bounds, point
from parameters import fitted_line, narrow
from parameters import parameters as all_parameters
from published import HERE, published
from refit import refit
from scipy.optimize import least_squares
from table import Table, off
from transfers import figures as transfer_figures
from transfers import run as transfer_run
from ttft import measured

STEPS = 12
"""At most, of one call of the optimiser."""
LESS, NEARER = 0.25, 1e-3
"""The optimiser stops at a step that changes the objective by less than the one share, or the point by the other."""
MOVED = 1.0
"""Of its standard deviation: what a round may move a parameter by for it to be the last."""
ROUNDS = 8
REFITS = 2
"""Steps of the others for another number of places."""
WORTH = 0.1
"""Of the objective, for the number to be changed."""


@dataclass(frozen=True)
class Found:
    numbers: Fitted
    chi2: float
    """The objective there."""
    jacobian: Vector
    """Derivatives of the residuals there."""

    @property
    def covariance(self) -> Vector:
        """Of the logarithms, by Gauss and Newton."""
        return np.asarray(np.linalg.pinv(self.jacobian.T @ self.jacobian, hermitian=True))


def descend(objective: Objective, start: Fitted) -> Found:
    """From `start`, with its `slots`, until the optimiser stops."""
    low, high = bounds()
    base = objective.residuals(start)
    found = least_squares(
        lambda x: base + objective.differences(at(start, x), start),
        np.clip(point(start), low + 1e-6, high - 1e-6),
        lambda x: objective.jacobian(at(start, x)),
        (low, high),
        x_scale="jac",
        ftol=LESS,
        xtol=NEARER,
        max_nfev=STEPS,
    )
    numbers = at(start, found.x)
    _say(f"  {numbers.slots} places: {2 * found.cost:.3f} after {found.nfev} evaluations: {found.message}")
    return Found(numbers, 2 * float(found.cost), np.asarray(found.jac))


def search(objective: Objective, start: Fitted) -> Found:
    """The same, over `slots` too."""
    best = descend(objective, start)
    for way in (1, -1):
        numbers = more_slots(best.numbers, way)
        base = objective.residuals(best.numbers)
        x, chi2 = refit(
            lambda x, best=best, base=base, numbers=numbers: base
            + objective.differences(at(numbers, x), best.numbers),
            point(numbers), best.jacobian, NAMES, REFITS,
        )  # fmt: skip
        _say(f"  {numbers.slots} places: {chi2:.3f}")
        if chi2 < base @ base - WORTH:
            return search(objective, at(numbers, x))
    return best


def more_slots(numbers: Fitted, more: int) -> Fitted:
    """With steps that keep IDC-PD's main workers as busy."""
    slots = numbers.slots + more
    return at(replace(numbers, slots=slots), np.log([numbers.h100 * slots / numbers.slots]), ["h100"])


def converge(runs: Runs, start: Fitted) -> tuple[Found, Objective]:
    """Rounds, until they end where they began."""
    found = None
    for number in range(ROUNDS):
        objective = Objective(runs, start)
        found = search(objective, start)
        spread = np.sqrt(np.diag(found.covariance))
        moved = np.abs(point(found.numbers) - point(start)) / spread
        _say(f"round {number + 1}: {found.chi2:.3f}, moved by at most {moved.max():.2f} ({NAMES[int(moved.argmax())]})")
        if moved.max() <= MOVED and found.numbers.slots == start.slots:
            return found, objective
        start = found.numbers
    raise SystemExit(f"no end after {ROUNDS} rounds")


def write(numbers: Fitted) -> None:
    """Into parameters.yaml."""
    path = HERE / "parameters.yaml"
    text = path.read_text()
    for name, value in as_dict(numbers).items():
        line = re.search(rf"(?m)^  deployments:.*\n(?:    .*\n)*?    {name}: (\S+)", text)
        assert line is not None, name
        if yaml.safe_load(line[1]) != value:
            text = text[: line.start(1)] + yaml.safe_dump(value).split()[0] + text[line.end(1) :]
    path.write_text(text)


def tables(writing: bool = False) -> list[Table]:
    runs = Runs()
    found, objective = converge(runs, fitted())
    if writing:
        write(found.numbers)
    return [_parameters(found), *residual_tables(objective, found), _line()]


def _parameters(found: Found) -> Table:
    covariance = found.covariance
    spread = np.sqrt(np.diag(covariance))
    correlation = covariance / np.outer(spread, spread)
    old, new = as_dict(fitted()), as_dict(found.numbers)
    rows = []
    for place, name in enumerate(NAMES):
        most, which = max(
            (abs(correlation[place, other]), NAMES[other]) for other in range(len(NAMES)) if other != place
        )
        rows.append(
            [
                name,
                f"{old[name]:.4g}",
                f"{new[name]:.4g}",
                f"{spread[place]:.0%}".replace("%", " %"),
                f"{which} ({most:.2f})",
            ]
        )
    rows.append(["slots", f"{old['slots']}", f"{new['slots']}", "", ""])
    singular = np.linalg.svd(found.jacobian, compute_uv=False)
    notes = [
        f"Objective {found.chi2:.1f}, of {len(measured())} figures and {len(NAMES) + 1} parameters; singular values of "
        "the derivatives: " + ", ".join(f"{value:.2g}" for value in singular)
    ]
    columns = ["", "began at", "found", "standard deviation", "goes most with"]
    return Table("Parameters", columns, rows, notes)


def residual_tables(objective: Objective, found: Found) -> list[Table]:
    """By figure, and by kind."""
    names = list(measured())
    logs = objective.runs.logs(found.numbers)
    missed = logs.mean(axis=0) - objective.theirs
    rows = []
    for place, (name, value) in enumerate(measured().items()):
        middle, low, high = np.exp([logs[:, place].mean(), *np.quantile(logs[:, place], [0.025, 0.975])])
        rows.append([
            name, f"{value:.4g}", f"{middle:.4g}", f"{low:.4g} to {high:.4g}", off(middle, value),
            f"{missed[place] / objective.deviation[place]:+.1f}",
        ])  # fmt: skip
    kinds = []
    for kind, error in MODEL_ERROR.items():
        there = [place for place, name in enumerate(names) if kind in name]
        chance = np.sqrt(np.mean(np.square(objective.chance[there])))
        rms = np.sqrt(np.mean(np.square(missed[there])))
        kinds.append([kind, f"{len(there)}", *(f"{value:.1%}".replace("%", " %") for value in (error, chance, rms))])
    return [
        Table("Residuals", ["", "report", "ours", "95 of 100 runs", "off", "over its deviation"], rows),
        Table("Deviations", ["", "figures", "the model's, chosen", "one run's", "off by (root mean square)"], kinds),
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


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
