"""Mean and percentiles, with bootstrap confidence intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from pdd_runtime.errors import PddError

LEVEL = 0.95
"""Of the confidence intervals."""
_RESAMPLES = 2000
_BATCH = 4_000_000
"""Numbers that are resampled at once: 32 MB."""

Statistic = Callable[..., Any]
STATISTICS: dict[str, Statistic] = {
    "mean": np.mean,
    "p50": partial(np.percentile, q=50),
    "p90": partial(np.percentile, q=90),
    "p99": partial(np.percentile, q=99),
}
Summary = dict[str, float | None]
Intervals = dict[str, tuple[float, float] | None]


def require_scipy() -> None:
    """Raises `PddError` where it is not installed: before a measurement, not behind it."""
    if find_spec("scipy") is None:
        raise PddError(
            "bench needs scipy", why="confidence intervals come from it", fix="pip install 'pdd-runtime[bench]'"
        )


def summary(values: Sequence[float]) -> Summary:
    """Each statistic; None where there is no value."""
    return {name: float(statistic(values)) if values else None for name, statistic in STATISTICS.items()}


def intervals(values: Sequence[float]) -> Intervals:
    """Of each statistic; None where there are fewer than two values."""
    return {name: _bootstrap(partial(_one, statistic), values) for name, statistic in STATISTICS.items()}


def ratio(base: Mapping[Any, float], other: Mapping[Any, float]) -> tuple[Summary, Intervals]:
    """`other` over `base`, by the requests that both have, with intervals that resample those as pairs: what is long
    for all graphs alike then makes no ratio uncertain."""
    common = [key for key in base if key in other]
    a, b = [base[key] for key in common], [other[key] for key in common]
    point: Summary = {}
    around: Intervals = {}
    for name, statistic in STATISTICS.items():
        below = float(statistic(a)) if common else 0.0
        point[name] = float(statistic(b)) / below if below else None
        around[name] = _bootstrap(partial(_ratio, statistic), a, b) if below else None
    return point, around


def _one(statistic: Statistic, x: Any, axis: int = -1) -> Any:
    return statistic(x, axis=axis)


def _ratio(statistic: Statistic, x: Any, y: Any, axis: int = -1) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return statistic(y, axis=axis) / statistic(x, axis=axis)


def _bootstrap(statistic: Statistic, *samples: Sequence[float]) -> tuple[float, float] | None:
    from scipy.stats import bootstrap

    if len(samples[0]) < 2:
        return None
    result = bootstrap(
        samples,
        statistic,
        paired=len(samples) > 1,
        vectorized=True,
        n_resamples=_RESAMPLES,
        batch=max(1, _BATCH // len(samples[0])),
        confidence_level=LEVEL,
        # BCa asks for the statistic's jackknife, in which a percentile hardly moves.
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = (float(end) for end in result.confidence_interval)
    return (low, high) if np.isfinite([low, high]).all() else None
