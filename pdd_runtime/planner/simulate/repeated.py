"""Several runs of one scenario, and how sure what they found together is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pdd_runtime.planner.simulate.outcome import METRICS
from pdd_runtime.planner.simulate.simulated import Metric, Simulated

LEVEL = 0.95
"""Of the confidence intervals."""
_NORMAL = 1.959963984540054
_FEW = {1: 12.7062, 2: 4.30265}
"""Student's t at `LEVEL` where the expansion is not good enough."""


@dataclass(frozen=True)
class Interval:
    """A figure's mean over seeds, and where its true mean lies with 95 % confidence. One run has no interval."""

    mean: float
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, float | None]:
        return {"mean": self.mean, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Repeated:
    """One run for each seed. They are independent, so a figure's mean over them is as sure as Student's t says."""

    runs: tuple[Simulated, ...]

    def interval(self, figure: Callable[[Simulated], float | None]) -> Interval | None:
        """Of any figure, e.g. `lambda run: run.ttft.p90`; None where no run has it."""
        values = [value for run in self.runs if (value := figure(run)) is not None]
        return interval(values) if values else None

    def metric(self, name: str, statistic: str) -> Interval | None:
        """Of one of `METRICS`: its mean, p50, p90 or p99."""
        return self.interval(lambda run: getattr(getattr(run, name), statistic))

    def to_json(self) -> dict[str, Any]:
        def of(figures: Callable[[Simulated], dict[str, Any]]) -> dict[str, Any]:
            """Of each figure of a table."""
            return {name: _told([figures(run)[name] for run in self.runs]) for name in figures(self.runs[0])}

        return {
            "level": LEVEL,
            **{metric: of(partial(_statistics, metric)) for metric in METRICS},
            **of(lambda run: {"relay_share": run.relay_share, "achieved_rate": run.achieved_rate}),
            "utilisation": of(lambda run: run.utilisation),
            "link_bytes": of(lambda run: run.link_bytes),
            "runs": [run.to_json() for run in self.runs],
        }


def _statistics(metric: str, run: Simulated) -> dict[str, float | None]:
    found: Metric = getattr(run, metric)
    return found.to_json()


def _told(values: list[float | None]) -> dict[str, float | None] | None:
    there = [value for value in values if value is not None]
    return interval(there).to_json() if there else None


def interval(values: list[float]) -> Interval:
    """Of independent values of one figure; at least one."""
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Interval(mean, None, None)
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
    far = student(count - 1) * error
    return Interval(mean, mean - far, mean + far)


def student(freedom: int) -> float:
    """The quantile of Student's t that `LEVEL` lies within on both sides, to 0.1 %: Cornish and Fisher's expansion
    (Abramowitz and Stegun 26.7.5)."""
    if freedom in _FEW:
        return _FEW[freedom]
    x, n = _NORMAL, float(freedom)
    return (
        x
        + (x**3 + x) / (4 * n)
        + (5 * x**5 + 16 * x**3 + 3 * x) / (96 * n**2)
        + (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / (384 * n**3)
        + (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / (92160 * n**4)
    )
