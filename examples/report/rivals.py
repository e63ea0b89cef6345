"""`rivals`: other explanations of the tables. Each is fitted shortly, from where the model was found, and says then
which figures it misses."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from models import fitted
from objective import FEW, NAMES, Objective, Runs, at, point
from refit import refit
from structures import STRUCTURES
from table import Table
from ttft import measured

REFITS = 2
"""Steps, at most."""
MISSED = 0.15
"""A figure that is further off is named."""
WORST = 4
"""So many of them."""


def tables() -> list[Table]:
    numbers, runs = fitted(), Runs()
    objective = Objective(runs, numbers)
    base = objective.residuals(numbers)
    base_off = objective.off(numbers)
    slopes = objective.jacobian(numbers)
    rows = []
    for name, structure in STRUCTURES.items():
        start = replace(numbers, **(dict(structure.given) | dict(structure.start)))  # type: ignore[arg-type]
        chi2, missed, moved = float(base @ base), base_off, ""
        if name:
            free = structure.free(NAMES)
            # The model's derivatives will do, but where a parameter means something else.
            jacobian = objective.jacobian(start, free, name, FEW) if structure.start else slopes[:, _places(free)]
            x, chi2 = refit(
                lambda y, start=start, name=name, free=free: base
                + objective.differences(at(start, y, free), numbers, name, seeds=FEW),
                point(start, free), jacobian, free, REFITS,
            )  # fmt: skip
            end = at(start, x, free)
            missed = base_off + objective.differences(end, numbers, name, seeds=FEW) * objective.deviation
            changes = x - point(start, free)
            most = sorted(range(len(free)), key=lambda place: -abs(changes[place]))[:2]
            moved = ", ".join(f"{free[place]} x {np.exp(changes[place]):.2g}" for place in most)
            print(f"  {name}: {chi2:.1f}", file=sys.stderr, flush=True)
        off = sorted(zip(np.expm1(missed), measured(), strict=True), key=lambda one: -abs(one[0]))
        named = [f"{figure} {value:+.0%}".replace("%", " %") for value, figure in off if abs(value) > MISSED]
        more = f", and {len(named) - WORST} more" if len(named) > WORST else ""
        rows.append([structure.title, f"{chi2:.1f}", ", ".join(named[:WORST]) + more or "–", moved or "–"])
    columns = ["", "objective", f"off by more than {MISSED:.0%}".replace("%", " %"), "changed most"]
    return [Table("Rivals", columns, rows)]


def _places(names: Sequence[str]) -> list[int]:
    return [NAMES.index(name) for name in names]
