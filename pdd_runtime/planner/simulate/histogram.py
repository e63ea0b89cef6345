"""Many numbers in little memory: counts in bins whose borders grow by a constant ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RATIO = 1.01
"""Of two borders; a quantile is wrong by at most the root of it, half a percent."""
LEAST, MOST = 1e-6, 1e7
"""What is below or above counts as these."""
_LOG = math.log(RATIO)
_BINS = math.ceil(math.log(MOST / LEAST) / _LOG) + 1


class Histogram:
    """Of numbers that are not negative."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.most = 0.0
        self._bins: NDArray[np.int64] = np.zeros(_BINS + 1, np.int64)

    def add(self, values: Sequence[float]) -> None:
        """Take many at once."""
        if not len(values):
            return
        array = np.asarray(values, float)
        self.count += len(array)
        self.total += float(array.sum())
        self.most = max(self.most, float(array.max()))
        self._bins += np.bincount(bins(array), minlength=_BINS + 1)

    @property
    def mean(self) -> float | None:
        """None: there was none."""
        return self.total / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """The least number that at least the share `q` of all does not exceed; None: there was none."""
        if not self.count:
            return None
        below = np.cumsum(self._bins)
        place = int(np.searchsorted(below, max(1, math.ceil(q * self.count))))
        return min(self.most, middle(place))

    def share_within(self, most: float) -> float:
        """How many of 1 were at most that; 1 where there was none."""
        if not self.count:
            return 1.0
        return float(self._bins[: int(bins(np.array([most]))[0]) + 1].sum()) / self.count


def bins(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """The bin of each; that of 0 is the first."""
    clipped = np.clip(values, LEAST, MOST)
    places: NDArray[np.int64] = (np.log(clipped / LEAST) / _LOG).astype(np.int64) + 1
    places[values < LEAST] = 0
    return places


def middle(place: int) -> float:
    """What a number in that bin counts as."""
    return 0.0 if place == 0 else LEAST * RATIO ** (place - 0.5)
