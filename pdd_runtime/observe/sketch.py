"""A distribution in few numbers: counts by logarithmic buckets, which add up."""

from __future__ import annotations

import math

import msgspec

ERROR = 0.01
"""A quantile is right to this part of itself."""
_RATIO = (1 + ERROR) / (1 - ERROR)
_LOG = math.log(_RATIO)
_LEAST = 1e-6
"""What is smaller counts as this."""


class Sketch(msgspec.Struct):
    """Of positive values. Buckets' bounds grow by a constant ratio, so that a quantile's relative error is bounded, and
    two sketches are merged without a loss (Masson, Rim and Lee, "DDSketch", VLDB 2019)."""

    buckets: dict[int, int] = {}
    """Values by bucket."""
    count: int = 0
    total: float = 0.0
    """Their sum."""

    def add(self, value: float) -> None:
        bucket = math.ceil(math.log(max(value, _LEAST)) / _LOG)
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1
        self.count += 1
        self.total += value

    def merge(self, other: Sketch) -> None:
        """Take in another's values."""
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count
        self.count += other.count
        self.total += other.total

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """None: there are no values."""
        return self.at(max(1, math.ceil(q * self.count))) if self.count else None

    def at_least(self, value: float) -> int:
        """How many values are as large, or larger."""
        own = math.ceil(math.log(max(value, _LEAST)) / _LOG)
        return sum(count for bucket, count in self.buckets.items() if bucket >= own)

    def at(self, rank: int) -> float:
        """The value of that rank, from 1. Raises `IndexError` where there are fewer."""
        seen = 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= rank:
                return 2 * math.exp(bucket * _LOG) / (_RATIO + 1)
        raise IndexError(f"{self.count} values have no rank {rank}")
