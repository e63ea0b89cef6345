"""What runs of the same length show: their median, and between which values 95 of 100 lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Interval:
    middle: float
    low: float
    high: float

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        return f"{self.middle * scale:.{digits}f} [{self.low * scale:.{digits}f}, {self.high * scale:.{digits}f}]"


def interval(values: Sequence[float]) -> Interval:
    low, middle, high = np.quantile(np.asarray(values, float), [0.025, 0.5, 0.975])
    return Interval(float(middle), float(low), float(high))
