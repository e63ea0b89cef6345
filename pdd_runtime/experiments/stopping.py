"""How sure one has to be at each look at numbers that are still coming in.

Who looks at an interval after every few requests, and stops when it excludes "no difference", is wrong far more often
than the interval says. Here the chance to be wrong is spent over the looks, in proportion to the share of all requests
that is there (Kim and DeMets, Biometrika 74, 1987: the power family with exponent 1; Lan and DeMets, Biometrika 70,
1983), and intervals are as much wider as that takes: "repeated confidence intervals" (Jennison and Turnbull, J. R.
Statist. Soc. B 51, 1989), all of which hold at once, whatever made one stop.
"""

from __future__ import annotations

from functools import cache
from math import sqrt

import numpy as np
from numpy.typing import NDArray

_NODES = 96
"""Of the integration over where the sum can be at a look: gives boundaries to six digits."""
_WIDEST = 12.0
"""Standard errors; an interval that has to be wider cannot be told from one without ends."""

Array = NDArray[np.float64]


class Boundary:
    """Critical values of one test, two-sided, with normal increments: what estimates tend to as they have more
    numbers. Computed by integrating over the sum's density from look to look (Armitage, McPherson and Rowe, J. R.
    Statist. Soc. A 132, 1969)."""

    def __init__(self, error: float) -> None:
        """`error`: the chance that any of the intervals misses the truth, 0 to 1."""
        self.error = error
        self._share, self._spent = 0.0, 0.0
        self._at: Array = np.zeros(1)
        self._density: Array = np.ones(1)

    def look(self, share: float) -> float:
        """`share`: of all numbers there may be, those that are there now, above that of the look before, at most 1.
        Returns how many standard errors the interval reaches to either side."""
        if not self._share < share <= 1:
            raise ValueError(f"a look at {share:g} of all cannot follow one at {self._share:g}")
        from scipy.optimize import brentq
        from scipy.special import ndtr

        step, spend = sqrt(share - self._share), self.error * share - self._spent

        def left(critical: float) -> float:
            """The chance to be outside for the first time now."""
            end = critical * sqrt(share)
            outside = ndtr((self._at - end) / step) + ndtr((-end - self._at) / step)
            return float(self._density @ outside)

        critical = float(brentq(lambda value: left(value) - spend, 0.0, _WIDEST, xtol=1e-9))
        nodes, weights = _gauss()
        end = critical * sqrt(share)
        at = nodes * end
        kernel = np.exp(-0.5 * ((at[:, None] - self._at[None, :]) / step) ** 2) / (step * sqrt(2 * np.pi))
        # The density, times the width that each node stands for.
        self._density = (kernel @ self._density) * weights * end
        self._at, self._share, self._spent = at, share, self.error * share
        return critical


@cache
def _gauss() -> tuple[Array, Array]:
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return nodes, weights
