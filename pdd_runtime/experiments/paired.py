"""Numbers of two graphs, compared over requests that both were sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdd_runtime.experiments.outcome import METRICS

_RESAMPLES = 500
"""Gives a standard error to 3 %."""
_BATCH = 4_000_000
"""Weights that are held at once: 32 MB."""
_BEYOND = 5
"""Requests that have to lie behind a percentile: with fewer, resampling cannot tell how uncertain it is."""
_FEWEST_BLOCKS = 4
_NOTHING = 1e-12
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
STATISTICS = ("typical", "mean", *QUANTILES)
"""`typical` is the geometric mean. Its ratio is that of a pair, on average, so it shows the smallest differences; a
median's is as uncertain as requests are unlike each other."""

Key = tuple[int, int]
Values = Mapping[str, Mapping[Key, float]]
"""Metric to its value for each request that has it."""
Array = NDArray[np.float64]
_Statistic = Callable[[Array], Array]
"""Of how often each block counts, `[resamples, blocks]`; gives `[resamples]`."""


class Question(NamedTuple):
    """What there is to be a verdict on."""

    metric: str
    statistic: str

    def __str__(self) -> str:
        return f"{self.metric}.{self.statistic}"

    @classmethod
    def parse(cls, text: str) -> Question:
        """`ttft.p90`. Raises `ValueError`."""
        metric, _, statistic = text.strip().partition(".")
        if metric not in METRICS:
            raise ValueError(f'"{metric}" is no metric: they are {", ".join(METRICS)}')
        if statistic not in STATISTICS:
            raise ValueError(f'"{statistic}" is no statistic of {metric}: they are {", ".join(STATISTICS)}')
        return cls(metric, statistic)

    @property
    def fewest(self) -> int:
        """Requests without which there is no verdict."""
        share = QUANTILES.get(self.statistic, 0.5)
        return round(_BEYOND / (1 - max(share, 1 - share)))


@dataclass(frozen=True)
class Effect:
    """A statistic of two graphs, and how sure it is."""

    base: float
    other: float
    difference_error: float
    """Standard error of `other - base`."""
    ratio_error: float
    """Standard error of the logarithm of `other / base`."""
    requests: int
    blocks: int

    @property
    def difference(self) -> float:
        return self.other - self.base

    @property
    def ratio(self) -> float:
        return self.other / self.base

    def ratio_interval(self, critical: float) -> tuple[float, float]:
        """`critical` standard errors to either side, by the logarithm."""
        reach = self._reach(critical, self.ratio_error)
        wide = exp(reach) if reach < 700 else inf
        return self.ratio / wide, self.ratio * wide

    def difference_interval(self, critical: float) -> tuple[float, float]:
        reach = self._reach(critical, self.difference_error)
        return self.difference - reach, self.difference + reach

    def _reach(self, critical: float, error: float) -> float:
        """As far as `critical` goes where the error itself is known, for one that was estimated from `blocks`: by
        Student's t instead of the normal distribution."""
        from scipy.stats import norm, t

        if self.blocks < _FEWEST_BLOCKS:
            return inf
        return float(t.isf(norm.sf(critical), self.blocks - 1)) * error if error else 0.0


