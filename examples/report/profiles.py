"""`profiles`: which parameters the tables tell. Each is set to other values, and all others are fitted again: where the
objective has risen by 3.84, the 95 % interval ends (a profile of the likelihood)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from fit import Found, more_slots
from models import Fitted, as_dict, fitted
from objective import FEW, NAMES, PARAMETERS, Objective, Runs, Vector, at, point
from refit import damped, refit
from table import Table

RISE = 3.84
"""Of the objective: of chi-squared with one degree of freedom, 95 % are less."""
WIDE = 3.0
"""An interval that spans such a factor, or ends at a bound, tells little."""
NEAR, AT_BOUND = 0.2, 0.02
"""Of the rise: close enough. Of a parameter's logarithm: no way to its bound."""
FAR = 0.25
"""Of a parameter's logarithm: no further at once, since Gauss and Newton's lines do not reach far."""
POINTS, REFITS = 2, 1
"""Values that are tried on each side, and steps of the others at each."""


@dataclass(frozen=True)
class End:
    value: float
    open: bool
    """The parameter's bound comes first."""


class Profile:
    """Around what parameters.yaml has."""

    def __init__(self, runs: Runs, numbers: Fitted) -> None:
        self.numbers = numbers
        self.objective = Objective(runs, numbers)
        self._base = self.objective.residuals(numbers)
        self.found = Found(numbers, float(self._base @ self._base), self.objective.jacobian(numbers))

    def residuals(self, numbers: Fitted) -> Vector:
        """As differences say: the same random numbers, and a sixth of the simulations."""
        return self._base + self.objective.differences(numbers, self.numbers, seeds=FEW)

    def end(self, name: str, way: int) -> End:
        """Where `name`'s interval ends, below (-1) or above."""
        place = NAMES.index(name)
        others = [other for other in NAMES if other != name]
        free = [NAMES.index(other) for other in others]
        jacobian, x = self.found.jacobian, point(self.numbers)
        parameter = PARAMETERS[name]
        bound = float(np.log(parameter.low if way < 0 else parameter.high))
        room = abs(bound - x[place])
        if room < AT_BOUND:
            return End(float(np.exp(bound)), True)
        # Half of the way to where it would end if the figures were straight lines.
        other_slopes = jacobian[:, free]
        share = np.linalg.lstsq(*damped(other_slopes, jacobian[:, place]))[0]
        left = jacobian[:, place] - other_slopes @ share
        distance = min(room, np.sqrt(RISE) / 2 / max(1e-9, float(np.linalg.norm(left))), FAR)
        tried = [(0.0, 0.0)]
        start = x[free]
        for _ in range(POINTS):
            set_ = at(self.numbers, np.array([x[place] + way * distance]), [name])
            moved = start - share * way * (distance - tried[-1][0])
            start, chi2 = refit(
                lambda y, set_=set_: self.residuals(at(set_, y, others)), moved, other_slopes, others, REFITS
            )
            rise = max(0.0, chi2 - self.found.chi2)
            tried.append((distance, float(np.sqrt(rise))))
            if abs(rise / RISE - 1) < NEAR or (distance >= room and rise < RISE):
                break
            distance = min(room, _crossing(tried))
        reached = _crossing(tried)
        return End(float(np.exp(x[place] + way * min(reached, room))), bool(reached >= room))

    def slots(self, way: int) -> int:
        """The last number of places whose objective has risen by less than `RISE`."""
        last = self.numbers
        while True:
            tried = more_slots(last, way)
            x, chi2 = refit(
                lambda y, tried=tried: self.residuals(at(tried, y)),
                point(tried),
                self.found.jacobian,
                NAMES,
                REFITS,
            )
            if chi2 - self.found.chi2 > RISE or abs(tried.slots - self.numbers.slots) > 8:
                return last.slots
            last = at(tried, x)


def _crossing(tried: list[tuple[float, float]]) -> float:
    """Where the root of the rise is that of `RISE`: between the nearest on both sides, else beyond the last, at most
    2.5 times as far."""
    goal = float(np.sqrt(RISE))
    below = max(one for one in tried if one[1] < goal)
    above = [one for one in tried if one[1] >= goal and one[0] > below[0]]
    if above:
        far = min(above)
        return below[0] + (far[0] - below[0]) * (goal - below[1]) / (far[1] - below[1])
    before = max(one for one in tried if one[0] < below[0])
    slope = max(1e-9, (below[1] - before[1]) / (below[0] - before[0]))
    return min(below[0] + (goal - below[1]) / slope, 2.5 * below[0])


def tables() -> list[Table]:
    numbers = fitted()
    profile = Profile(Runs(), numbers)
    values = as_dict(numbers)
    rows, untold = [], []
    for name in NAMES:
        low, high = profile.end(name, -1), profile.end(name, 1)
        told = not (low.open or high.open or high.value / low.value > WIDE)
        text = [
            f"{'below ' * (side < 0 and end.open)}{'above ' * (side > 0 and end.open)}{end.value:.4g}"
            for side, end in ((-1, low), (1, high))
        ]
        rows.append([name, f"{values[name]:.4g}", *text, f"{high.value / low.value:.2g}", "yes" if told else "no"])
        untold += [] if told else [name]
    few, many = profile.slots(-1), profile.slots(1)
    rows.append(["slots", f"{numbers.slots}", f"{few}", f"{many}", f"{many / few:.2g}", "yes"])
    notes = [
        f"The objective is {profile.found.chi2:.1f} there. Hardly told by the report: {', '.join(untold) or 'none'}."
    ]
    return [Table("What the report tells", ["", "value", "from", "to", "factor", "told"], rows, notes)]
