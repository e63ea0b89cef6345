"""Times of single requests, as the promise counts them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from pdd_runtime.planner.simulate import Outcome

NEVER = 1e6
"""Seconds after which who was refused gets a first token: among the P90 they are late."""


class Times:
    """What one simulation's requests were like."""

    def __init__(self, decoded: bool) -> None:
        self.ttft: list[float] = []
        self.tpot: list[float] = []
        self.refused = 0
        self.reads: list[tuple[int, int]] = []
        """Of each prompt, the tokens that prefill computed, and those that it had."""
        self._decoded = decoded

    def __call__(self, outcome: Outcome) -> None:
        first, behind = outcome.ttft, outcome.output - 1
        if self._decoded and outcome.tt2 is not None:
            first, behind = outcome.tt2, outcome.output - 2
        if first is None:
            self.refused += 1
        else:
            self.ttft.append(first)
            self.reads.append((outcome.prompt - outcome.prefill_cached, outcome.prefill_cached))
        if first is not None and outcome.e2e is not None and behind > 0:
            self.tpot.append((outcome.e2e - first) / behind)


def percentiles(seconds: Sequence[float], refused: int = 0) -> dict[str, float]:
    """Empty where nobody has any. Those who were refused count in P90, which is promised."""
    if not seconds:
        return {}
    p50, p99 = np.quantile(seconds, (0.5, 0.99)).tolist()
    p90 = float(np.quantile([*seconds, *[NEVER] * refused], 0.9, method="inverted_cdf"))
    return {"mean": statistics.fmean(seconds), "p50": p50, "p90": p90, "p99": p99}