def effects(
    base: Values, other: Values, blocks: Mapping[Key, int], questions: Sequence[Question]
) -> dict[Question, Effect]:
    """Over the requests that both have; a question without any, or with a statistic that is not above 0, is left out.

    `blocks` says which requests are not independent of each other: one that is slow delays the next. So whole blocks
    are resampled, for both graphs alike, by the bootstrap of `scipy.stats`."""
    common = {
        question: [key for key in base[question.metric] if key in other[question.metric]] for question in questions
    }
    number = {
        block: index for index, block in enumerate(sorted({blocks[key] for keys in common.values() for key in keys}))
    }
    pairs: dict[Question, tuple[_Statistic, _Statistic]] = {}
    points: dict[Question, tuple[float, float]] = {}
    once = np.ones((1, len(number)))
    for question, keys in common.items():
        block = np.array([number[blocks[key]] for key in keys], dtype=np.int64)
        below, above = (
            _of_weights(np.array([side[question.metric][key] for key in keys]), block, len(number), question.statistic)
            for side in (base, other)
        )
        if keys and (point := (float(below(once)[0]), float(above(once)[0]))) and min(point) > 0:
            points[question], pairs[question] = point, (below, above)
    errors = _standard_errors(list(pairs.values()), len(number), max(map(len, common.values()), default=1))
    return {
        question: Effect(
            *points[question],
            difference_error=errors[2 * index],
            ratio_error=errors[2 * index + 1],
            requests=len(common[question]),
            blocks=len({blocks[key] for key in common[question]}),
        )
        for index, question in enumerate(pairs)
    }


def paired_test(base: Mapping[Key, float], other: Mapping[Key, float]) -> float | None:
    """How likely pairs as unlike as these are where both graphs are alike: Wilcoxon's signed-rank test of the ratios,
    which asks about the typical request, not about percentiles. It holds for one look. None: too few pairs."""
    from scipy.stats import wilcoxon

    ratios = [log(other[key] / base[key]) for key in base if other.get(key, 0) > 0 and base[key] > 0]
    if len(ratios) < 2 or not any(ratios):
        return None
    return float(wilcoxon(ratios).pvalue)


def _standard_errors(pairs: Sequence[tuple[_Statistic, _Statistic]], blocks: int, requests: int) -> list[float]:
    """Of the difference and the logarithm of the ratio of each pair, two numbers a pair."""
    from scipy.stats import bootstrap

    if blocks < 2 or not pairs:
        return [inf] * (2 * len(pairs))

    def compared(drawn: NDArray[np.int64], axis: int = -1) -> Any:
        # The sample itself comes as one row without an axis of its own.
        rows = np.atleast_2d(drawn)
        flat = (rows + np.arange(len(rows))[:, None] * blocks).ravel()
        counts = np.bincount(flat, minlength=rows.size).reshape(rows.shape).astype(float)
        found = []
        for of_base, of_other in pairs:
            below, above = of_base(counts), of_other(counts)
            found += [above - below, np.log(above / below)]
        stacked = np.stack(found)
        return stacked if drawn.ndim > 1 else stacked[:, 0]

    result = bootstrap(
        (np.arange(blocks),),
        compared,
        vectorized=True,
        n_resamples=_RESAMPLES,
        batch=max(1, _BATCH // requests),
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return [float(error) for error in result.standard_error]


def _of_weights(values: Array, block: NDArray[np.int64], blocks: int, statistic: str) -> _Statistic:
    if statistic == "mean":
        return _mean(values, block, blocks)
    if statistic == "typical":
        with np.errstate(divide="ignore"):
            logarithm = _mean(np.log(values), block, blocks)
        return lambda counts: np.exp(logarithm(counts))
    share = QUANTILES[statistic]
    order = np.argsort(values, kind="stable")
    ordered, where = values[order], block[order]

    def quantile(counts: Array) -> Array:
        """The mean of the numbers to either side, so that the median is what everybody knows."""
        reached = np.cumsum(counts[:, where], axis=1)
        wanted, last = share * reached[:, -1:], len(ordered) - 1
        low = np.minimum((reached < wanted - 1e-9).sum(axis=1), last)
        high = np.minimum((reached <= wanted + 1e-9).sum(axis=1), last)
        found: Array = (ordered[low] + ordered[high]) / 2
        return found

    return quantile


def _mean(values: Array, block: NDArray[np.int64], blocks: int) -> _Statistic:
    size, total = np.bincount(block, minlength=blocks), np.bincount(block, values, minlength=blocks)
    # A resample without any block that has such a request says nothing of it.
    whole = values.mean() if len(values) else 0.0
    return lambda counts: (counts @ total + whole * _NOTHING) / (counts @ size + _NOTHING)
